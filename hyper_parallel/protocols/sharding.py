"""Where the states of a module live on a mesh, and what crosses its boundary."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hyper_parallel.protocols.mesh import MeshAxisName

Placement = Any
"""A `torch.distributed.tensor.Placement`, whose import would cost half as much again as torch's."""

NamedPlacement = dict[MeshAxisName, Placement]
"""Placement of one tensor on each axis that it is laid out on. An axis that is not named is Replicate."""


@dataclass(kw_only=True, slots=True)
class LocalMap:
    """Placements of the local tensors that a module's forward sees when it runs on them instead of DTensors."""

    in_placements: dict[str, NamedPlacement] = field(default_factory=dict)
    """Per argument of forward."""
    out_placements: tuple[NamedPlacement, ...] = ()
    """Per output, in order."""


@dataclass(kw_only=True, slots=True)
class ShardingConfig:
    """The plan of one module: data, applied by whoever parallelises the model."""

    state_shardings: dict[str, NamedPlacement] = field(default_factory=dict)
    """Per parameter or buffer of the module itself: where it is kept."""
    in_src: dict[str, NamedPlacement] = field(default_factory=dict)
    """Per argument of forward: how it arrives."""
    in_dst: dict[str, NamedPlacement] = field(default_factory=dict)
    """Per argument of forward: what it is turned into before forward runs."""
    out_src: NamedPlacement | None = None
    """How forward leaves its output. None: nothing is declared about it."""
    out_dst: NamedPlacement | None = None
    """What the output is turned into behind the module. None: left as it is."""
    local_map: LocalMap | None = None
    """Run forward on local tensors. None: on what `in_dst` gives."""
