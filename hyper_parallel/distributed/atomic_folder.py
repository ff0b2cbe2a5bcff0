"""A folder that stands under its name whole or not at all: it is filled under another name, then renamed."""

from __future__ import annotations

import glob
import os
import shutil
from pathlib import Path


def make_partial(folder: Path, attempt: str = "") -> Path:
    """An empty folder to fill in the place of `folder`. What killed runs left of it is removed."""
    for left in folder.parent.glob(f"{glob.escape(folder.name)}.partial*"):
        shutil.rmtree(left)
    partial = partial_name(folder, attempt)
    partial.mkdir(parents=True)
    return partial


def partial_name(folder: Path, attempt: str = "") -> Path:
    """Where `folder` is filled.

    `attempt`: tells one filling from another, where one may be begun while a process of a killed run goes on with the
    last.
    """
    return folder.with_name(f"{folder.name}.partial{attempt and '-'}{attempt}")


def publish(folder: Path, attempt: str = "") -> None:
    """Gives what was filled its name. A `folder` that stands there already is removed once the new one does.

    Whoever needs it to outlive a loss of power syncs its files before, and its parent after.
    """
    replaced = folder.with_name(f"{folder.name}.replaced")
    if folder.exists():
        if replaced.exists():
            shutil.rmtree(replaced)
        folder.rename(replaced)
    partial_name(folder, attempt).rename(folder)
    if replaced.exists():
        shutil.rmtree(replaced)


def sync_folder(folder: Path) -> None:
    """Waits until the names in `folder` are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
