"""Checkpoints: `manager` says when to save and takes a run up again, `saver` writes, `storage` is what lies on disk."""

from hyper_parallel.components.checkpoint.initial_weights import own_checkpoint
from hyper_parallel.components.checkpoint.manager import CheckpointManager, Stateful
from hyper_parallel.components.checkpoint.storage import CheckpointError, complete_steps

__all__ = ["CheckpointError", "CheckpointManager", "Stateful", "complete_steps", "own_checkpoint"]
