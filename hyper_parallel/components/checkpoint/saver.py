"""Writes one step after the other: while the training waits, or behind it."""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from hyper_parallel.components.checkpoint import storage
from hyper_parallel.components.checkpoint.storage import CheckpointError
from hyper_parallel.distributed.atomic_folder import make_partial, partial_name
from hyper_parallel.distributed.process_group import rank
from hyper_parallel.distributed.together import broadcast, together
from hyper_parallel.platform import get_platform

AsyncMode = Literal["none", "thread", "process"]


@dataclass(frozen=True)
class SavedStep:
    """A step that is complete on disk."""

    step: int
    seconds: float
    """From the start of the save to its end, as far as this rank saw it."""
    stall_seconds: float
    """The part of `seconds` in which the training waited."""


@dataclass(frozen=True)
class _Running:
    step: int
    attempt: str
    start: float
    stall_seconds: float
    write: Future[Any]


class Saver:
    """Saves steps below a folder, one at a time.

    none: `start` returns when the step is on disk. thread, process: it returns when the state is copied to host memory,
    and a thread of this process, or a process of its own, writes it: weights may change at once. Ranks then talk over a
    group of their own, since gloo aborts where two threads use one.
    """

    def __init__(self, root: Path, mode: AsyncMode) -> None:
        self._root, self._mode = root, mode
        self._running: _Running | None = None
        self._group: dist.ProcessGroup | None = None
        self._stager: Any = None

    @property
    def running_step(self) -> int | None:
        """The step that is being written; None: there is none."""
        return None if self._running is None else self._running.step

    def start(self, step: int, state: Callable[[], dict[str, Any]], about: dict[str, Any]) -> None:
        """Begins to save what `state` returns, once the save before it has ended.

        Args:
            about: what the marker says beside the files.

        Raises:
            CheckpointError: on every rank; the older checkpoints are as they were.
        """
        assert self._running is None, "the last one is taken by `finish`"
        start = time.perf_counter()
        folder = storage.step_folder(self._root, step)

        def prepare() -> str:
            attempt = uuid.uuid4().hex[:8]
            make_partial(folder, attempt)
            return attempt

        attempt = ""
        try:
            attempt = broadcast(prepare, CheckpointError)
            writing = together(lambda: self._write(folder, attempt, state(), about), CheckpointError)
        except CheckpointError as error:
            self._fail(step, attempt, error)
        self._running = _Running(step, attempt, start, time.perf_counter() - start, writing)

    def finish(self, *, wait: bool) -> SavedStep | None:
        """The step that was begun and is now complete. None: there is none, or, without `wait`, it is not yet known to
        be.

        Without `wait` no rank looks at another, and an error is left for the call with it.

        Raises:
            CheckpointError: with `wait`, on every rank: it could not be written; older checkpoints are as they were.
        """
        running = self._running
        if running is None:
            return None
        if not wait and (not running.write.done() or running.write.exception() is not None):
            return None
        waited = 0.0
        if wait:
            start = time.perf_counter()

            def result() -> None:
                try:
                    running.write.result()
                except (BrokenPipeError, RuntimeError) as error:  # what becomes of a process that has ended
                    raise CheckpointError(f"the process that writes it has ended ({error})") from error

            try:
                together(result, CheckpointError)
            except CheckpointError as error:
                self._running = None
                self._fail(running.step, running.attempt, error)
            waited = time.perf_counter() - start if self._mode != "none" else 0.0
        self._running = None
        seconds = running.stall_seconds if self._mode == "none" else time.perf_counter() - running.start
        return SavedStep(running.step, seconds, running.stall_seconds + waited)

    def close(self) -> None:
        """Lets go of the copy in host memory, of the group and of the process that writes. Nothing is being written."""
        if self._stager is not None:
            self._stager.close()
            self._stager = None
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def _write(self, folder: Path, attempt: str, state: dict[str, Any], about: dict[str, Any]) -> Future[Any]:
        import torch.distributed.checkpoint as dcp

        from hyper_parallel.components.checkpoint.step_writer import StepWriter

        writer = StepWriter(folder, attempt, about)
        if self._mode == "none":
            done: Future[Any] = Future()
            done.set_result(dcp.save(state, storage_writer=writer, no_dist=storage.alone()))
            return done
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        if self._stager is None:
            pinned = get_platform().pins_staging
            self._stager = DefaultStager(StagingOptions(pinned, self._mode == "process", False, pinned))
            if dist.is_initialized():
                self._group = dist.new_group(backend="gloo")
        future = dcp.async_save(
            state,
            storage_writer=writer,
            process_group=self._group,
            async_checkpointer_type=AsyncCheckpointerType[self._mode.upper()],
            async_stager=self._stager,
            no_dist=storage.alone(),
        )
        assert isinstance(future, Future), "staging is over when async_save returns"
        return future

    def _fail(self, step: int, attempt: str, error: CheckpointError) -> None:
        """
        Raises:
            CheckpointError: always.
        """
        folder = storage.step_folder(self._root, step)
        if rank() == 0:
            shutil.rmtree(partial_name(folder, attempt), ignore_errors=True)  # its space may be what the disk lacks
        steps = broadcast(lambda: storage.complete_steps(self._root), CheckpointError)
        left = (
            f"the last complete checkpoint is {storage.step_folder(self._root, steps[-1])}"
            if steps
            else "none is complete yet"
        )
        raise CheckpointError(
            f"the checkpoint of step {step} could not be saved in {self._root}: {error}; {left}; "
            "free space or set checkpoint.folder or dump_folder to a place that can be written, and start again"
        ) from error
