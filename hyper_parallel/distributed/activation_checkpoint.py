"""Recompute: keep a block's input only and run its forward again in the backward pass."""

from __future__ import annotations

from functools import partial

from torch.utils.checkpoint import checkpoint

from hyper_parallel.config.sections import ActivationCheckpointConfig
from hyper_parallel.distributed.kept_values import kept_values
from hyper_parallel.protocols.model import BaseModel


def apply_activation_checkpoint(model: BaseModel, config: ActivationCheckpointConfig) -> None:
    """Makes every block of `model` recompute its activations, in place. Parameter names stay as they are."""
    if config.mode == "none":
        return
    for block in model.blocks():
        # The forward, not a wrapping module: initial values and checkpoints go by parameter names.
        block.forward = partial(
            checkpoint, block.forward, use_reentrant=False, preserve_rng_state=True, context_fn=kept_values
        )
