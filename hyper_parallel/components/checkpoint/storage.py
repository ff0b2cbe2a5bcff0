"""One checkpoint on disk: a folder ``step-N`` written by torch.distributed.checkpoint and sealed by a marker.

A step is written under ``step-N.partial-*``. When every rank has written and synced its files, ``complete.json`` (the
step, and size and digest of every file) is added and the folder renamed. So a save that is killed at any instant leaves
nothing that could be taken for a checkpoint, and never touches an older one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

import xxhash

from hyper_parallel.config.errors import ConfigError, RunError

MARKER = "complete.json"
NOT_FINITE = "not finite"
"""What an error says of weights that a writer refuses."""
DEFAULT_FOLDER = "checkpoint"
"""Where a run keeps its checkpoints, below its dump folder."""


class CheckpointError(RunError):
    """A checkpoint could not be saved or loaded. Says which, why, and what is left."""


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
    seal: str
    """`seal_of` all the others."""


def seal_of(marker: Mapping[str, Any]) -> str:
    """128-bit XXH3, hexadecimal, of what a marker says."""
    said = {key: value for key, value in marker.items() if key != "seal"}
    return xxhash.xxh3_128(json.dumps(said, sort_keys=True).encode()).hexdigest()


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
        if marker["seal"] != seal_of(marker):
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
