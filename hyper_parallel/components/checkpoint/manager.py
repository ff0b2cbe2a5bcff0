"""When to save, what to keep, and what a run that starts goes on from."""

from __future__ import annotations

import json
import logging
import pickle
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from hyper_parallel.components.checkpoint import storage
from hyper_parallel.components.checkpoint.retention import remove_old
from hyper_parallel.components.checkpoint.saver import AsyncMode, SavedStep, Saver
from hyper_parallel.components.checkpoint.storage import CheckpointError
from hyper_parallel.components.tokenizer import BaseTokenizer
from hyper_parallel.config.configurable import Configurable
from hyper_parallel.config.errors import ConfigError, Fault
from hyper_parallel.config.sections import at_least
from hyper_parallel.distributed.agreed_step import AgreedStep
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
        folder: str = "checkpoint"
        """Where they lie, below dump_folder."""
        interval_steps: int = 500
        """Save every this many optimizer steps, and after the last one."""
        interval_minutes: float | None = None
        """Save also when this many minutes have passed since the last save. None: never for that reason."""
        keep_latest_k: int | None = None
        """Remove all but this many of the newest checkpoints, after each save, except the one with the lowest
        validation loss and those that something reads. None: keep all."""
        async_mode: AsyncMode = "none"
        """none: training waits until the checkpoint is on disk. thread, process: it waits for a copy in host memory,
        which a thread, or a process of its own, writes meanwhile; the latter never holds up Python."""
        what: Literal["full", "model", "adapter"] = "full"
        """full: all that a run needs to go on. model: the weights alone, to start other runs from (load_from)."""
        load_step: int | None = None
        """Resume from this step. None: from the newest complete one that is not damaged."""
        load_from: str | None = None
        """Hugging Face folder with the weights to start from, where there is no checkpoint to resume from. They are
        taken with enable False too. None: weights drawn from training.seed."""

        def faults(self) -> Iterator[Fault]:
            yield from at_least(self, 1, "interval_steps", "keep_latest_k")
            yield from at_least(self, 0, "load_step")
            if self.interval_minutes is not None and not self.interval_minutes > 0:
                yield Fault("interval_minutes", f"{self.interval_minutes} is not above 0", "give minutes, or None")
            if self.what == "adapter":
                yield Fault("what", "adapter, but no adapters are trained", "choose full or model")
            if self.load_step is not None and not self.enable:
                yield Fault("load_step", f"{self.load_step} is given but enable is False", "set enable True")
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
        self._saver = Saver(self._root, config.async_mode)
        self._last_complete_step: int | None = None
        self._last_save_time = time.monotonic()
        self._by_time = AgreedStep("checkpoint")
        self._figures: dict[str, float | None] = {}
        self._singles = {"lr_schedulers": lr_schedulers, "dataloader": dataloader, "train_state": train_state}

    @property
    def last_complete_step(self) -> int | None:
        """The newest step that this run has saved or resumed from, and knows to be on disk: what it would go back to.
        None before the first."""
        return self._last_complete_step

    @property
    def last_step(self) -> int | None:
        """As `last_complete_step`, or the one that is being written meanwhile."""
        return self._last_complete_step if self._saver.running_step is None else self._saver.running_step

    @property
    def last_folder(self) -> Path | None:
        """Folder of `last_step`."""
        return None if self.last_step is None else storage.step_folder(self._root, self.last_step)

    @property
    def last_complete(self) -> Path | None:
        """Folder of `last_complete_step`."""
        step = self.last_complete_step
        return None if step is None else storage.step_folder(self._root, step)

    def maybe_save(self, step: int, *, last: bool = False, validation_loss: float | None = None) -> bool:
        """Saves if `step` is due or the `last` one; returns whether it did."""
        if not self._config.enable:
            return False
        self._take(self._saver.finish(wait=False))
        # Asked at every step, on every rank, so that all see the same.
        due = self._due_by_time(step) or last or step % self._config.interval_steps == 0
        if due:
            self.save(step, validation_loss=validation_loss)
        return due

    def save(self, step: int, *, validation_loss: float | None = None) -> None:
        """Writes the checkpoint of `step`, and removes what `keep_latest_k` does not keep once it is complete.

        With `async_mode`, it waits for the save before this one, and for a copy of the state alone; `wait` waits for
        the rest.

        Args:
            validation_loss: of the weights as they are, where it was measured.

        Raises:
            CheckpointError: on every rank, of this save or of one still being written; older checkpoints are as they
                were.
        """
        self.wait()
        about = {
            "step": step,
            "world_size": dist.get_world_size() if dist.is_initialized() else 1,
            "what": self._config.what,
            "validation_loss": validation_loss,
        }
        self._saver.start(step, self._state, about)
        self._last_save_time = time.monotonic()
        if self._config.async_mode == "none":
            self.wait()

    def wait(self) -> None:
        """Waits until the step that is being written, if there is one, is on disk. Every rank calls it.

        Raises:
            CheckpointError: on every rank: it could not be written.
        """
        self._take(self._saver.finish(wait=True))

    def take_figures(self) -> dict[str, float | None]:
        """checkpoint_bytes, checkpoint_seconds and checkpoint_stall_seconds (in which training waited) of a save that
        was found complete since the last call; empty if there was none. Bytes are known on rank 0."""
        figures, self._figures = self._figures, {}
        return figures

    def close(self) -> None:
        """Ends what writes behind the training. What is being written must have been waited for."""
        self._saver.close()

    def _due_by_time(self, step: int) -> bool:
        minutes = self._config.interval_minutes
        if minutes is None:
            return False
        if rank() == 0 and time.monotonic() - self._last_save_time >= 60 * minutes:
            self._by_time.request(step)
        return self._by_time.due(step)

    def _take(self, saved: SavedStep | None) -> None:
        """Takes notice of a step that is complete."""
        if saved is None:
            return
        self._last_complete_step = saved.step
        self._figures = {"checkpoint_seconds": saved.seconds, "checkpoint_stall_seconds": saved.stall_seconds}
        if rank() != 0:
            return
        folder = storage.step_folder(self._root, saved.step)
        size_bytes = sum(seal["bytes"] for seal in storage.read_marker(folder)["files"].values())
        self._figures["checkpoint_bytes"] = size_bytes
        logger.info(
            "checkpoint: step %d saved in %s, %d bytes in %.2f s%s",
            saved.step,
            folder,
            size_bytes,
            saved.seconds,
            "" if self._config.async_mode == "none" else f", of which training waited {saved.stall_seconds:.2f} s",
        )
        if self._config.keep_latest_k is not None:
            remove_old(self._root, saved.step, self._config.keep_latest_k)

    def load(self) -> int:
        """Takes up the run where a checkpoint left it; returns its step. Where there is none to take up, the weights of
        `load_from` are read, if it is given, and the step is 0.

        Raises:
            CheckpointError: on every rank: `load_step` has no complete checkpoint, the checkpoint is of another model
                or optimizer (the first names that differ are given), `load_from` holds other weights than the model
                has (all of them are named), or what is there cannot be read.
        """
        step = self._step_to_load() if self._config.enable else None
        if step is None:
            self._load_initial_weights()
            return 0
        start = time.perf_counter()
        folder = storage.step_folder(self._root, step)
        state = self._state()
        with _explained(folder):
            entries = storage.saved_entries(folder)
        if f"rng.{rank()}" not in entries:
            del state["rng"]
        _refuse_another_model(folder, entries, state)
        with _explained(folder):
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
        folder = Path(self._config.load_from)
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
        if rank() == 0:
            why = f"no complete checkpoint in {self._root}" if self._config.enable else "checkpoint.enable is False"
            logger.info(
                "checkpoint: initial weights of %s, read in %.2f s (%s)", folder, time.perf_counter() - start, why
            )

    def _required_adapter(self, purpose: str) -> StateDictAdapter:
        if self._adapter is None:
            raise CheckpointError(
                f"{purpose} needs Hugging Face's names of the weights, which this model's spec does not know; give its "
                "ModelSpec a state_dict_adapter"
            )
        return self._adapter

    def _state(self) -> dict[str, Any]:
        """What `what` asks for: tensors of the live run, and its other states as bytes, which nothing takes apart."""
        model = {"model": _model_tensors(self._model_parts)}
        if self._config.what == "model":
            return model
        return model | {
            "optimizer": self._optimizers.state_dict(),
            "run": pickle.dumps({name: owner.state_dict() for name, owner in self._singles.items()}),
            "rng": {str(rank()): _rng_state()},
        }

    def _step_to_load(self) -> int | None:
        """The step to go on from, with all its files as they were written; None: there is none. A collective."""
        candidates = broadcast(self._candidates, CheckpointError)
        for step in candidates:
            folder = storage.step_folder(self._root, step)
            if (reason := storage.damage(folder)) is None:
                return step
            if self._config.load_step is not None:
                raise CheckpointError(
                    f"checkpoint.load_step: {folder} is damaged: {reason}; "
                    "set it to another step, or leave it out for the newest one that is not"
                )
            if rank() == 0:
                logger.warning("checkpoint: %s is left out: %s", folder, reason)
        if candidates:
            raise CheckpointError(
                f"all checkpoints in {self._root} are damaged; restore one, or give another dump_folder to start anew"
            )
        return None

    def _candidates(self) -> list[int]:
        """Steps to go on from, the first one by preference, complete by the sizes of their files."""
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
        newest = complete[-1] if complete else 0
        for name, (step, reason) in found.items() if wanted is None else ():
            if reason is not None and step > newest:
                logger.warning("checkpoint: %s is left out: %s", self._root / name, reason)
        candidates = complete[::-1] if wanted is None else [wanted]
        weights_alone = [s for s in candidates if _read_what(storage.step_folder(self._root, s)) == "model"]
        if weights_alone:
            raise CheckpointError(
                f"{storage.step_folder(self._root, weights_alone[0])} holds the weights alone (checkpoint.what model), "
                "from which no run goes on; give another dump_folder, and load_from this one to start from its weights"
            )
        return candidates


