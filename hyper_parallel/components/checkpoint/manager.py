"""When to save, what to keep, and what a run that starts goes on from."""

from __future__ import annotations

import json
import logging
import pickle
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from hyper_parallel.components.checkpoint import storage
from hyper_parallel.components.checkpoint.storage import CheckpointError
from hyper_parallel.components.tokenizer import BaseTokenizer
from hyper_parallel.config.configurable import Configurable
from hyper_parallel.config.errors import ConfigError, Fault
from hyper_parallel.config.sections import at_least
from hyper_parallel.distributed.hf_weights import HFWeightsError, load_hf_weights, save_hf_weights, weight_files
from hyper_parallel.distributed.process_group import rank
from hyper_parallel.distributed.together import broadcast, gathered, on_rank_0, together
from hyper_parallel.platform import get_platform
from hyper_parallel.protocols.state_dict_adapter import StateDictAdapter

logger = logging.getLogger(__name__)


class Stateful(Protocol):
    """Whatever goes into a checkpoint by itself."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class CheckpointManager(Configurable):
    """Saves and resumes a whole run: model, optimizer, LR schedule, data position, random states, progress.

    Tensors are stored by parameter name and reshard to any number of ranks. Random states belong to ranks: rank r takes
    up that of rank r of the run that saved, and a rank that the checkpoint does not know keeps the one that it was
    started with. All else is one copy, which must be the same on every rank.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """When to save and what to resume from."""

        enable: bool = True
        """Save checkpoints, and resume from the newest complete one."""
        folder: str = storage.DEFAULT_FOLDER
        """Where they lie, below dump_folder."""
        interval_steps: int = 500
        """Save every this many optimizer steps, and after the last one."""
        keep_latest_k: int | None = None
        """Remove all but this many of the newest checkpoints, after each save. None: keep all."""
        load_step: int | None = None
        """Resume from this step. None: from the newest complete one."""
        load_from: str | None = None
        """Where the weights to start from lie, if there is no checkpoint to resume from: a Hugging Face folder, or a
        checkpoint of another run, of whatever split: its step-N folder, or the run's dump folder for the newest. All
        else starts anew. They are taken with enable False too. None: weights drawn from training.seed."""
        create_seed: bool = False
        """Do not train: write the initial weights as the checkpoint of step 0 and end. For one process. Runs with any
        parallelism start from the same bits with load_from this one's dump folder."""

        def faults(self) -> Iterator[Fault]:
            yield from at_least(self, 1, "interval_steps", "keep_latest_k")
            yield from at_least(self, 0, "load_step")
            if self.load_step is not None and not self.enable:
                yield Fault("load_step", f"{self.load_step} is given but enable is False", "set enable True")
            if self.create_seed and not self.enable:
                yield Fault("create_seed", "True, but enable is False: nothing is to be saved", "set enable True")
            if self.create_seed and self.load_step is not None:
                fact = f"{self.load_step}, but create_seed is True: step 0 is to be written"
                yield Fault("load_step", fact, "leave it out, or set create_seed False")
            if self.load_from is not None:
                yield from _folder_faults(Path(self.load_from))

    def __init__(
        self,
        config: Config,
        *,
        dump_folder: str,
        sd_adapter: StateDictAdapter | None,
        tokenizer: BaseTokenizer | None,
        model_parts: list[nn.Module],
        optimizers: Stateful,
        lr_schedulers: Stateful,
        dataloader: Stateful,
        train_state: Stateful,
    ) -> None:
        self._config = config
        self._dump_folder = Path(dump_folder)
        self._root = self._dump_folder / config.folder
        self._adapter = sd_adapter
        self._tokenizer = tokenizer
        self._model_parts = model_parts
        self._optimizers = optimizers
        self._last_complete_step: int | None = None
        self._singles = {"lr_schedulers": lr_schedulers, "dataloader": dataloader, "train_state": train_state}

    @property
    def creates_seed(self) -> bool:
        """Whether the run is to save its start as step 0, and nothing else."""
        return self._config.create_seed

    @property
    def last_complete_step(self) -> int | None:
        """The step that this run last saved or resumed from: what it would go back to. None before the first."""
        return self._last_complete_step

    @property
    def last_complete(self) -> Path | None:
        """Folder of `last_complete_step`."""
        step = self.last_complete_step
        return None if step is None else storage.step_folder(self._root, step)

    def maybe_save(self, step: int, *, last: bool = False) -> bool:
        """Saves if `step` is due or the `last` one; returns whether it did."""
        due = self._config.enable and (last or step % self._config.interval_steps == 0)
        if due:
            self.save(step)
        return due

    def save(self, step: int) -> None:
        """Writes the checkpoint of `step`, then removes what `keep_latest_k` does not keep. Blocks until it is on disk.

        Raises:
            CheckpointError: on every rank; older checkpoints are as they were.
        """
        start = time.perf_counter()
        size_bytes = storage.write(self._root, step, self._state())
        seconds = time.perf_counter() - start
        self._last_complete_step = step
        if rank() == 0:
            logger.info(
                "checkpoint: step %d saved in %s, %d bytes in %.2f s",
                step, storage.step_folder(self._root, step), size_bytes, seconds,
            )  # fmt: skip
        on_rank_0(lambda: self._remove_old(step), CheckpointError)

    def load(self) -> int:
        """Takes up the run where a checkpoint left it; returns its step. Where there is none to take up, the weights of
        `load_from` are read, if it is given, and the step is 0.

        Raises:
            CheckpointError: on every rank: `load_step` has no complete checkpoint, the checkpoint is of another model
                or optimizer (the first names that differ are given), `load_from` holds other weights than the model
                has (all of a Hugging Face folder are named), or what is there cannot be read.
        """
        resumes = self._config.enable and not self._config.create_seed
        step = broadcast(self._step_to_load, CheckpointError) if resumes else None
        if step is None:
            self._load_initial_weights()
            return 0
        start = time.perf_counter()
        folder = storage.step_folder(self._root, step)
        state = self._state()
        way_out = "remove it, or set checkpoint.load_step to another complete step"
        with _explained(folder, way_out):
            entries = storage.saved_entries(folder)
        if f"rng.{rank()}" not in entries:
            del state["rng"]
        _refuse_another_model(
            f"{folder} is of another model or optimizer", entries, state, _kind,
            "set model_spec, training.dtype and optimizer as they were when it was saved, or another dump_folder to "
            "start anew",
        )  # fmt: skip
        with _explained(folder, way_out):
            storage.read(folder, state)
        _fill_copies(self._model_parts, state["model"])
        self._optimizers.load_state_dict(state["optimizer"])
        singles = pickle.loads(state["run"])
        for name, owner in self._singles.items():
            owner.load_state_dict(singles[name])
        if "rng" in state:
            _set_rng_state(state["rng"][str(rank())])
        self._last_complete_step = step
        if rank() == 0:
            unread = "" if self._config.load_from is None else f"; {self._config.load_from} is not read"
            logger.info("checkpoint: resumed from %s in %.2f s%s", folder, time.perf_counter() - start, unread)
        return step

    def export_hf(self, folder: str | Path) -> None:
        """Writes the live model and the run's tokenizer as a folder that transformers loads. Every rank calls it.

        An older export below the dump folder is replaced. Any other folder must be empty.

        Raises:
            RunError: on every rank: the model has no state-dict adapter, or the folder cannot be written.
        """
        start = time.perf_counter()
        folder = Path(folder)
        size_bytes = save_hf_weights(
            self._model_parts,
            self._required_adapter(f"exporting to {folder}"),
            folder,
            replace=folder.resolve().is_relative_to(self._dump_folder.resolve()),
            add_files=None if self._tokenizer is None else self._tokenizer.save,
        )
        if rank() == 0:
            logger.info("exported %s, %d bytes in %.2f s", folder, size_bytes, time.perf_counter() - start)

    def _load_initial_weights(self) -> None:
        if self._config.load_from is None:
            return
        start = time.perf_counter()
        place = Path(self._config.load_from)
        checkpoint = broadcast(lambda: own_checkpoint(place), CheckpointError)
        if checkpoint is None:
            self._load_hf_weights(place)
        else:
            self._load_weights(checkpoint)
        if rank() == 0:
            why = f"no complete checkpoint in {self._root}" if self._config.enable else "checkpoint.enable is False"
            why = "checkpoint.create_seed is True" if self._config.create_seed else why
            seconds = time.perf_counter() - start
            logger.info("checkpoint: initial weights of %s, read in %.2f s (%s)", checkpoint or place, seconds, why)

    def _load_hf_weights(self, folder: Path) -> None:
        adapter = self._required_adapter("checkpoint.load_from")

        def differences() -> list[str]:
            try:
                return adapter.hf_differences(folder)
            except ConfigError as error:
                raise CheckpointError(str(error)) from error

        if (differ := on_rank_0(differences, CheckpointError)) and rank() == 0:
            logger.warning("checkpoint: config.json in %s and this run's model differ: %s", folder, "; ".join(differ))
        try:
            load_hf_weights(self._model_parts, adapter, folder)
        except HFWeightsError as error:
            raise CheckpointError(f"checkpoint.load_from: {error}") from error

    def _load_weights(self, folder: Path) -> None:
        """Those of another run's checkpoint, in whatever type this run has."""
        state = {"model": _model_tensors(self._model_parts)}
        remedy = "give another folder"
        with _explained(f"checkpoint.load_from: {folder}", remedy):
            entries = storage.saved_entries(folder)
        weights = {name: entry for name, entry in entries.items() if name.startswith("model.")}
        _refuse_another_model(f"checkpoint.load_from: {folder} is of another model", weights, state, _shape, remedy)
        with _explained(f"checkpoint.load_from: {folder}", remedy):
            storage.read(folder, state)
        _fill_copies(self._model_parts, state["model"])

    def _required_adapter(self, purpose: str) -> StateDictAdapter:
        if self._adapter is None:
            raise CheckpointError(
                f"{purpose} needs Hugging Face's names of the weights, which this model's spec does not know; give its "
                "ModelSpec a state_dict_adapter"
            )
        return self._adapter

    def _state(self) -> dict[str, Any]:
        """The tensors of the live run, and its other states as bytes, which nothing takes apart."""
        return {
            "model": _model_tensors(self._model_parts),
            "optimizer": self._optimizers.state_dict(),
            "run": pickle.dumps({name: owner.state_dict() for name, owner in self._singles.items()}),
            "rng": {str(rank()): _rng_state()},
        }

    def _step_to_load(self) -> int | None:
        found = storage.scan(self._root)
        complete = [step for step, reason in found.values() if reason is None]
        wanted = self._config.load_step
        if wanted is not None:
            if wanted not in complete:
                reason = found.get(storage.step_folder(self._root, wanted).name, (wanted, "there is no such folder"))[1]
                raise CheckpointError(
                    f"checkpoint.load_step: {storage.step_folder(self._root, wanted)} is not complete: {reason}; "
                    f"complete steps are {complete or 'none'}"
                )
            if later := [step for step in complete if step > wanted]:
                logger.warning(
                    "checkpoint: steps %s stay and are later than checkpoint.load_step %d: without it, a start would "
                    "go on from step %d; remove them to go on from what this run saves",
                    later, wanted, later[-1],
                )  # fmt: skip
            return wanted
        newest = complete[-1] if complete else None
        for name, (step, reason) in found.items():
            if reason is not None and step > (newest or 0):
                logger.warning("checkpoint: %s is left out: %s", self._root / name, reason)
        return newest

    def _remove_old(self, newest: int) -> None:
        """Later steps than `newest` are of a run that `load_step` went back from: neither counted nor removed."""
        if self._config.keep_latest_k is None:
            return
        steps = [step for step in storage.complete_steps(self._root) if step <= newest]
        for step in steps[: -self._config.keep_latest_k]:
            try:
                storage.remove(storage.step_folder(self._root, step))
            except OSError as error:  # the new checkpoint is safe; this costs space only
                logger.warning("checkpoint: step %d could not be removed: %s", step, error)


