"""Checkpoints: `manager` says when to save and what a run resumes from, `storage` how a step lies on disk."""

from hyper_parallel.components.checkpoint.manager import CheckpointManager, Stateful
from hyper_parallel.components.checkpoint.storage import CheckpointError

__all__ = ["CheckpointError", "CheckpointManager", "Stateful"]
