"""Which steps a run may go on from."""

from __future__ import annotations

import logging
from pathlib import Path

from hyper_parallel.components.checkpoint import storage
from hyper_parallel.components.checkpoint.storage import CheckpointError
from hyper_parallel.distributed.together import broadcast

logger = logging.getLogger(__name__)


def resumable_steps(root: Path, load_step: int | None) -> list[int]:
    """`load_step`, or the steps below `root` that are complete by the sizes of their files, the newest first; none: the
    run begins.

    Raises:
        CheckpointError: on every rank: `load_step` is not complete, or the step that is preferred holds the weights
            alone.
    """
    return broadcast(lambda: _candidates(root, load_step), CheckpointError)


def _candidates(root: Path, load_step: int | None) -> list[int]:
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