def own_checkpoint(place: Path) -> Path | None:
    """The checkpoint that `checkpoint.load_from` means by `place`, complete or not. None: a Hugging Face folder, or
    nothing that can be read."""
    return None if _describes_hf_model(place) else storage.checkpoint_at(place)


def _describes_hf_model(folder: Path) -> bool:
    try:
        return "model_type" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):  # none, no JSON, no mapping
        return False


def _folder_faults(folder: Path) -> Iterator[Fault]:
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


@contextmanager
def _explained(what: Path | str, way_out: str) -> Iterator[None]:
    """Adds to the error of a checkpoint that cannot be read which one it is, and the way out."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{what} cannot be read: {error}; {way_out}") from error


def _model_tensors(model_parts: list[nn.Module]) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name, sharing memory with the model; of tied ones the first name only, of
    copies in several parts the last."""
    tensors: dict[int, tuple[str, torch.Tensor]] = {}
    for part in model_parts:
        for name, tensor in part.state_dict(keep_vars=True).items():
            tensors.setdefault(id(tensor), (name, tensor.detach()))
    return dict(tensors.values())


@torch.no_grad()
def _fill_copies(model_parts: list[nn.Module], loaded: dict[str, torch.Tensor]) -> None:
    """Gives what was loaded into one part to those that hold a copy of it."""
    for part in model_parts if len(model_parts) > 1 else ():
        for name, tensor in part.state_dict().items():
            if name in loaded:
                tensor.copy_(loaded[name])


