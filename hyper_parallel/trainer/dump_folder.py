"""One run at a time writes in a dump folder."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from pathlib import Path
from typing import TextIO

from hyper_parallel.config.errors import ConfigError
from hyper_parallel.distributed.file_lock import lock
from hyper_parallel.distributed.process_group import launched_rank

LOCK = "run.lock"
"""Its lock counts, not whether it is there: it stays, and the system lets go of it when its holder ends, however."""
WAIT_SECONDS = 10.0
"""A run that was killed may take as long to be gone."""

_held: dict[Path, TextIO] = {}


def hold(folder: str | Path) -> None:
    """Keeps other processes from `folder`, until `release` or the end of this one. Rank 0 does it for all; a folder
    that this process holds stays held.

    Raises:
        ConfigError: another run writes there, or the folder cannot be made or written.
    """
    # A lock of POSIX, not flock(2): children, such as workers that outlive a killed run, do not inherit it. It would be
    # lost if this process closed another descriptor of the file, so each is opened once.
    folder = Path(folder).resolve()
    if launched_rank() != 0 or folder in _held:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a+", encoding="utf-8")
    except OSError as error:
        raise ConfigError.one(
            "dump_folder", f"{str(folder)!r} cannot be written: {error.strerror}", "give a folder that you may write to"
        ) from error
    deadline = time.monotonic() + WAIT_SECONDS
    while not lock(fcntl.lockf, file, fcntl.LOCK_EX | fcntl.LOCK_NB):
        if time.monotonic() > deadline:
            file.seek(0)
            holder = file.read().strip()
            file.close()
            fact = f"{folder} is being written by another run ({holder})"
            raise ConfigError.one("dump_folder", fact, "wait until it ends or stop it, or give another folder")
        time.sleep(0.1)
    file.truncate(0)
    file.write(f"{socket.gethostname()}, pid {os.getpid()}\n")
    file.flush()
    _held[folder] = file


def release(folder: str | Path) -> None:
    """Lets other processes write in `folder`; does nothing where this one does not hold it."""
    file = _held.pop(Path(folder).resolve(), None)
    if file is not None:
        file.close()
