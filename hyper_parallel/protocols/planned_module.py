"""PlannedModule: a torch module that a sharding plan can be applied to, whoever wrote it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import nn

from hyper_parallel.protocols.sharding import Placement


class PlannedModule(nn.Module):
    """Reads its own parameters as the plan says: DTensors, or this rank's local tensors."""

    local_states: Mapping[str, list[Placement]] = {}
    """Parameters of this module itself that it reads as local tensors, and how their gradients are laid out."""
    efsdp_states: Mapping[str, Placement] = {}
    """Parameters of this module itself, spread experts, that FSDP shards over the axis efsdp, and how."""

    def __getattr__(self, name: str) -> Any:
        value: Any = super().__getattr__(name)
        gradient = self.local_states.get(name)
        # Outside of forward FSDP keeps parameters on more axes than the plan's: those are its own, not to be read.
        if gradient is None or value is None or len(value.placements) > len(gradient):
            return value
        return value.to_local(grad_placements=gradient)


def planned(module: nn.Module) -> PlannedModule:
    """`module` itself. One that is no PlannedModule becomes it in place, by a subclass of its class with its name."""
    if not isinstance(module, PlannedModule):
        module.__class__ = _planned_class(type(module))  # type: ignore[arg-type] # mypy looks for the hash of instances
    assert isinstance(module, PlannedModule)
    return module


@functools.cache
def _planned_class(cls: type[nn.Module]) -> type[PlannedModule]:
    return type(cls.__name__, (PlannedModule, cls), {"__module__": cls.__module__})
