"""Module: a torch module that is built from a Config and says what each of its parameters is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from hyper_parallel.config.configurable import Configurable
from hyper_parallel.protocols.initializer import Initializer
from hyper_parallel.protocols.roles import Role
from hyper_parallel.protocols.sharding import ShardingConfig


class Module(nn.Module, Configurable):
    """Base of every layer of our models. Parameters are made by `add_parameter`, never by assignment."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Base of every layer's Config."""

        sharding: ShardingConfig | None = None
        """Where the layer's states live and what crosses its boundary. None: replicated, nothing moved."""

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
            if not isinstance(owner, Module) or leaf not in owner.param_init or leaf not in owner.parameter_roles
        ]
        if offenders:
            raise TypeError(
                f"{type(self).__name__}: no initialiser or role is declared for {', '.join(offenders)}; "
                "make parameters with Module.add_parameter"
            )


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
