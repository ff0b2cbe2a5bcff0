"""torch.compile, one graph a block: equal blocks share one compilation."""

from __future__ import annotations

import torch

from hyper_parallel.config.sections import CompileConfig
from hyper_parallel.protocols.model import BaseModel


def apply_compile(model: BaseModel, config: CompileConfig) -> None:
    """Compiles the forward of every block of `model`, in place. FSDP's hooks stay outside the graph."""
    if not config.enable:
        return
    for block in model.blocks():
        block.forward = torch.compile(block.forward, backend=config.backend, fullgraph=config.fullgraph)
