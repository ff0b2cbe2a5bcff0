"""Where the states of a module live on a mesh, and what crosses its boundary: the plan, which is data."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hyper_parallel.config.errors import RunError
from hyper_parallel.protocols.mesh import MeshAxisName

if TYPE_CHECKING:
    from hyper_parallel.protocols.injected_compute import InjectedCompute

Placement = Any
"""A `torch.distributed.tensor.Placement`, whose import would cost half as much again as torch's."""

NamedPlacement = dict[MeshAxisName, Placement]
"""Placement of one tensor on each axis that it is laid out on. An axis that is not named is Replicate."""


@dataclass(kw_only=True, slots=True)
class LocalMap:
    """Forward runs on local tensors in every mode: `in_dst` says what they are, `out_src` what it makes of them."""

    forward: Callable[..., Any] | None = None
    """`(module, group, *args of forward)` for a computation that is not the module's own on smaller tensors; `group`
    is that of `axis`. None: the module's own forward."""
    axis: MeshAxisName = MeshAxisName.TP
    """The axis over whose ranks `forward` computes. Where a run has none of it, the module's own forward runs."""


@dataclass(kw_only=True, slots=True)
class ShardingConfig:
    """The plan of one module. An argument, parameter or output that it does not name is moved nowhere.

    A gradient is laid out like its tensor, unless said otherwise. `Partial` is said where each rank computes only a
    part of it: of a replicated tensor that meets a sharded one.
    """

    state_shardings: dict[str, NamedPlacement] = field(default_factory=dict)
    """Per parameter of the module itself: where it is kept. Those of spread experts name the axes ep and efsdp, all of
    them: FSDP stores them over ranks of their own."""
    state_grads: dict[str, NamedPlacement] = field(default_factory=dict)
    """Per parameter: how its gradient comes out of backward."""
    in_src: dict[str, NamedPlacement] = field(default_factory=dict)
    """Per argument of forward, a tensor or a tuple of them: how it arrives."""
    in_dst: dict[str, NamedPlacement] = field(default_factory=dict)
    """Per argument of `in_src`: what it is turned into before forward runs. Not named: as it arrives."""
    in_grads: dict[str, NamedPlacement] = field(default_factory=dict)
    """Per argument of `in_src`: how its gradient comes out of forward's backward."""
    out_src: tuple[NamedPlacement | None, ...] = ()
    """Per tensor of the output, in order: how forward leaves it. None, and tensors beyond: they are left as they are,
    whatever that is."""
    out_dst: tuple[NamedPlacement | None, ...] | None = None
    """Per tensor of `out_src`: what it is turned into behind the module. None: it is left, or all are."""
    local_map: LocalMap | None = None
    """None: in validate mode forward runs on DTensors, and its real output is compared with `out_src`."""
    compute: InjectedCompute | None = None
    """What runs in the place of forward, within the moves of all axes: a user's. None: forward, or that of
    `local_map`."""
    sizes_per_rank: tuple[str, ...] = ()
    """Attributes of the module that count features of which each rank of axis tp has a part: where forward runs on
    local tensors they are divided by the ranks."""

    def __post_init__(self) -> None:
        """Raises:
        TypeError: some parameters of a module name ep or efsdp, but not all of them both.
        """
        both = {MeshAxisName.EP, MeshAxisName.EFSDP}
        named = {name: placements.keys() & both for name, placements in self.state_shardings.items()}
        if any(named.values()) and (partly := [name for name, axes in named.items() if axes != both]):
            raise TypeError(
                f"sharding plan: {', '.join(partly)}: all parameters of a module with experts lie on both axes, ep and "
                "efsdp; name both, or move the parameter into a module of its own"
            )

    @property
    def spreads_experts(self) -> bool:
        """Whether the module's own parameters are experts, spread over axis ep where a run has it."""
        return any(MeshAxisName.EP in placements for placements in self.state_shardings.values())


ShardingPlan = dict[str, ShardingConfig]
"""Plans of a module ("") and of those below it, by name; `*` stands for one part of it, such as a layer's number."""


def plan_of(name: str, plan: ShardingPlan) -> ShardingConfig | None:
    """The entry of `plan` for the module `name`: that of its name, else the first that fits. None: it has none."""
    if name in plan:
        return plan[name]
    return next((own for pattern, own in plan.items() if "*" in pattern and _is_named_by(pattern, name)), None)


def names_some(pattern: str, names: Collection[str]) -> bool:
    """Whether `pattern` of a plan is about one of the modules `names`."""
    return pattern in names or any(_is_named_by(pattern, name) for name in names)


def _is_named_by(pattern: str, name: str) -> bool:
    """Whether `pattern` of a plan, in which * stands for one part, is about the module `name`."""
    parts, names = pattern.split("."), name.split(".")
    return len(parts) == len(names) and all(part in ("*", own) for part, own in zip(parts, names, strict=True))


class PlacementMismatchError(RunError):
    """A tensor is not laid out as the plan declares (parallelism.mode validate)."""

    def __init__(self, module: str, tensor: str, axis: str, *, declared: Placement, real: Placement) -> None:
        super().__init__(
            f"plan of module {module!r}: {tensor} is declared {declared!r} on mesh axis {str(axis)!r}, but it is "
            f"{real!r}; correct this module's entry in the sharding plan, or the out_dst of the module before it"
        )
        self.module, self.axis = module, str(axis)