def _read_what(folder: Path) -> str:
    return storage.read_marker(folder)["what"]


def _folder_faults(folder: Path) -> Iterator[Fault]:
    """Why the weights in `folder` cannot be read, as far as can be seen from outside."""
    remedy = "give a folder that transformers' save_pretrained() wrote"
    if not folder.is_dir():
        yield Fault("load_from", f"{folder} is {'not a folder' if folder.exists() else 'missing'}", remedy)
        return
    try:
        described = "model_type" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):  # none, no JSON, no mapping
        described = False
    if not described:
        fact = f"{folder} holds no config.json of a Hugging Face model; checkpoints of other runs are not supported yet"
        yield Fault("load_from", fact, remedy)
        return
    try:
        weight_files(folder)
    except (OSError, HFWeightsError) as error:
        yield Fault("load_from", str(error), remedy)


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Adds to the error of a checkpoint that cannot be read which one it is, and the way out."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(
            f"{folder} cannot be read: {error}; remove it, or set checkpoint.load_step to another complete step"
        ) from error


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


def _refuse_another_model(folder: Path, saved: dict[str, Any], state: dict[str, Any]) -> None:
    """
    Raises:
        CheckpointError: on every rank.
    """
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    own, _ = flatten_state_dict(state)
    # What this rank has not may belong to another stage of the pipeline.
    strange = set.intersection(*gathered({name for name in saved if name not in own}))
    together(lambda: _compare(folder, saved, own, strange), CheckpointError)


