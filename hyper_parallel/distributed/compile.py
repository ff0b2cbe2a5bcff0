"""torch.compile, one graph a block: equal blocks share one compilation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from hyper_parallel.config.errors import ConfigError
from hyper_parallel.config.sections import CompileConfig
from hyper_parallel.platform import get_platform
from hyper_parallel.protocols.model import BaseModel


def apply_compile(model: BaseModel, config: CompileConfig, memory_budget: float | None = None) -> None:
    """Compiles the forward of every block of `model`, in place. FSDP's hooks stay outside the graph.

    Args:
        memory_budget: what a graph may keep for its backward, as a share of what it would. None: all that it would.

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
    compiler = backend if memory_budget is None else _within_budget(backend, memory_budget)
    for block in model.blocks():
        for module in block.modules():
            for name in getattr(module, "eager_methods", ()):
                setattr(module, name, torch.compiler.disable(getattr(module, name)))
        block.forward = torch.compile(block.forward, backend=compiler, fullgraph=config.fullgraph)


@functools.cache  # what is compiled is kept by compiler, and equal blocks of all parts of a model share it
def _within_budget(backend: str, budget: float) -> Callable[..., Any]:
    """`backend`, asking for `budget` where it splits a graph into forward and backward."""
    from torch._functorch import config as functorch_config

    # The only script objects in our graphs are process groups, which hold no activations.
    changes = {"activation_memory_budget": budget, "unsafe_treat_script_objects_as_zero_size": True}

    def compiler(graph: Any, inputs: Any) -> Any:
        with functorch_config.patch(changes):
            return torch._dynamo.lookup_backend(backend)(graph, inputs)

    return compiler
