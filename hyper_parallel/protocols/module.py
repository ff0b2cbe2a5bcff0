"""Module: a torch module that is built from a Config and says what each of its parameters is."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from hyper_parallel.config.configurable import Configurable, setting
from hyper_parallel.protocols.boundary import Mode, bind_boundary, bind_root, read_states_locally, shard_states
from hyper_parallel.protocols.initializer import Initializer
from hyper_parallel.protocols.mesh import MeshAxisName
from hyper_parallel.protocols.planned_module import PlannedModule, planned
from hyper_parallel.protocols.roles import Role
from hyper_parallel.protocols.sharding import ShardingConfig, ShardingPlan, names_some, plan_of

if TYPE_CHECKING:
    from hyper_parallel.distributed.parallel_dims import ParallelDims


class Module(PlannedModule, Configurable):
    """Base of every layer of our models. Parameters are made by `add_parameter`, never by assignment."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Base of every layer's Config."""

        sharding: ShardingPlan = setting(default_factory=dict, hidden=True)
        """Where states live and what crosses boundaries, of this layer ("") and of those below it, by name. Filled in
        the run's private copy, from the degrees of parallelism."""

    eager_methods: ClassVar[tuple[str, ...]] = ()
    """Methods that torch.compile leaves out of its graphs."""
    param_init: dict[str, Initializer]
    """How each parameter that this module itself owns gets its first values."""
    parameter_roles: dict[str, Role]
    """What each parameter that this module itself owns is for."""

    def __init__(self, config: Configurable.Config) -> None:
        super().__init__()
        self.config = config
        self.param_init = {}
        self.parameter_roles = {}

    def add_parameter(self, name: str, *shape: int, role: Role, init: Initializer) -> None:
        """Registers an uninitialised parameter of `shape`, in the default dtype and on the current device."""
        self.register_parameter(name, nn.Parameter(torch.empty(shape)))
        self.param_init[name] = init
        self.parameter_roles[name] = role

    def verify_module_protocol(self) -> None:
        """Checks that every parameter of the tree has a declared initialiser and role.

        Raises:
            TypeError: naming every parameter that has not. Such a parameter would start from whatever the memory held.
        """
        offenders = [
            f"{name} (of {type(owner).__name__})"
            for name, owner, leaf in _owned_parameters(self)
            if leaf not in getattr(owner, "param_init", ()) or leaf not in getattr(owner, "parameter_roles", ())
        ]
        if offenders:
            raise TypeError(
                f"{type(self).__name__}: no initialiser or role is declared for {', '.join(offenders)}; "
                "make parameters with Module.add_parameter"
            )

    def parallelize(self, parallel_dims: ParallelDims, mode: Mode) -> None:
        """Applies the plan in `config.sharding` over the tensor-, context- and expert-parallel axes that the run has,
        in place.

        production: below here every tensor is local, and only what the plan declares is communicated. validate:
        DTensors propagate over the tensor-parallel axis and each boundary is compared with the plan, except below a
        module with a `local_map`. Over the other two tensors are local in both: neither the parts of rows nor the
        tokens of some experts are a placement of a DTensor.

        Raises:
            TypeError: see `check_plan`.
            ConfigError: see `InjectedCompute.forward_of`.
        """
        over_tokens = {MeshAxisName.CP: parallel_dims.cp_mesh, MeshAxisName.EP: parallel_dims.ep_mesh}
        if parallel_dims.tp_mesh is None and not any(over_tokens.values()):
            return
        self.check_plan()
        plans = self._plans()
        for name, module, own in plans:
            if own is not None and own.compute is not None:
                module.forward = own.compute.forward_of(module, name, parallel_dims)
        for axis, mesh in over_tokens.items():
            for name, module, own in plans:
                if own is not None and mesh is not None:
                    bind_boundary(module, name, own, axis, mesh, "production")
        _parallelize_matrices(plans, parallel_dims, mode)
        if parallel_dims.tp_mesh is not None and mode == "validate":
            bind_root(self)

    def check_plan(self) -> None:
        """Compares the plan in `config.sharding` with the modules that there are.

        Raises:
            TypeError: a parameter is in no plan, so its gradients could differ between ranks; or a plan names a
                module or an argument that is not there. All of them are named.
        """
        plans = self._plans()
        faults = [
            f"parameter {name}.{leaf} is in no plan"
            for name, module, own in plans
            for leaf, _ in module.named_parameters(recurse=False)
            if own is None or leaf not in own.state_shardings
        ]
        faults += [
            f"{name}.forward has no argument {argument!r}"
            for name, module, own in plans
            if own is not None
            for argument in own.in_src
            if argument not in inspect.signature(module.forward).parameters
        ]
        faults += [f"{pattern!r} names no module" for pattern in self._absent_patterns()]
        if faults:
            raise TypeError(f"sharding plan: {'; '.join(faults)}")

    def forget_absent_plans(self) -> None:
        """Of a part of a model: drops the plans of modules that other parts have. They are checked on the whole."""
        for pattern in self._absent_patterns():
            del self._sharding()[pattern]

    def _sharding(self) -> ShardingPlan:
        assert isinstance(self.config, Module.Config)
        return self.config.sharding

    def _plans(self) -> list[tuple[str, nn.Module, ShardingConfig | None]]:
        return [(name, module, plan_of(name, self._sharding())) for name, module in self.named_modules()]

    def _absent_patterns(self) -> list[str]:
        """Those of the plan that fit no module."""
        names = {name for name, _ in self.named_modules()}
        return [pattern for pattern in self._sharding() if not names_some(pattern, names)]


