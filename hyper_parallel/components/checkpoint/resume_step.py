"""Which step a run goes on from."""

from __future__ import annotations

import logging
from pathlib import Path

from hyper_parallel.components.checkpoint import storage
from hyper_parallel.components.checkpoint.storage import CheckpointError
from hyper_parallel.distributed.process_group import rank
from hyper_parallel.distributed.together import broadcast

logger = logging.getLogger(__name__)


def resume_step(root: Path, load_step: int | None) -> int | None:
    """`load_step`, or the newest step below `root`, with all its files as they were written; None: there is none yet.

    A newest step that is damaged is told of and left out.

    Raises:
        CheckpointError: on every rank: `load_step` is not complete or damaged, all steps are damaged, or the newest
            holds the weights alone.
    """
    candidates = broadcast(lambda: _candidates(root, load_step), CheckpointError)
    for step in candidates:
        folder = storage.step_folder(root, step)
        if (reason := storage.damage(folder)) is None:
            return step
        if load_step is not None:
            raise CheckpointError(
                f"checkpoint.load_step: {folder} is damaged: {reason}; "
                "set it to another step, or leave it out for the newest one that is not"
            )
        if rank() == 0:
            logger.warning("checkpoint: %s is left out: %s", folder, reason)
    if candidates:
        raise CheckpointError(
            f"all checkpoints in {root} are damaged; restore one, or give another dump_folder to start anew"
        )
    return None


def _candidates(root: Path, load_step: int | None) -> list[int]:
    """Steps to go on from, complete by the sizes of their files, the preferred one first."""
    found = storage.scan(root)
    complete = [step for step, reason in found.values() if reason is None]
    if load_step is None:
        newest = complete[-1] if complete else 0
        for name, (step, reason) in found.items():
            if reason is not None and step > newest:
                logger.warning("checkpoint: %s is left out: %s", root / name, reason)
        candidates = complete[::-1]
    elif load_step in complete:
        if later := [step for step in complete if step > load_step]:
            logger.warning(
                "checkpoint: steps %s stay and are later than checkpoint.load_step %d: without it, a start would "
                "go on from step %d; remove them to go on from what this run saves",
                later, load_step, later[-1],
            )  # fmt: skip
        candidates = [load_step]
    else:
        folder = storage.step_folder(root, load_step)
        reason = found.get(folder.name, (load_step, "there is no such folder"))[1]
        raise CheckpointError(
            f"checkpoint.load_step: {folder} is not complete: {reason}; complete steps are {complete or 'none'}"
        )
    for step in candidates[:1]:
        folder = storage.step_folder(root, step)
        if storage.read_marker(folder)["what"] == "model":
            raise CheckpointError(
                f"{folder} holds the weights alone (checkpoint.what model), from which no run goes on; give another "
                "dump_folder, and load_from this one to start from its weights"
            )
    return candidates
