"""Checkpoints: `manager` says when to save and what a run resumes from, `storage` how a step lies on disk."""

from hyper_parallel.components.checkpoint.manager import CheckpointManager, Stateful, own_checkpoint
from hyper_parallel.components.checkpoint.storage import CheckpointError, complete_steps

__all__ = ["CheckpointError", "CheckpointManager", "Stateful", "complete_steps", "own_checkpoint"]
