"""What a step holds. With a process group every rank calls these functions, and an error on one is raised on all."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from hyper_parallel.components.checkpoint.storage import CheckpointError
from hyper_parallel.distributed.together import together

if TYPE_CHECKING:
    from hyper_parallel.components.checkpoint.step_reader import StepReader


def open_step(folder: Path) -> StepReader:
    """What reads `folder`. Nothing is read yet."""
    from hyper_parallel.components.checkpoint.step_reader import StepReader

    return StepReader(folder)


def saved_entries(reader: StepReader) -> dict[str, Any]:
    """Name -> metadata (`size` and `properties.dtype` of tensors) of every entry of a checkpoint.

    Raises:
        CheckpointError: it cannot be read.
    """
    return together(lambda: reader.metadata.state_dict_metadata, CheckpointError)


def read(reader: StepReader, state: dict[str, Any]) -> None:
    """Fills `state` from a checkpoint: tensors in place, resharded where their layout differs, other entries anew.

    Raises:
        CheckpointError: a file cannot be read.
    """
    import torch.distributed.checkpoint as dcp

    together(lambda: dcp.load(state, storage_reader=reader, no_dist=alone()), CheckpointError)


@contextmanager
def explained(what: Path | str, way_out: str) -> Iterator[None]:
    """Adds to the error of a checkpoint that cannot be read which one it is, and the way out."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{what} cannot be read: {error}; {way_out}") from error


def alone() -> bool:
    """Whether there is no process group, which DCP must be told, and then warns of at each call."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    return not dist.is_initialized()
