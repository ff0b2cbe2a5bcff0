"""Recompute: keep little of a block's forward and run it again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from hyper_parallel.config.errors import Fault
from hyper_parallel.config.sections import ActivationCheckpointConfig, CompileConfig
from hyper_parallel.distributed.activation_swap import swapping
from hyper_parallel.distributed.saved_operators import operator_faults, save_policy
from hyper_parallel.protocols.model import BaseModel

BUDGET_BACKENDS = ("inductor", "aot_eager")
"""Backends of torch.compile that ask for the memory budget when they split a graph into forward and backward."""


def apply_activation_checkpoint(model: BaseModel, config: ActivationCheckpointConfig) -> None:
    """Makes the blocks of `model` recompute or swap their activations, in place. Parameter names stay as they are.

    A memory budget is the compiler's to keep (`apply_compile`). The forward is what changes, and no module is put
    around it: initial values and checkpoints go by parameter names.
    """
    blocks = model.blocks()
    if config.mode in ("full", "selective"):
        for block in blocks[:: config.every_n_layers]:
            block.forward = _recomputing(block, config)
    if config.swap:
        for block in blocks:
            block.forward = swapping(block)


def activation_checkpoint_faults(config: ActivationCheckpointConfig, compile: CompileConfig) -> Iterator[Fault]:
    """What the section cannot see alone: the compiler, and which operators there are."""
    if config.mode == "memory_budget" and not compile.enable:
        fact = "memory_budget, but compile.enable is False: torch.compile is what keeps to a budget"
        yield Fault("activation_checkpoint.mode", fact, "set compile.enable True, or mode full or selective")
    elif config.mode == "memory_budget" and compile.backend not in BUDGET_BACKENDS:
        fact = f"{compile.backend} does not keep to activation_checkpoint.memory_budget {config.memory_budget}"
        yield Fault("compile.backend", fact, f"name one that does: {', '.join(BUDGET_BACKENDS)}")
    if config.mode == "selective":
        yield from operator_faults(config.save_ops, "activation_checkpoint.save_ops")


def _recomputing(block: nn.Module, config: ActivationCheckpointConfig) -> Callable[..., Any]:
    options: dict[str, Any] = {}
    if config.mode == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, save_policy(config.save_ops))
    return partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=True, **options)
