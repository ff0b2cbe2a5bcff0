"""Weights to start from: `checkpoint.load_from`."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

from torch import nn

from hyper_parallel.components.checkpoint import storage
from hyper_parallel.components.checkpoint.model_state import fill_copies, model_tensors, refuse_another_model, shape_of
from hyper_parallel.components.checkpoint.reading import explained, open_step, read, saved_entries
from hyper_parallel.components.checkpoint.step_locks import being_read_by_all
from hyper_parallel.components.checkpoint.storage import CheckpointError
from hyper_parallel.components.checkpoint.verification import DamagedError, verified
from hyper_parallel.config.errors import ConfigError, Fault
from hyper_parallel.distributed.hf_weights import HFWeightsError, load_hf_weights, weight_files
from hyper_parallel.distributed.process_group import rank
from hyper_parallel.distributed.together import broadcast, on_rank_0
from hyper_parallel.protocols.state_dict_adapter import StateDictAdapter

logger = logging.getLogger(__name__)


def own_checkpoint(place: Path) -> Path | None:
    """The checkpoint that `checkpoint.load_from` means by `place`, complete or not. None: a Hugging Face folder, or
    nothing that can be read."""
    return None if _describes_hf_model(place) else storage.checkpoint_at(place)


def _describes_hf_model(folder: Path) -> bool:
    try:
        return "model_type" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):  # none, no JSON, no mapping
        return False


def load_from_faults(folder: Path) -> Iterator[Fault]:
    """Why the weights in `folder` cannot be read, as far as can be seen from outside."""
    remedy = "give a folder that transformers' save_pretrained() wrote, or the dump folder of a run with checkpoints"
    if not folder.is_dir():
        yield Fault("load_from", f"{folder} is {'not a folder' if folder.exists() else 'missing'}", remedy)
    elif _describes_hf_model(folder):
        try:
            weight_files(folder)
        except (OSError, HFWeightsError) as error:
            yield Fault("load_from", str(error), remedy)
    elif (checkpoint := storage.checkpoint_at(folder)) is None:
        fact = f"{folder} holds neither the config.json of a Hugging Face model nor a complete checkpoint"
        yield Fault("load_from", fact, remedy)
    elif (reason := storage.incompleteness(checkpoint)) is not None:
        yield Fault("load_from", f"{checkpoint} is not a complete checkpoint: {reason}", remedy)


def load_initial_weights(place: Path, model_parts: list[nn.Module], adapter: StateDictAdapter | None) -> Path:
    """Fills the model with what lies in `place`, in whatever type the model has; returns the folder that was read.

    Args:
        adapter: Hugging Face's names of the weights, for folders that have those.

    Raises:
        CheckpointError: on every rank: there are other weights than the model has, or they cannot be read.
    """
    checkpoint = broadcast(lambda: own_checkpoint(place), CheckpointError)
    if checkpoint is None:
        _load_hf_weights(place, model_parts, required_adapter(adapter, "checkpoint.load_from"))
        return place
    _load_checkpoint(checkpoint, model_parts)
    return checkpoint


def required_adapter(adapter: StateDictAdapter | None, purpose: str) -> StateDictAdapter:
    """
    Raises:
        CheckpointError: there is none for the `purpose`.
    """
    if adapter is None:
        raise CheckpointError(
            f"{purpose} needs Hugging Face's names of the weights, which this model's spec does not know; give its "
            "ModelSpec a state_dict_adapter"
        )
    return adapter


def _load_hf_weights(folder: Path, model_parts: list[nn.Module], adapter: StateDictAdapter) -> None:
    def differences() -> list[str]:
        try:
            return adapter.hf_differences(folder)
        except ConfigError as error:
            raise CheckpointError(str(error)) from error

    if (differ := on_rank_0(differences, CheckpointError)) and rank() == 0:
        logger.warning("checkpoint: config.json in %s and this run's model differ: %s", folder, "; ".join(differ))
    try:
        load_hf_weights(model_parts, adapter, folder)
    except HFWeightsError as error:
        raise CheckpointError(f"checkpoint.load_from: {error}") from error


def _load_checkpoint(folder: Path, model_parts: list[nn.Module]) -> None:
    what, remedy = f"checkpoint.load_from: {folder}", "give another folder"
    state = {"model": model_tensors(model_parts)}
    reader = open_step(folder)
    try:
        with being_read_by_all(folder), verified(folder):
            with explained(what, remedy):
                entries = saved_entries(reader)
            weights = {name: entry for name, entry in entries.items() if name.startswith("model.")}
            refuse_another_model(f"{what} is of another model", weights, state, shape_of, remedy)
            with explained(what, remedy):
                read(reader, state)
    except DamagedError as error:
        raise CheckpointError(f"{what} is damaged: {error}; {remedy}") from error
    fill_copies(model_parts, state["model"])
