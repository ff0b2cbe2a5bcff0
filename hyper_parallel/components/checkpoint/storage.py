"""One checkpoint on disk: a folder ``step-N`` written by torch.distributed.checkpoint and sealed by a marker.

A step is written under ``step-N.partial-*``. When every rank has written and synced its files, ``complete.json`` (the
step, and size and digest of every file) is added and the folder renamed. So a save that is killed at any instant leaves
nothing that could be taken for a checkpoint, and never touches an older one.

Functions that raise CheckpointError are called on all ranks; with a process group, an error on one is raised on all.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import pickle
import re
import shutil
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import torch.distributed as dist
import xxhash

from hyper_parallel.config.errors import ConfigError, RunError
from hyper_parallel.distributed.process_group import rank
from hyper_parallel.distributed.together import gathered, together

if TYPE_CHECKING:
    from hyper_parallel.components.checkpoint.step_reader import StepReader

MARKER = "complete.json"
DEFAULT_FOLDER = "checkpoint"
"""Where a run keeps its checkpoints, below its dump folder."""

UNPICKLING_ERRORS = (pickle.UnpicklingError, AttributeError, EOFError, ImportError, IndexError, KeyError, ValueError)
"""What damaged bytes make of `pickle.load`, by its documentation and by trial."""

_MAPPED_BYTES = 1 << 28


class CheckpointError(RunError):
    """A checkpoint could not be saved or loaded. Says which, why, and what is left."""


class DamagedError(CheckpointError):
    """The files of a step are not what was written."""


class FileSeal(TypedDict):
    """What the marker knows of a file."""

    bytes: int
    xxh3: str
    """128-bit XXH3 of its content, hexadecimal."""


class Marker(TypedDict):
    """What ``complete.json`` holds."""

    step: int
    world_size: int
    """Ranks of the run that saved."""
    what: str
    """`checkpoint.what` of that run."""
    validation_loss: float | None
    """Of the weights in it, where they were measured."""
    config: str | None
    """The run's config.yaml, where it wrote one: what the weights mean."""
    torch: str
    files: dict[str, FileSeal]


def step_folder(root: Path, step: int) -> Path:
    """Where the checkpoint of `step` lies."""
    return root / f"step-{step}"


def read_marker(folder: Path) -> Marker:
    """The marker of a step.

    Raises:
        CheckpointError: there is none, or it is damaged. By this process alone.
    """
    try:
        marker: Marker = json.loads((folder / MARKER).read_bytes())
        for seal in marker["files"].values():
            if not isinstance(seal["bytes"], int) or not isinstance(seal["xxh3"], str):
                raise ValueError
    except FileNotFoundError as error:
        raise CheckpointError(f"it has no {MARKER}, so its save did not finish") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:  # no JSON, or of another shape
        raise CheckpointError(f"its {MARKER} is damaged") from error
    return marker


def incompleteness(folder: Path) -> str | None:
    """Why `folder` is not a complete checkpoint, or None if it is one by the sizes of its files."""
    try:
        files = read_marker(folder)["files"].items()
    except CheckpointError as error:
        return str(error)
    for name, seal in files:
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != seal["bytes"]:
            return f"{name} has {file.stat().st_size} bytes, {seal['bytes']} were written"
    return None


def damage(folder: Path) -> str | None:
    """Why the files of a step are not what was written, or None if they are. Every rank reads a part of them, and all
    are told the same.

    Raises:
        CheckpointError: a file cannot be read.
    """
    return _first(together(lambda: _own_damage(folder), CheckpointError))


@contextmanager
def verified(folder: Path) -> Iterator[None]:
    """While the caller reads a step, reads it as `damage` does, by a thread of its own.

    Raises:
        DamagedError: on leaving, in the place of what the caller's reading raised, if the files are not what was
            written.
    """
    with ThreadPoolExecutor(1) as reading:
        own = reading.submit(_own_damage, folder)
        error: CheckpointError | None = None
        try:
            yield
        except CheckpointError as raised:
            error = raised
        reason = _first(together(own.result, CheckpointError))
    if reason is not None:
        raise DamagedError(reason) from error
    if error is not None:
        raise error


def _first(own: str | None) -> str | None:
    return next((reason for reason in gathered(own) if reason is not None), None)


