"""How gradients lie over axis tp at a boundary that an override has rewritten."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Literal

from hyper_parallel.protocols.mesh import MeshAxisName
from hyper_parallel.protocols.sharding import NamedPlacement, ShardingConfig


def with_grads(
    entry: ShardingConfig, base: ShardingConfig | None, dividing: Collection[str], base_dividing: Collection[str]
) -> ShardingConfig:
    """`entry` with the gradients that fit what is written over axis tp: `base` derives those of its own placements.

    Of a tensor that is whole on each rank a rank has a summand of the gradient, where it makes a part of the output.

    Args:
        dividing: names of the modules within it, or it, of which each rank computes a part from the whole of what it is
            given, and that leave it to this boundary to sum the gradients.
        base_dividing: those by the model's plan: all of them are among `dividing`, or none.
    """
    from torch.distributed.tensor import Partial

    summand: NamedPlacement = {MeshAxisName.TP: Partial()}
    made, derived_made = _made(entry), None if base is None else _made(base)
    is_given_alike = base is not None and all(given(entry, name) == given(base, name) for name in base.in_src)
    if made is None and not is_given_alike and is_given_parts(entry):
        made = "parts"
    is_made_alike = base is not None and (made == derived_made or (made is None and is_given_alike))
    kept = {
        name
        for name, placement in entry.state_shardings.items()
        if is_made_alike and base is not None and base.state_shardings.get(name) == placement
    }
    in_grads: dict[str, NamedPlacement] = {}
    if base is not None and (dividing if base_dividing else is_made_alike):
        in_grads = {name: grad for name, grad in base.in_grads.items() if given(entry, name) == given(base, name)}
    if made in ("parts", "summands"):
        whole = {name for name in entry.in_src if not is_divided(given(entry, name))}
        if base_dividing:
            # Only a function of the user's makes parts by itself, and no layer around it sums for that.
            sums_all, gathered = entry.compute is not None and not dividing, set()
        else:
            # A layer around one that gives parts of features sums for it: for all that have an entry in the plan but
            # give none there. What it gathers is whole here alone, so that sum is its own.
            sums_all = not is_made_alike and (made == "summands" or base is not None)
            gathered = {name for name in whole if is_divided(entry.in_src[name])}
        in_grads |= dict.fromkeys(whole if sums_all else gathered, summand)
    state_grads = {
        name: summand
        for name, placement in entry.state_shardings.items()
        if name not in kept and made not in (None, "wholes") and not is_divided(placement)
    }
    if base is not None:
        state_grads |= {name: grad for name, grad in base.state_grads.items() if name in kept}
    return replace(entry, in_grads=in_grads, state_grads=state_grads)


def divides(entry: ShardingConfig) -> bool:
    """Whether each rank of axis tp computes a part from the whole of what it is given, by its part of the states."""
    return any(map(is_divided, entry.state_shardings.values())) and not is_given_parts(entry)


def is_given_parts(entry: ShardingConfig) -> bool:
    """Whether forward is given any argument that is divided over axis tp."""
    return any(is_divided(given(entry, argument)) for argument in entry.in_src)


def is_divided(placement: NamedPlacement | None) -> bool:
    """Whether ranks of axis tp have parts or summands. None, which is as it comes, is not known to be."""
    return MeshAxisName.TP in (placement or {})


def _made(entry: ShardingConfig) -> Literal["summands", "parts", "wholes", None]:
    """What each rank of axis tp makes of the outputs. None: the plan does not say."""
    said = [out for out in entry.out_src if out is not None]
    divided = [out[MeshAxisName.TP] for out in said if MeshAxisName.TP in out]
    if divided:
        return "summands" if any(placement.is_partial() for placement in divided) else "parts"
    return "wholes" if said else None


def given(entry: ShardingConfig, argument: str) -> NamedPlacement | None:
    """How forward is given it. None: as it comes."""
    return entry.in_dst.get(argument, entry.in_src.get(argument))