def _refuse_another_model(
    verdict: str, saved: dict[str, Any], state: dict[str, Any], kind: Callable[[Any], str], way_out: str
) -> None:
    """
    Args:
        verdict: what it means if `state` and what is saved differ in their names, or in the `kind` of their tensors.

    Raises:
        CheckpointError: on every rank, with the first differences.
    """
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    own, _ = flatten_state_dict(state)
    # What this rank has not may belong to another stage of the pipeline.
    strange = set.intersection(*gathered({name for name in saved if name not in own}))

    def compare() -> None:
        differences = [f"{name} is not in the checkpoint" for name in own if name not in saved]
        differences += [f"{name} is not in this run" for name in sorted(strange) if not name.startswith("rng.")]
        differences += [
            f"{name} is {kind(saved[name])} in the checkpoint, {kind(value)} in this run"
            for name, value in own.items()
            if name in saved and kind(value) != kind(saved[name])
        ]
        if differences:
            more = f" and {len(differences) - 3} more" if len(differences) > 3 else ""
            raise CheckpointError(f"{verdict}: {'; '.join(differences[:3])}{more}; {way_out}")

    together(compare, CheckpointError)


def _shape(entry: Any) -> str:
    """That of a live tensor, or of a tensor that the metadata of a checkpoint describes."""
    if isinstance(entry, torch.Tensor):
        return str(list(entry.shape))
    return str(list(entry.size)) if hasattr(entry, "properties") else "no tensor"


def _kind(entry: Any) -> str:
    """Type and shape, of the same."""
    dtype = getattr(entry, "dtype", None) or getattr(getattr(entry, "properties", None), "dtype", None)
    return _shape(entry) if dtype is None else f"{str(dtype).removeprefix('torch.')} {_shape(entry)}"


def _rng_state() -> bytes:
    return pickle.dumps((get_platform().rng_state(), random.getstate(), np.random.get_state()))


def _set_rng_state(state: bytes) -> None:
    platform_state, python_state, numpy_state = pickle.loads(state)
    get_platform().set_rng_state(platform_state)
    random.setstate(python_state)
    np.random.set_state(numpy_state)