def _own_damage(folder: Path) -> str | None:
    """That of the files which this rank reads."""
    if reason := incompleteness(folder):
        return reason
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    for name, seal in list(read_marker(folder)["files"].items())[rank() :: ranks]:
        if (digest := _digest(folder / name)) != seal["xxh3"]:
            return f"{name} is not what was written (digest {digest}, not {seal['xxh3']})"
    return None


def _digest(path: Path) -> str:
    digest, size_bytes = xxhash.xxh3_128(), path.stat().st_size
    with path.open("rb") as file:
        for start in range(0, size_bytes, _MAPPED_BYTES):
            length = min(_MAPPED_BYTES, size_bytes - start)
            # Mapped, so that nothing is copied, and in few pieces, since each waits for Python's lock.
            with mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ, offset=start) as content:
                digest.update(content)
    return digest.hexdigest()


def complete_steps(root: Path) -> list[int]:
    """Steps with a complete checkpoint below `root`, ascending."""
    return [step for step, reason in scan(root).values() if reason is None]


def scan(root: Path) -> dict[str, tuple[int, str | None]]:
    """Folder name -> (step, `incompleteness`) of every finished or unfinished checkpoint below `root`, by step."""
    found: dict[str, tuple[int, str | None]] = {}
    for folder in root.iterdir() if root.is_dir() else ():
        match = re.fullmatch(r"step-(\d+)(\.partial.*|\.replaced)?", folder.name)
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


def complete_checkpoint(path: str, place: Path) -> Path:
    """`checkpoint_at` for a tool, to which `place` was given as `path`.

    Raises:
        ConfigError: there is none, or it is not complete. By this process alone.
    """
    checkpoint = checkpoint_at(place)
    if checkpoint is None:
        fact = f"{place} holds no complete checkpoint" if place.exists() else f"{place} is missing"
        raise ConfigError.one(path, fact, "give a step-N, or a dump folder")
    if (reason := incompleteness(checkpoint)) is not None:
        raise ConfigError.one(path, f"{checkpoint} is not complete: {reason}", "give another step")
    return checkpoint


@contextmanager
def explained(what: Path | str, way_out: str) -> Iterator[None]:
    """Adds to the error of a checkpoint that cannot be read which one it is, and the way out."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{what} cannot be read: {error}; {way_out}") from error


def open_step(folder: Path) -> StepReader:
    """What reads `folder`. Nothing is read yet."""
    from hyper_parallel.components.checkpoint.step_reader import StepReader

    return StepReader(folder)


def saved_entries(reader: StepReader) -> dict[str, Any]:
    """Name -> metadata (`size` and `properties.dtype` of tensors) of every entry of a checkpoint.

    Raises:
        CheckpointError: it cannot be read.
    """

    def entries() -> dict[str, Any]:
        try:
            return reader.metadata.state_dict_metadata
        except UNPICKLING_ERRORS as error:
            raise CheckpointError(f"{type(error).__name__}: {error}") from error

    return together(entries, CheckpointError)


def read(reader: StepReader, state: dict[str, Any]) -> None:
    """Fills `state` from a checkpoint: tensors in place, resharded where their layout differs, other entries anew.

    Raises:
        CheckpointError: a file cannot be read.
    """
    import torch.distributed.checkpoint as dcp

    together(lambda: dcp.load(state, storage_reader=reader, no_dist=alone()), CheckpointError)


@contextmanager
def being_read(folder: Path) -> Iterator[None]:
    """Keeps `remove_unread` of other processes from the step."""
    with (folder / MARKER).open("rb") as marker:
        fcntl.flock(marker, fcntl.LOCK_SH)  # the system takes it back when this process ends, however it ends
        yield


def remove_unread(folder: Path) -> bool:
    """Removes a checkpoint, its marker first, so that what a kill leaves of it is not complete. Returns False, and
    leaves it as it is, while a process reads it. One rank calls this."""
    with (folder / MARKER).open("rb") as marker:
        try:
            fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        (folder / MARKER).unlink()
    shutil.rmtree(folder)
    return True


def alone() -> bool:
    """Whether there is no process group, which DCP must be told, and then warns of at each call."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    return not dist.is_initialized()