def _parallelize_matrices(
    plans: list[tuple[str, nn.Module, ShardingConfig | None]], parallel_dims: ParallelDims, mode: Mode
) -> None:
    tp_mesh, expert_mesh = parallel_dims.tp_mesh, parallel_dims.expert_mesh
    local_roots: list[str] = []
    for name, module, own in plans:
        if own is None:
            continue
        mesh = expert_mesh if expert_mesh is not None and own.spreads_experts else tp_mesh
        if mesh is not None and own.state_shardings:
            shard_states(planned(module), own, mesh)
        is_below_local = any(name.startswith(f"{root}.") for root in local_roots)
        if own.local_map is not None:
            local_roots.append(name)
        if mode == "production" or own.local_map is not None or is_below_local:
            if mesh is not None and own.state_shardings:
                read_states_locally(planned(module), own, mesh)
            if tp_mesh is not None:
                for size in own.sizes_per_rank:
                    setattr(module, size, getattr(module, size) // tp_mesh.size())
        if tp_mesh is not None:
            bind_boundary(module, name, own, MeshAxisName.TP, tp_mesh, "production" if is_below_local else mode)


def hand_on_declarations(old: nn.Module, new: nn.Module) -> None:
    """Has `new`, which holds the parameters of `old` and need not be a Module, say of them what `old` says."""
    declared = {id(owner._parameters[leaf]): (owner, leaf) for _, owner, leaf in _owned_parameters(old)}
    for _, owner, leaf in _owned_parameters(new):
        before, name = declared[id(owner._parameters[leaf])]
        for what in ("param_init", "parameter_roles"):
            said = getattr(before, what, {})
            if name in said and leaf not in (saying := getattr(owner, what, {})):
                setattr(owner, what, {**saying, leaf: said[name]})


def canonical_name(name: str) -> str:
    """The name of a parameter or module in the plain model, without the parts that wrappers put in."""
    wrappers = ("_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module")
    return ".".join(part for part in name.split(".") if part not in wrappers)


def _owned_parameters(root: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yields (canonical name, owner, name in the owner) of every parameter below `root`."""
    for prefix, module in root.named_modules():
        for leaf in module._parameters:
            if module._parameters[leaf] is not None:
                yield canonical_name(f"{prefix}.{leaf}" if prefix else leaf), module, leaf
