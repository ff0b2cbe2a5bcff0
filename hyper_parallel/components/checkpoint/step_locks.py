"""Who writes or reads a step, so that nobody removes it meanwhile."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

from hyper_parallel.components.checkpoint.storage import MARKER, CheckpointError
from hyper_parallel.distributed.file_lock import lock
from hyper_parallel.distributed.together import together

WRITING = "writing.lock"
"""Stands in a step while it is written. Its lock counts: it stays where a save was killed."""


@contextmanager
def being_read(folder: Path) -> Iterator[None]:
    """Keeps `remove_unused` of other processes from a step.

    Raises:
        OSError: it has no marker, or one that cannot be read.
    """
    with (folder / MARKER).open("rb") as marker:
        lock(fcntl.flock, marker, fcntl.LOCK_SH)
        yield


@contextmanager
def being_read_by_all(folder: Path) -> Iterator[None]:
    """`being_read`, on every rank.

    Raises:
        CheckpointError: on every rank: see `being_read`.
    """
    with ExitStack() as held:
        together(lambda: held.enter_context(being_read(folder)), CheckpointError)
        yield


def lock_unfinished(folder: Path) -> BinaryIO:
    """Keeps `remove_unused` of other processes from a step that is begun, until what is returned is closed."""
    file = (folder / WRITING).open("wb")
    lock(fcntl.flock, file, fcntl.LOCK_EX)
    return file


def remove_unused(folder: Path) -> bool:
    """Removes a step, its marker first, so that what a kill leaves of it is not complete. Returns False, and leaves it
    as it is, while a process reads or writes it. One rank calls this.

    Raises:
        OSError: it cannot be removed.
    """
    with ExitStack() as held:
        for name in (MARKER, WRITING):
            file = folder / name
            if file.exists() and not lock(
                fcntl.flock, held.enter_context(file.open("r+b")), fcntl.LOCK_EX | fcntl.LOCK_NB
            ):
                return False
        (folder / MARKER).unlink(missing_ok=True)
        shutil.rmtree(folder)
    return True
