"""Which operators' results selective recompute keeps: by kind, or by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

from hyper_parallel.config.errors import Fault

_MATMULS = {"mm", "addmm", "linear", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm", "grouped_linear_loop"}
_COLLECTIVES = {"all_reduce", "reduce_scatter_tensor", "all_to_all_single"}

KINDS: dict[str, Callable[[str, str], bool]] = {
    # Not batched products: where attention is written out, they are a score for each pair of tokens.
    "matmul": lambda namespace, name: name in _MATMULS,
    # Every device has kernels of its own, and all have the word in their name.
    "attention": lambda namespace, name: "attention" in name,
    "collective": lambda namespace, name: namespace == "_c10d_functional" and name in _COLLECTIVES,
}
"""Whether an operator `namespace::name` is of a kind."""


def operator_faults(names: Sequence[str], path: str) -> Iterator[Fault]:
    """A fault for each of `names`, configured at `path`, that is neither a kind nor an operator that can be kept."""
    for name in names:
        if name in KINDS:
            continue
        operator = _operator(name)
        if operator is None:
            remedy = f"give a kind ({', '.join(KINDS)}), or namespace.name.overload as in aten.topk.default"
            yield Fault(path, f"{name} is no operator of torch", remedy)
        elif operator._schema.is_mutable:
            fact = f"{name} writes into its arguments, so there is no result of it to keep"
            yield Fault(path, fact, "leave it out")


def save_policy(names: Sequence[str]) -> Callable[..., CheckpointPolicy]:
    """The policy that keeps what `names` say, for `create_selective_checkpoint_contexts`."""
    kinds = [KINDS[name] for name in names if name in KINDS]
    operators = {_operator(name) for name in names if name not in KINDS}

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator in operators or _is_of_a_kind(operator, kinds):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def _is_of_a_kind(operator: Any, kinds: Sequence[Callable[[str, str], bool]]) -> bool:
    if not isinstance(operator, torch._ops.OpOverload) or operator._schema.is_mutable:
        return False
    namespace, _, name = operator._schema.name.partition("::")
    return any(kind(namespace, name) for kind in kinds)


def _operator(name: str) -> torch._ops.OpOverload | None:
    """The operator called namespace.name.overload; None: there is none."""
    parts = name.split(".")
    if len(parts) != 3:
        return None
    try:
        operator = getattr(getattr(getattr(torch.ops, parts[0]), parts[1]), parts[2])
    except (AttributeError, RuntimeError):  # the latter where the name is not that of anything
        return None
    return operator if isinstance(operator, torch._ops.OpOverload) else None
