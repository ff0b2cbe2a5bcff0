"""Which checkpoints are removed when a new one is complete."""

from __future__ import annotations

import logging
import math
from pathlib import Path

from hyper_parallel.components.checkpoint import storage
from hyper_parallel.components.checkpoint.step_locks import remove_unused

logger = logging.getLogger(__name__)


def remove_old(root: Path, newest: int, keep_latest_k: int) -> None:
    """Removes all complete steps below `root` but the `keep_latest_k` last ones up to `newest`, the one of the lowest
    validation loss, and those that a process reads.

    Steps later than `newest` are of a run that was gone back from: they are neither counted nor removed. One rank calls
    this.
    """
    steps = [step for step in storage.complete_steps(root) if step <= newest]
    best = best_step(root, steps)
    for step in steps[:-keep_latest_k]:
        if step == best:
            continue
        try:
            if not remove_unused(storage.step_folder(root, step)):
                logger.info("checkpoint: step %d is being read, and removed another time", step)
        except OSError as error:  # the new checkpoint is safe; this costs space only
            logger.warning("checkpoint: step %d could not be removed: %s", step, error)


def best_step(root: Path, steps: list[int]) -> int | None:
    """The first of `steps`, all complete, with the lowest validation loss. None: it is a number at none of them."""
    losses = {step: storage.read_marker(storage.step_folder(root, step))["validation_loss"] for step in steps}
    measured = {step: loss for step, loss in losses.items() if loss is not None and not math.isnan(loss)}
    return min(measured, key=lambda step: measured[step], default=None)
