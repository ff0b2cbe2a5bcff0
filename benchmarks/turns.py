"""Contenders that take turns on the machine, each in a process of its own for as long as the comparison runs."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """`module.run(work, turn)` trains, and calls `turn.step_done()` after each of its `turn.steps` steps."""

    name: str
    module: str
    arguments: dict[str, Any] = field(default_factory=dict)
    """More keyword arguments of `run`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """How often and how long each contender has its turn."""

    rounds: int = 5
    """Turns of each contender."""
    steps: int = 5
    """Steps of a turn, timed together."""
    warmup_steps: int = 3
    """Steps before the first turn, 1 or more: allocators, caches and threads find their size."""

    @property
    def total_steps(self) -> int:
        """Steps that a contender trains in all."""
        return self.warmup_steps + self.rounds * self.steps


class Turn:
    """A contender's side: it stops after the warm-up and after each turn until it is told to go on."""

    def __init__(self, connection: Connection, schedule: Schedule) -> None:
        self._connection = connection
        self._schedule = schedule
        self._done = 0
        self._begin = 0.0

    @property
    def steps(self) -> int:
        """Steps to train, all turns and the warm-up together."""
        return self._schedule.total_steps

    def step_done(self) -> None:
        """Call it after each optimizer step; it returns when the next may begin."""
        self._done += 1
        in_turn, of_turn = divmod(self._done - self._schedule.warmup_steps, self._schedule.steps)
        if in_turn < 0 or of_turn:
            return
        self._connection.send(time.perf_counter() - self._begin)
        # After the last turn too: what it does at its end must not fall into the turn of another.
        self._connection.recv()
        self._begin = time.perf_counter()


@dataclass(slots=True)
class Result:
    """What one contender came to."""

    seconds: list[float] = field(default_factory=list)
    """Of each turn."""
    peak_bytes: int = 0
    """Largest resident size of its process."""


class ContenderError(RuntimeError):
    """A contender's process raised or died."""


def interleave(contenders: Sequence[Contender], work: Any, schedule: Schedule, logs: Path) -> dict[str, Result]:
    """Lets all contenders do `work` in turns, round by round, and returns the result of each by name.

    Every round begins with the next contender, so that none has always the same one before it. What they print goes
    to `logs`, a folder.

    Raises:
        ContenderError: with the last words of the first that failed.
    """
    logs.mkdir(parents=True, exist_ok=True)
    results = {contender.name: Result() for contender in contenders}
    with ExitStack() as running:
        lines = {}
        for contender in contenders:
            line = lines[contender.name] = _Line.start(contender, work, schedule, logs, running)
            line.receive()  # the end of its warm-up
        for number in range(schedule.rounds):
            first = number % len(contenders)
            for contender in [*contenders[first:], *contenders[:first]]:
                lines[contender.name].connection.send("go")
                results[contender.name].seconds.append(lines[contender.name].receive())
        for name, line in lines.items():
            line.connection.send("end")
            results[name].peak_bytes = line.receive()
    return results


@dataclass(frozen=True, slots=True)
class _Line:
    """The parent's side of one contender."""

    name: str
    connection: Connection
    log: Path

    @classmethod
    def start(cls, contender: Contender, work: Any, schedule: Schedule, logs: Path, running: ExitStack) -> _Line:
        """Starts the process, which `running` ends."""
        context = multiprocessing.get_context("spawn")
        ours, its = context.Pipe()
        log = logs / f"{contender.name.replace(' ', '_')}.log"
        process = context.Process(target=_live, args=(contender, work, schedule, its, log), daemon=True)
        process.start()
        its.close()  # so that its death is the end of the line
        # Closing the line ends a process that still waits for its turn, when another has failed.
        running.callback(process.join)
        running.callback(ours.close)
        return cls(contender.name, ours, log)

    def receive(self) -> Any:
        """What the contender says next."""
        try:
            return self.connection.recv()
        except (EOFError, ConnectionError):
            tail = self.log.read_text(errors="replace")[-4000:]
            raise ContenderError(f"{self.name} ended early; the end of {self.log}:\n{tail}") from None


def _live(contender: Contender, work: Any, schedule: Schedule, connection: Connection, log: Path) -> None:
    """Life of a contender's process."""
    with log.open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    importlib.import_module(contender.module).run(work, Turn(connection, schedule), **contender.arguments)
    connection.send(peak_bytes())


def peak_bytes() -> int:
    """Largest resident size of this process so far, as Linux counts it. Not getrusage, whose peak may be that of the
    program that started this one."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM: memory is measured on Linux only")