def _compare(folder: Path, saved: dict[str, Any], own: dict[str, Any], strange: set[str]) -> None:
    differences = [f"{name} is not in the checkpoint" for name in own if name not in saved]
    differences += [f"{name} is not in this run" for name in saved if name in strange and not name.startswith("rng.")]
    for name, value in own.items():
        if name in saved and _kind(value) != _kind(saved[name]):
            differences.append(f"{name} is {_kind(saved[name])} in the checkpoint, {_kind(value)} in this run")
    if differences:
        more = f" and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise CheckpointError(
            f"{folder} is of another model or optimizer: {'; '.join(differences[:3])}{more}; set model_spec, "
            "training.dtype and optimizer as they were when it was saved, or another dump_folder to start anew"
        )


def _kind(entry: Any) -> str:
    """Type and shape of a live tensor, or of a tensor that the metadata of a checkpoint describes."""
    if isinstance(entry, torch.Tensor):
        shape, dtype = entry.shape, entry.dtype
    elif hasattr(entry, "properties"):
        shape, dtype = entry.size, entry.properties.dtype
    else:
        return "no tensor"
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _rng_state() -> bytes:
    return pickle.dumps((get_platform().rng_state(), random.getstate(), np.random.get_state()))


def _set_rng_state(state: bytes) -> None:
    platform_state, python_state, numpy_state = pickle.loads(state)
    get_platform().set_rng_state(platform_state)
    random.setstate(python_state)
    np.random.set_state(numpy_state)
