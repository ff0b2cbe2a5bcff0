"""Writes one step after the other: while the training waits, or behind it."""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import torch.distributed as dist

from hyper_parallel.components.checkpoint import storage
from hyper_parallel.components.checkpoint.reading import alone
from hyper_parallel.components.checkpoint.step_locks import lock_unfinished
from hyper_parallel.components.checkpoint.storage import CheckpointError
from hyper_parallel.distributed.atomic_folder import make_partial, partial_name
from hyper_parallel.distributed.process_group import new_gloo_group, rank
from hyper_parallel.distributed.together import broadcast, together
from hyper_parallel.platform import get_platform

if TYPE_CHECKING:
    from hyper_parallel.components.checkpoint.step_writer import StepWriter

AsyncMode = Literal["none", "thread", "process"]


@dataclass(frozen=True)
class SavedStep:
    """A step that is complete on disk."""

    step: int
    seconds: float
    """From the start of the save to its end, as far as this rank saw it."""
    stall_seconds: float
    """The part of `seconds` in which the training waited."""


@dataclass
class _Running:
    step: int
    attempt: str
    start: float
    stall_seconds: float
    copy: Future[Any]
    write: Future[Any]
    is_copied: bool
    is_told: bool = False
    """Whether `finish` has given it back as complete."""


class Saver:
    """Saves steps below a folder, one at a time.

    none: `start` returns when the step is on disk. thread, process: it returns at once; the state is copied to host
    memory, and a thread of this process, or a process of its own, writes the copy. The state may change after
    `wait_copied`. Ranks then talk over a group of their own, since gloo aborts where two threads use one.
    """

    def __init__(self, root: Path, mode: AsyncMode) -> None:
        self._root, self._mode = root, mode
        self._running: _Running | None = None
        self._lock: BinaryIO | None = None
        """Of the step that is being written, on rank 0."""
        self._group: dist.ProcessGroup | None = None
        self._stager: Any = None

    @property
    def running_step(self) -> int | None:
        """The step that was begun and not yet waited for; None: there is none."""
        return None if self._running is None else self._running.step

    def start(
        self, step: int, state: Callable[[], dict[str, Any]], about: dict[str, Any], parameters: frozenset[str]
    ) -> None:
        """Begins to save what `state` returns, once the save before it has ended.

        Args:
            about: what the marker says beside the files.
            parameters: names of the tensors of the model that must be finite.

        Raises:
            CheckpointError: on every rank; the older checkpoints are as they were.
        """
        from hyper_parallel.components.checkpoint.step_writer import StepWriter

        assert self._running is None, "the last one is taken by `finish`"
        start = time.perf_counter()
        folder = storage.step_folder(self._root, step)

        def prepare() -> str:
            attempt = uuid.uuid4().hex[:8]
            self._lock = lock_unfinished(make_partial(folder, attempt))
            return attempt

        attempt = ""
        try:
            attempt = broadcast(prepare, CheckpointError)
            writer = StepWriter(folder, attempt, about, parameters)
            copy, write = together(lambda: self._write(writer, state()), CheckpointError)
        except CheckpointError as error:
            self._fail(step, attempt, error)
        is_copied = self._mode == "none"
        self._running = _Running(step, attempt, start, time.perf_counter() - start, copy, write, is_copied)

    def wait_copied(self) -> None:
        """Waits until the state of the step that was begun may change. Every rank calls it.

        Raises:
            CheckpointError: on every rank: there is no memory for the copy.
        """
        running = self._running
        if running is None or running.is_copied:
            return
        start = time.perf_counter()
        self._together(running, running.copy)
        running.is_copied = True
        running.stall_seconds += time.perf_counter() - start

    def finish(self, *, wait: bool) -> SavedStep | None:
        """The step that was begun and is now complete, once. None: there is none, or, without `wait`, it is not yet
        known to be.

        Without `wait` no rank looks at another, and an error is left for the call with it. Ranks learn at different
        moments that a step is complete, so each step is waited for in the end, by those too that know.

        Raises:
            CheckpointError: with `wait`, on every rank: it could not be written; older checkpoints are as they were.
        """
        running = self._running
        if running is None:
            return None
        if not wait and (running.is_told or not running.write.done() or running.write.exception() is not None):
            return None
        was_told, start = running.is_told, time.perf_counter()
        running.is_told = True
        if wait:
            self._together(running, running.write)
            self._running = None
            self._unlock()
        if was_told:
            return None
        if self._mode != "none":
            running.stall_seconds += time.perf_counter() - start
        seconds = running.stall_seconds if self._mode == "none" else time.perf_counter() - running.start
        return SavedStep(running.step, seconds, running.stall_seconds)

    def close(self) -> None:
        """Lets go of the copy in host memory and of the group. Nothing is being written. The process that writes stays:
        torch keeps it until the interpreter ends."""
        if self._stager is not None:
            self._stager.close()
            self._stager = None
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _together(self, running: _Running, future: Future[Any]) -> None:
        """
        Raises:
            CheckpointError: on every rank, if the copy or the write fails on one. That save is over.
        """

        def result() -> None:
            try:
                future.result()
            except (
                BrokenPipeError,
                MemoryError,
                RuntimeError,
            ) as error:  # the first: the process that writes has ended
                raise CheckpointError(f"{type(error).__name__}: {error}") from error

        try:
            together(result, CheckpointError)
        except CheckpointError as error:
            self._running = None
            self._fail(running.step, running.attempt, error)

    def _write(self, writer: StepWriter, state: dict[str, Any]) -> tuple[Future[Any], Future[Any]]:
        """The copy and the write, both begun."""
        import torch.distributed.checkpoint as dcp

        if self._mode == "none":
            done: Future[Any] = Future()
            done.set_result(dcp.save(state, storage_writer=writer, no_dist=alone()))
            return done, done
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

        if self._stager is None:
            pinned = get_platform().pins_staging
            self._stager = DefaultStager(StagingOptions(pinned, self._mode == "process", True, pinned))
            if dist.is_initialized():
                self._group = new_gloo_group()
        get_platform().synchronize()  # the copy does not wait for what computes the state
        response = dcp.async_save(
            state,
            storage_writer=writer,
            process_group=self._group,
            async_checkpointer_type=AsyncCheckpointerType[self._mode.upper()],
            async_stager=self._stager,
            no_dist=alone(),
        )
        assert isinstance(response, AsyncSaveResponse), "the stager is asynchronous"
        return response.staging_completion, response.upload_completion

    def _fail(self, step: int, attempt: str, error: CheckpointError) -> None:
        """
        Raises:
            CheckpointError: always.
        """
        folder = storage.step_folder(self._root, step)
        self._unlock()
        if rank() == 0:
            shutil.rmtree(partial_name(folder, attempt), ignore_errors=True)  # its space may be what the disk lacks
        steps = broadcast(lambda: storage.complete_steps(self._root), CheckpointError)
        left = (
            f"the last complete checkpoint is {storage.step_folder(self._root, steps[-1])}"
            if steps
            else "none is complete yet"
        )
        remedy = (
            "start again with a lower optimizer.lr"
            if storage.NOT_FINITE in str(error)
            else "free space or set checkpoint.folder or dump_folder to a place that can be written, and start again"
        )
        raise CheckpointError(
            f"the checkpoint of step {step} could not be saved in {self._root}: {error}; {left}; {remedy}"
        ) from error
