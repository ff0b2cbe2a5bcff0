"""Callables of a user, importable by their dotted path."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Optional

if TYPE_CHECKING:
    from nowhere import Unknown

MARKER = object()


class ScaledLoss:
    """A loss of a user's project.

    Args:
        scale: Multiplies the
            loss.
        kind: How it is summed.
    """

    def __init__(
        self,
        model: Unknown,
        scale: float = 1.0,
        kind: Literal["on", "off"] = "on",
        *,
        betas: tuple[float, float] = (0.9, 0.99),
        names: list[str] = ["a"],  # noqa: B006
        marker: Any = MARKER,
    ) -> None:
        self.given = {"model": model, "scale": scale, "kind": kind, "betas": betas, "names": names, "marker": marker}


def needs_rate(rate: float, *, params: Any) -> tuple[float, Any]:
    return rate, params


def takes_any(rate: float = 0.1, **rest: Any) -> dict[str, Any]:
    return {"rate": rate, **rest}


def positional(size: int, /, other: int = 0) -> int:
    return size + other


def optional_positional(size: int = 1, /, other: int = 0) -> int:
    return size + other


def takes_reserved(build: int) -> int:
    return build


@dataclass
class Record:
    items: list[int] = field(default_factory=lambda: [1])


@dataclass
class Half:
    """A plain dataclass that refuses values by itself, and names a type for type checkers only."""

    part: float = 0.5
    of: Unknown = None

    def __post_init__(self) -> None:
        if self.part > 1:
            raise ValueError(f"{self.part} is more than all")


def takes_later(
    params: Any,
    size: int = None,  # noqa: RUF013
    halves: "list[Half]" = (),  # noqa: UP037
    half: Optional["Half"] = None,  # noqa: UP037, UP045
):
    """Defaults that are not what the annotations say, and annotations that are text within text."""


class Maker:
    @classmethod
    def make(cls, size: int = 2) -> int:
        return size


NOT_CALLABLE = 3
