"""Recompute: keep little of a block's forward and run it again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

from torch import nn
from torch.utils._python_dispatch import _pop_mode_temporarily
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from hyper_parallel.config.errors import Fault
from hyper_parallel.config.sections import ActivationCheckpointConfig, CompileConfig
from hyper_parallel.distributed.activation_swap import swapping
from hyper_parallel.distributed.kept_values import kept_values
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
    contexts: Callable[[], tuple[Any, Any]] = kept_values
    if config.mode == "selective":
        contexts = partial(_selective_contexts, save_policy(config.save_ops))
    return partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=True, context_fn=contexts)


def _selective_contexts(policy: Callable[..., CheckpointPolicy]) -> tuple[_Nested, _Nested]:
    """Contexts of a block's forward and of its recompute."""
    # Results are kept by how often an operator has run. What a recompute takes from the forward it does not run.
    kept = kept_values(apart=_pop_mode_temporarily)
    first, again = zip(kept, create_selective_checkpoint_contexts(policy), strict=True)
    return _Nested(first), _Nested(again)


class _Nested:
    """Several contexts as one that can be entered again."""

    def __init__(self, contexts: Sequence[AbstractContextManager[Any]]) -> None:
        self._contexts = contexts

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for context in self._contexts:
                stack.enter_context(context)
            self._exits = stack.pop_all()

    def __exit__(self, *error: Any) -> None:
        self._exits.__exit__(*error)
