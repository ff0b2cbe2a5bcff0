"""torch.compile, one graph a block: equal blocks share one compilation."""

from __future__ import annotations

import torch

from hyper_parallel.config.errors import ConfigError
from hyper_parallel.config.sections import CompileConfig
from hyper_parallel.platform import get_platform
from hyper_parallel.protocols.model import BaseModel


def apply_compile(model: BaseModel, config: CompileConfig) -> None:
    """Compiles the forward of every block of `model`, in place. FSDP's hooks stay outside the graph.

    Raises:
        ConfigError: this device has no such backend.
    """
    if not config.enable:
        return
    backend = get_platform().compile_backend(config.backend)
    if backend is None:
        raise ConfigError.one(
            "compile.backend",
            f"{config.backend} does not compile for {get_platform().name}",
            "name a backend that does, or set compile.enable False",
        )
    for block in model.blocks():
        for module in block.modules():
            for name in getattr(module, "eager_methods", ()):
                setattr(module, name, torch.compiler.disable(getattr(module, name)))
        block.forward = torch.compile(block.forward, backend=backend, fullgraph=config.fullgraph)
