"""Values that a recomputed forward takes from the first one instead of making them again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar, Token
from typing import Any, TypeVar

ValueT = TypeVar("ValueT")


def keep(make: Callable[[], ValueT]) -> ValueT:
    """``make()``, without gradients. Where the block is recomputed, what it gave in the block's forward: so ranks agree
    once on what they exchange, and a recomputed forward asks nobody. A block must call it in the same order again."""
    kept = _CURRENT.get()
    return make() if kept is None else kept.next(make)


def kept_values(apart: Callable[[], AbstractContextManager[Any]] = nullcontext) -> tuple[_Kept, _Kept]:
    """The `context_fn` of `torch.utils.checkpoint.checkpoint`: contexts of the forward and of its recompute.

    Args:
        apart: what values are made in.
    """
    values: list[Any] = []
    return _Kept(values, apart), _Kept(values, apart)


class _Kept:
    """The values of one forward of a block. Every recompute, of which there may be several, begins with the first."""

    def __init__(self, values: list[Any], apart: Callable[[], AbstractContextManager[Any]]) -> None:
        self._values, self._place, self._apart = values, 0, apart

    def next(self, make: Callable[[], Any]) -> Any:
        if self._place == len(self._values):
            with self._apart():
                self._values.append(make())
        self._place += 1
        return self._values[self._place - 1]

    def __enter__(self) -> None:
        self._place = 0
        self._token: Token[_Kept | None] = _CURRENT.set(self)

    def __exit__(self, *_: object) -> None:
        _CURRENT.reset(self._token)


_CURRENT: ContextVar[_Kept | None] = ContextVar("kept", default=None)
