"""Computations of the user's in the place of a module's forward, on what each rank has of its tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from hyper_parallel.config.configurable import Buildable
from hyper_parallel.config.errors import ConfigError
from hyper_parallel.config.target import Target
from hyper_parallel.protocols.override_factories import FactoryT, marked, takes_any

if TYPE_CHECKING:
    from hyper_parallel.distributed.parallel_dims import ParallelDims


def local_compute(factory: FactoryT) -> FactoryT:
    """Marks ``factory(mesh, tp_mesh, cp_mesh, ep_mesh) -> compute(module, *args)``, where `args` are all those of
    the module's forward in their order, with their defaults; those behind `*` go by name.

    Raises:
        TypeError: the signature is another one.
    """
    return marked(factory, "local_compute")


def inner_wrapper(factory: FactoryT) -> FactoryT:
    """Marks ``factory(target_module, mesh, tp_mesh, cp_mesh, ep_mesh) -> compute(*args)``, where `args` are all
    those of the forward of `target_module` in their order, with their defaults; those behind `*` go by name.

    Raises:
        TypeError: the signature is another one.
    """
    return marked(factory, "inner_wrapper")


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectedCompute:
    """What an override puts in the place of the forward of a module, within its boundary."""

    factory: Buildable[Callable[..., Any]]
    kind: Literal["local_compute", "inner_wrapper"]
    path: str
    """Of the override's field, for messages."""

    @property
    def name(self) -> str:
        """Of the factory."""
        return self.factory.target_path if isinstance(self.factory, Target) else type(self.factory).__qualname__

    def forward_of(self, module: nn.Module, name: str, parallel_dims: ParallelDims) -> Callable[..., Any]:
        """What runs when `module`, whose name in the model is `name`, is called.

        Raises:
            ConfigError: HP-REPLACE-002, the factory refuses the module, or made what cannot be called as it is.
        """
        meshes: dict[str, Any] = {
            "mesh": parallel_dims.meshes[0],
            "tp_mesh": parallel_dims.tp_mesh,
            "cp_mesh": parallel_dims.cp_mesh,
            "ep_mesh": parallel_dims.ep_mesh,
        }
        target = {} if self.kind == "local_compute" else {"target_module": module}
        try:
            compute = self.factory.build(**target, **meshes)
        except ConfigError as error:  # of the module, which it has no path for
            facts = [(f"[HP-REPLACE-002] {name}: {fault.fact}", fault) for fault in error.faults]
            raise ConfigError(replace(fault, path=self.path, fact=fact) for fact, fault in facts) from error
        if self.kind == "local_compute" and callable(compute):
            compute = partial(compute, module)
        signature = inspect.signature(module.forward)
        if fact := _call_fault(compute, signature):
            remedy = "return a function of the arguments of the module's forward"
            remedy += ", with the module before them" if self.kind == "local_compute" else ""
            raise ConfigError.one(self.path, f"[HP-REPLACE-002] {name}: {fact}", remedy)

        def forward(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return compute(*bound.args, **bound.kwargs)

        forward.__signature__ = signature  # type: ignore[attr-defined]
        return forward


def named_arguments(signature: inspect.Signature) -> Sequence[str]:
    """Those that a call may give by position."""
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in signature.parameters.values() if p.kind in by_position]


def _call_fault(compute: Any, signature: inspect.Signature) -> str | None:
    """Why `compute` cannot be called with the arguments of `signature`. None: it can."""
    if not callable(compute):
        return f"the factory made a {type(compute).__name__}, not a function"
    try:
        own = inspect.signature(compute)
    except ValueError:
        return "the signature of the function cannot be read"
    names = named_arguments(signature)
    by_name = [p.name for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]
    try:
        own.bind(*names, **dict.fromkeys(by_name))
    except TypeError as error:
        called = ", ".join([*names, *(f"{name}=" for name in by_name)])
        return f"the function takes {', '.join(own.parameters)}, and is called with {called}: {error}"
    if takes_any(signature) and not takes_any(own):
        return "the function takes no **kwargs, and the module is called with some"
    return None
