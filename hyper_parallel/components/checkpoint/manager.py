"""When to save, what to keep, and what a run that starts goes on from."""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch.distributed as dist
from torch import nn

from hyper_parallel.components.checkpoint import storage
from hyper_parallel.components.checkpoint.initial_weights import (
    load_from_faults,
    load_initial_weights,
    required_adapter,
)
from hyper_parallel.components.checkpoint.model_state import (
    fill_copies,
    kind_of,
    model_tensors,
    parameter_names,
    refuse_another_model,
)
from hyper_parallel.components.checkpoint.random_state import random_state, set_random_state
from hyper_parallel.components.checkpoint.reading import explained, open_step, read, saved_entries
from hyper_parallel.components.checkpoint.resumable_steps import resumable_steps
from hyper_parallel.components.checkpoint.retention import remove_old
from hyper_parallel.components.checkpoint.saver import AsyncMode, SavedStep, Saver
from hyper_parallel.components.checkpoint.step_locks import being_read_by_all
from hyper_parallel.components.checkpoint.storage import CheckpointError
from hyper_parallel.components.checkpoint.verification import DamagedError, verified
from hyper_parallel.components.tokenizer import BaseTokenizer
from hyper_parallel.config.configurable import Configurable, setting
from hyper_parallel.config.errors import Fault
from hyper_parallel.config.sections import at_least
from hyper_parallel.distributed.agreed_step import AgreedStep
from hyper_parallel.distributed.hf_weights import save_hf_weights
from hyper_parallel.distributed.process_group import rank
from hyper_parallel.distributed.together import on_rank_0
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

        enable: bool = setting(True, aliases=("enabled",))
        """Save checkpoints, and resume from the newest complete one."""
        folder: str = storage.DEFAULT_FOLDER
        """Where they lie, below dump_folder."""
        interval_steps: int = 500
        """Save every this many optimizer steps, and after the last one."""
        interval_minutes: float | None = None
        """Save also when this many minutes have passed since the last save. None: never for that reason."""
        keep_latest_k: int | None = None
        """Remove all but this many of the newest checkpoints, after each save, except the one with the lowest
        validation loss and those that something reads. None: keep all."""
        async_mode: AsyncMode = "none"
        """none: training waits until the checkpoint is on disk. thread, process: it goes on, up to the next change of
        weights, while the state is copied to host memory, and a thread, or a process of its own, writes the copy; the
        latter never holds up Python."""
        what: Literal["full", "model"] = "full"
        """full: all that a run needs to go on. model: the weights alone, to start other runs from (load_from)."""
        export_hf: Literal["none", "last", "every"] = "none"
        """Write the weights also as a folder that transformers loads, step-N-hf beside step-N: after the last step, or
        with every checkpoint. These folders are never removed."""
        load_step: int | None = None
        """Resume from this step. None: from the newest complete one that is not damaged."""
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
            if self.interval_minutes is not None and not self.interval_minutes > 0:
                yield Fault("interval_minutes", f"{self.interval_minutes} is not above 0", "give minutes, or None")
            if self.export_hf != "none" and not self.enable:
                yield Fault("export_hf", f"{self.export_hf}, but enable is False: nothing is saved", "set enable True")
            if self.load_step is not None and not self.enable:
                yield Fault("load_step", f"{self.load_step} is given but enable is False", "set enable True")
            if self.create_seed and not self.enable:
                yield Fault("create_seed", "True, but enable is False: nothing is to be saved", "set enable True")
            if self.create_seed and self.load_step is not None:
                fact = f"{self.load_step}, but create_seed is True: step 0 is to be written"
                yield Fault("load_step", fact, "leave it out, or set create_seed False")
            if self.load_from is not None:
                yield from load_from_faults(Path(self.load_from))

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
        self._by_time = AgreedStep()
        self._figures: dict[str, float | None] = {}
        self._singles = {"lr_schedulers": lr_schedulers, "dataloader": dataloader, "train_state": train_state}

    @property
    def creates_seed(self) -> bool:
        """Whether the run is to save its start as step 0, and nothing else."""
        return self._config.create_seed

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
        """Saves if `step` is due or the `last` one, and not saved already; returns whether it did."""
        if not self._config.enable:
            return False
        self._take(self._saver.finish(wait=False))
        due = last or step % self._config.interval_steps == 0
        # Asked at every step, on every rank, so that all see the same.
        due = self._due_by_time(step, asks=not due) or due
        saves = due and self.last_step != step
        if saves:
            self.save(step, validation_loss=validation_loss)
        is_saved = self.last_step == step
        if (self._config.export_hf == "every" and is_saved) or (self._config.export_hf == "last" and last):
            self.export_hf(self._root / f"step-{step}-hf")
        return saves

    def save(self, step: int, *, validation_loss: float | None = None) -> None:
        """Writes the checkpoint of `step`, and removes what `keep_latest_k` does not keep once it is complete.

        With `async_mode`, it waits for the save before this one alone: `wait_copied` waits until weights and optimizer
        state may change, `wait` for the rest.

        Args:
            validation_loss: of the weights as they are, where it was measured.

        Raises:
            CheckpointError: on every rank, of this save or of one still being written, whose weights may also be not
                finite; older checkpoints are as they were.
        """
        self.wait()
        about = {
            "step": step,
            "world_size": dist.get_world_size() if dist.is_initialized() else 1,
            "what": self._config.what,
            "validation_loss": validation_loss,
            "config": on_rank_0(self._read_config, CheckpointError),
        }
        self._saver.start(step, self._state, about, parameter_names(self._model_parts))
        self._last_save_time = time.monotonic()
        if self._config.async_mode == "none":
            self.wait()

    def wait_copied(self) -> None:
        """Waits until weights and optimizer state may change. Every rank calls it.

        Raises:
            CheckpointError: on every rank: they could not be copied.
        """
        self._saver.wait_copied()

    def wait(self) -> None:
        """Waits until the step that is being written, if there is one, is on disk. Every rank calls it.

        Raises:
            CheckpointError: on every rank: it could not be written.
        """
        self._take(self._saver.finish(wait=True))

    def finish(self) -> Path | None:
        """`last_complete`, once what is being written is on disk. Every rank calls it.

        Raises:
            CheckpointError: see `wait`.
        """
        self.wait()
        return self.last_complete

    def take_figures(self) -> dict[str, float | None]:
        """checkpoint_bytes, checkpoint_seconds and checkpoint_stall_seconds (in which training waited) of a save that
        was found complete since the last call; empty if there was none. Bytes are known on rank 0."""
        figures, self._figures = self._figures, {}
        return figures

    def close(self) -> None:
        """Waits for what is being written, and ends what writes behind the training. Every rank calls it.

        Raises:
            CheckpointError: see `wait`.
        """
        self.wait()
        self._saver.close()

    def _due_by_time(self, step: int, *, asks: bool) -> bool:
        """`asks`: whether to ask for a save where the time has come; not at a step that is saved anyway."""
        minutes = self._config.interval_minutes
        if minutes is None:
            return False
        if asks and rank() == 0 and time.monotonic() - self._last_save_time >= 60 * minutes:
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
                has (all of a Hugging Face folder are named), or what is there cannot be read.
        """
        resumes = self._config.enable and not self._config.create_seed
        steps = resumable_steps(self._root, self._config.load_step) if resumes else []
        if not steps:
            self._load_initial_weights()
            return 0
        for step in steps:
            folder = storage.step_folder(self._root, step)
            start = time.perf_counter()
            try:
                self._load_step(folder)
            except DamagedError as error:
                if self._config.load_step is not None:
                    raise CheckpointError(
                        f"checkpoint.load_step: {folder} is damaged: {error}; "
                        "set it to another step, or leave it out for the newest one that is not"
                    ) from error
                if rank() == 0:
                    logger.warning("checkpoint: %s is left out: %s", folder, error)
                continue
            self._last_complete_step = step
            if rank() == 0:
                unread = "" if self._config.load_from is None else f"; {self._config.load_from} is not read"
                logger.info("checkpoint: resumed from %s in %.2f s%s", folder, time.perf_counter() - start, unread)
            return step
        raise CheckpointError(
            f"all checkpoints in {self._root} are damaged; restore one, or give another dump_folder to start anew"
        )

    def _load_step(self, folder: Path) -> None:
        """
        Raises:
            CheckpointError: on every rank: it is of another model or optimizer, or cannot be read.
            DamagedError: on every rank: it is not what was written. Weights and optimizer state may be changed.
        """
        state = self._state()
        reader = open_step(folder)
        way_out = "remove it, or set checkpoint.load_step to another complete step"
        with being_read_by_all(folder), verified(folder):
            with explained(folder, way_out):
                entries = saved_entries(reader)
            if f"rng.{rank()}" not in entries:
                del state["rng"]
            refuse_another_model(
                f"{folder} is of another model or optimizer", entries, state, kind_of,
                "set model_spec, training.dtype and optimizer as they were when it was saved, or another dump_folder "
                "to start anew",
            )  # fmt: skip
            with explained(folder, way_out):
                read(reader, state)
        fill_copies(self._model_parts, state["model"])
        self._optimizers.load_state_dict(state["optimizer"])
        singles = pickle.loads(state["run"])
        for name, owner in self._singles.items():
            owner.load_state_dict(singles[name])
        if "rng" in state:
            set_random_state(state["rng"][str(rank())])

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
            required_adapter(self._adapter, f"exporting to {folder}"),
            folder,
            replace=folder.resolve().is_relative_to(self._dump_folder.resolve()),
            add_files=None if self._tokenizer is None else self._tokenizer.save,
        )
        if rank() == 0:
            logger.info("exported %s, %d bytes in %.2f s", folder, size_bytes, time.perf_counter() - start)

    def _read_config(self) -> str | None:
        file = self._dump_folder / "config.yaml"
        return file.read_text(encoding="utf-8") if file.exists() else None

    def _load_initial_weights(self) -> None:
        if self._config.load_from is None:
            return
        start = time.perf_counter()
        place = load_initial_weights(Path(self._config.load_from), self._model_parts, self._adapter)
        if rank() == 0:
            why = f"no complete checkpoint in {self._root}" if self._config.enable else "checkpoint.enable is False"
            why = "checkpoint.create_seed is True" if self._config.create_seed else why
            seconds = time.perf_counter() - start
            logger.info("checkpoint: initial weights of %s, read in %.2f s (%s)", place, seconds, why)

    def _state(self) -> dict[str, Any]:
        """What `what` asks for: tensors of the live run, and its other states as bytes, which nothing takes apart."""
        behind = self._config.async_mode != "none"
        model = {"model": model_tensors(self._model_parts, copy_buffers=behind)}
        if self._config.what == "model":
            return model
        return model | {
            "optimizer": self._optimizers.state_dict(),
            "run": pickle.dumps({name: owner.state_dict() for name, owner in self._singles.items()}),
            "rng": {str(rank()): random_state()},
        }
