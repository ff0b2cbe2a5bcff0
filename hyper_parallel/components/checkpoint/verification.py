"""Whether the files of a step are what was written. Every rank calls these functions and reads a part of the files."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
import xxhash

from hyper_parallel.components.checkpoint.storage import MARKER, CheckpointError, FileSeal, incompleteness, read_marker
from hyper_parallel.distributed.process_group import rank
from hyper_parallel.distributed.together import gathered, together

_MAPPED_BYTES = 1 << 28


class DamagedError(CheckpointError):
    """The files of a step are not what was written."""


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
    own = list(read_marker(folder)["files"].items())[rank() :: ranks]
    return next((reason for name, seal in own if (reason := _difference(folder, name, seal)) is not None), None)


def file_damage(folder: Path, name: str) -> str | None:
    """Why one file of a step is not what was written, or None if it is."""
    seal = read_marker(folder)["files"].get(name)
    if seal is None:
        return f"{name} is not in its {MARKER}"
    return _difference(folder, name, seal)


def _difference(folder: Path, name: str, seal: FileSeal) -> str | None:
    digest, written = _digest(folder / name), seal["xxh3"]
    return None if digest == written else f"{name} is not what was written (digest {digest}, not {written})"


def _digest(path: Path) -> str:
    digest, size_bytes = xxhash.xxh3_128(), path.stat().st_size
    with path.open("rb") as file:
        for start in range(0, size_bytes, _MAPPED_BYTES):
            length = min(_MAPPED_BYTES, size_bytes - start)
            # Mapped, so that nothing is copied, and in few pieces, since each waits for Python's lock.
            with mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ, offset=start) as content:
                digest.update(content)
    return digest.hexdigest()
