"""One checkpoint on disk: a folder ``step-N`` written by torch.distributed.checkpoint and sealed by a marker.

A step is written under ``step-N.partial``. When every rank has written and synced its files, rank 0 writes
``complete.json`` (the step, and the size of every file) and renames the folder. So a save that is killed at any instant
leaves nothing that could be taken for a checkpoint, and never touches an older one.

Every function is called on all ranks; with a process group, an error on one rank is raised on all.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hyper_parallel.config.errors import RunError
from hyper_parallel.distributed.atomic_folder import make_partial, partial_name, publish, sync_folder
from hyper_parallel.distributed.process_group import rank
from hyper_parallel.distributed.together import broadcast, on_rank_0, together

MARKER = "complete.json"
DEFAULT_FOLDER = "checkpoint"
"""Where a run keeps its checkpoints, below its dump folder."""

UNPICKLING_ERRORS = (pickle.UnpicklingError, AttributeError, EOFError, ImportError, IndexError, KeyError, ValueError)
"""What damaged bytes make of `pickle.load`, by its documentation and by trial."""


class CheckpointError(RunError):
    """A checkpoint could not be saved or loaded. Says which, why, and what is left."""


def step_folder(root: Path, step: int) -> Path:
    """Where the checkpoint of `step` lies."""
    return root / f"step-{step}"


def incompleteness(folder: Path) -> str | None:
    """Why `folder` is not a complete checkpoint, or None if it is one."""
    try:
        files = json.loads((folder / MARKER).read_bytes())["files"].items()
    except FileNotFoundError:
        return f"it has no {MARKER}, so its save did not finish"
    except (ValueError, TypeError, KeyError, AttributeError):  # no JSON, or of another shape
        return f"its {MARKER} is damaged"
    for name, size_bytes in files:
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size_bytes:
            return f"{name} has {file.stat().st_size} bytes, {size_bytes} were written"
    return None


def complete_steps(root: Path) -> list[int]:
    """Steps with a complete checkpoint below `root`, ascending."""
    return [step for step, reason in scan(root).values() if reason is None]


def scan(root: Path) -> dict[str, tuple[int, str | None]]:
    """Folder name -> (step, `incompleteness`) of every finished or unfinished checkpoint below `root`, by step."""
    found: dict[str, tuple[int, str | None]] = {}
    for folder in root.iterdir() if root.is_dir() else ():
        match = re.fullmatch(r"step-(\d+)(\.partial|\.replaced)?", folder.name)
        if match and folder.is_dir():
            reason = incompleteness(folder) if match[2] is None else "its save did not finish"
            found[folder.name] = (int(match[1]), reason)
    return dict(sorted(found.items(), key=lambda item: item[1][0]))


def checkpoint_at(place: Path) -> Path | None:
    """The checkpoint that a user means by `place`: itself, or the newest complete one of the run that keeps its
    checkpoints in `place`, or has `place` as its dump folder. None: there is nothing of the kind."""
    for root in (place, place / DEFAULT_FOLDER):
        if steps := complete_steps(root):
            return step_folder(root, steps[-1])
    is_one = (place / MARKER).is_file() or re.fullmatch(r"step-\d+", place.name) is not None
    return place if is_one and place.is_dir() else None


def write(root: Path, step: int, state: dict[str, Any]) -> int:
    """Writes `state` as the checkpoint of `step`; a complete older one of the same step is replaced at the very end.

    Returns:
        Bytes on disk.

    Raises:
        CheckpointError: on every rank, naming the folder, the cause and the newest complete checkpoint. What was
            written of the new one is removed.
    """
    import torch.distributed.checkpoint as dcp

    folder = step_folder(root, step)
    try:
        on_rank_0(lambda: make_partial(folder), CheckpointError)
        writer = dcp.FileSystemWriter(partial_name(folder), sync_files=True)
        together(lambda: dcp.save(state, storage_writer=writer, no_dist=_alone()), CheckpointError)
        size_bytes = on_rank_0(lambda: _seal(folder, step), CheckpointError)
    except CheckpointError as error:
        if rank() == 0:
            shutil.rmtree(partial_name(folder), ignore_errors=True)  # its space may be what the disk lacks
        steps = broadcast(lambda: complete_steps(root), CheckpointError)
        left = f"the last complete checkpoint is {step_folder(root, steps[-1])}" if steps else "none is complete yet"
        raise CheckpointError(
            f"the checkpoint of step {step} could not be saved in {root}: {error}; {left}; "
            "free space or set checkpoint.folder or dump_folder to a place that can be written, and start again"
        ) from error
    return size_bytes


def saved_entries(folder: Path) -> dict[str, Any]:
    """Name -> metadata (`size` and `properties.dtype` of tensors) of every entry of a checkpoint.

    Raises:
        CheckpointError: on every rank, if it cannot be read.
    """
    import torch.distributed.checkpoint as dcp

    def entries() -> dict[str, Any]:
        try:
            return dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        except UNPICKLING_ERRORS as error:
            raise CheckpointError(f"{type(error).__name__}: {error}") from error

    return together(entries, CheckpointError)


def read(folder: Path, state: dict[str, Any]) -> None:
    """Fills `state` from a checkpoint: tensors in place, resharded where their layout differs, other entries anew.

    Raises:
        CheckpointError: on every rank, if a file cannot be read.
    """
    import torch.distributed.checkpoint as dcp

    together(lambda: dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=_alone()), CheckpointError)


def remove(folder: Path) -> None:
    """Removes a checkpoint, its marker first: what a kill leaves of it is not complete. One rank calls this."""
    (folder / MARKER).unlink(missing_ok=True)
    shutil.rmtree(folder)


def _alone() -> bool:
    """Whether there is no process group, which DCP must be told, and then warns of at each call."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    return not dist.is_initialized()


def _seal(folder: Path, step: int) -> int:
    partial = partial_name(folder)
    files = {file.name: file.stat().st_size for file in sorted(partial.iterdir())}
    marker = {
        "step": step,
        "world_size": dist.get_world_size() if dist.is_initialized() else 1,
        "torch": torch.__version__,
        "files": files,
    }
    with (partial / MARKER).open("w") as stream:
        json.dump(marker, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    sync_folder(partial)
    publish(folder)
    sync_folder(folder.parent)
    return sum(files.values())
