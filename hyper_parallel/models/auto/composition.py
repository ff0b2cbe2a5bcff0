"""Whether a model's own forward is its embedding, its base model and its output matrix, with nothing beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves

if TYPE_CHECKING:
    from hyper_parallel.models.auto.layout import Layout


def hidden_states(
    base: nn.Module, embedding: nn.Module, input_ids_BT: torch.Tensor, position_ids_BT: torch.Tensor, documents: Any
) -> torch.Tensor:
    """[B, T, C]: what the output matrix is given.

    Args:
        documents: `Rows.documents` of the batch, for the attention.
    """
    hidden_BTC: torch.Tensor = base(
        inputs_embeds=embedding(input_ids_BT), position_ids=position_ids_BT, use_cache=False, documents=documents
    ).last_hidden_state
    return hidden_BTC


def strange_composition(model: nn.Module, layout: Layout) -> str | None:
    """Why the logits of `model`, on meta, are not the output matrix of `hidden_states`. None: they are.

    Both are computed without numbers, by value numbering (Cocke and Schwartz, Programming Languages and Their
    Compilers, 1970): the same operator on the same operands gives the same value. A block is one operator on all
    tensors that it is given: what is in it does not run.
    """
    ids, positions = (torch.empty(2, 3, dtype=torch.int64, device="meta") for _ in range(2))
    base, embedding, head = map(model.get_submodule, (layout.base, layout.embedding, layout.head))
    values = _Values()
    with values.opaque([model.get_submodule(name) for name in layout.blocks]):
        try:
            theirs = values.of(lambda: model(input_ids=ids, position_ids=positions, use_cache=False).logits)
            their_steps = values.steps
            ours = values.of(lambda: head(hidden_states(base, embedding, ids, positions, None)))
        except Exception as error:  # whatever the code of a family raises
            cause = " ".join(f"{type(error).__name__}: {error}".split())
            return f"cannot be followed from token ids to logits ({cause[:200]})"
    if theirs == ours:
        return None
    lone = [name for value, name in their_steps.items() if value not in values.steps]
    lone = lone or [name for value, name in values.steps.items() if value not in their_steps]
    return f"makes logits of token ids in another way than by {layout.base} and {layout.head} alone: from {lone[0]} on"


class _Values(TorchDispatchMode):
    """Numbers tensors by how they were computed."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: dict[int, str] = {}
        """The values of the last computation and their operators, in order."""
        self._written: list[int] = []  # those computed in place, which views of the same memory have got, too
        self._numbers: dict[Any, int] = {}  # by operator and operands
        self._seen: dict[int, tuple[torch.Tensor, int]] = {}  # by id; the tensor is kept, so that no id comes twice

    def of(self, compute: Callable[[], torch.Tensor]) -> Any:
        """What `compute` gives and does in place: equal if it is computed alike."""
        self.steps, self._written = {}, []
        with torch.no_grad(), self:
            result = compute()
        return self._number(result), self._written

    @contextmanager
    def opaque(self, blocks: Iterable[nn.Module]) -> Iterator[None]:
        """Within it, each of `blocks` is one operator, which gives hidden states alone."""
        blocks = list(blocks)
        for block in blocks:
            block.forward = partial(self._block, block)  # type: ignore[method-assign] # of this module alone
        try:
            yield
        finally:
            for block in blocks:
                del block.forward

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name == "_local_scalar_dense":  # a choice by numbers, such as whether documents are packed: there are none
            return False if args[0].dtype == torch.bool else 0
        operands, structure = tree_flatten((args, kwargs))
        key = (func, str(structure), *(self._number(x) if isinstance(x, torch.Tensor) else x for x in operands))
        out = func(*args, **kwargs)
        constants = ", ".join(str(x) for x in operands if isinstance(x, int | float))
        for i, result in enumerate(x for x in tree_leaves(out) if isinstance(x, torch.Tensor)):
            if _keeps_values(name, args, result):
                self._seen[id(result)] = result, self._number(args[0])
                continue
            value = self._note(result, (key, i))
            if not name.startswith("empty"):
                self.steps.setdefault(value, f"{name}({constants})")
            if func._schema.is_mutable:
                self._written.append(value)
        return out

    def _block(self, block: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        operands = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        result = torch.empty_like(args[0] if args else kwargs["hidden_states"])
        self.steps[self._note(result, (block, *map(self._number, operands)))] = type(block).__name__
        return result

    def _number(self, tensor: torch.Tensor) -> int:
        return self._seen[id(tensor)][1] if id(tensor) in self._seen else self._note(tensor, id(tensor))

    def _note(self, tensor: torch.Tensor, key: Any) -> int:
        value = self._numbers.setdefault(key, len(self._numbers))
        self._seen[id(tensor)] = tensor, value
        return value


def _keeps_values(name: str, args: Any, result: torch.Tensor) -> bool:
    """Whether `result` is the first operand again, or in a type that holds all its values."""
    if not args or not isinstance(args[0], torch.Tensor) or args[0].shape != result.shape:
        return False
    if name == "_to_copy":
        return torch.promote_types(args[0].dtype, result.dtype) == result.dtype
    if name in ("mul", "div"):
        return not isinstance(args[1], torch.Tensor) and bool(args[1] == 1)
    return name in ("alias", "clone", "detach", "expand", "slice", "view", "_unsafe_view")
