"""Factories of the user's that plan_overrides name: how each kind is marked, and what the run passes to it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal, TypeVar

FactoryT = TypeVar("FactoryT", bound=Callable[..., Any])
Kind = Literal["module_replacement", "local_compute", "inner_wrapper"]

MESHES = ("mesh", "tp_mesh", "cp_mesh", "ep_mesh")
"""The mesh of all ranks, and that of each axis: None where the run has none of it."""
ARGUMENTS: dict[Kind, tuple[str, ...]] = {
    "module_replacement": ("module", "module_fqn", "context"),
    "local_compute": MESHES,
    "inner_wrapper": ("target_module", *MESHES),
}
"""What a factory of each kind takes, beside arguments of its own, which the override configures."""


def marked(factory: FactoryT, kind: Kind) -> FactoryT:
    """`factory` itself, as one of `kind`.

    Raises:
        TypeError: the signature is another one.
    """
    setattr(factory, f"_hp_{kind}", True)
    if fact := factory_fault(factory, kind):
        raise TypeError(f"@{kind}: {factory.__qualname__} {fact}")
    return factory


def factory_fault(factory: Callable[..., Any], kind: Kind) -> str | None:
    """What keeps `factory` from being one of `kind`. None: it is one."""
    if not getattr(factory, f"_hp_{kind}", False):
        return f"is not decorated with @{kind}"
    signature = inspect.signature(factory)
    if missing := [name for name in ARGUMENTS[kind] if name not in signature.parameters]:
        return f"does not take {', '.join(missing)}"
    return "takes **kwargs, in which mistakes would go unseen" if takes_any(signature) else None


def takes_any(signature: inspect.Signature) -> bool:
    """Whether it has a ``**kwargs``."""
    return any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
