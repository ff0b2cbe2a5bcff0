"""Profiler: traces of a window of steps."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from hyper_parallel.config.configurable import Configurable
from hyper_parallel.config.errors import Fault
from hyper_parallel.config.sections import at_least
from hyper_parallel.distributed.process_group import rank
from hyper_parallel.platform import get_platform

logger = logging.getLogger(__name__)


class Profiler(Configurable):
    """Writes a trace of `active_steps` steps; wraps the loop, and is told of each step.

    ::

        with profiler:
            for ...:
                ...
                profiler.step()
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Which steps of which ranks, and how much of them."""

        enable: bool = False
        """Write traces."""
        folder: str = "profile"
        """Where the traces lie, below dump_folder."""
        wait_steps: int = 10
        """Steps of this process before the window, to let it settle."""
        warmup_steps: int = 1
        """Steps that are traced and thrown away, because the first ones carry the profiler's own start."""
        active_steps: int = 3
        """Steps in the trace."""
        repeat: int = 1
        """Windows of wait, warm-up and active steps, one after the other; 0 is without end."""
        ranks: tuple[int, ...] = ()
        """Ranks that write a trace; empty is all of them."""
        record_shapes: bool = False
        """Record the shapes of operands."""
        profile_memory: bool = False
        """Record allocations."""
        with_stack: bool = False
        """Record the Python lines that operations come from; slow."""

        def faults(self) -> Iterator[Fault]:
            yield from at_least(self, 0, "wait_steps", "warmup_steps", "repeat")
            yield from at_least(self, 1, "active_steps")
            if any(rank < 0 for rank in self.ranks):
                yield Fault("ranks", f"{self.ranks} has a rank below 0", "give ranks from 0 on, or none for all")

    def __init__(self, config: Config, *, dump_folder: str) -> None:
        self.config = config
        self.folder = Path(dump_folder) / config.folder
        self._is_tracing = config.enable and (not config.ranks or rank() in config.ranks)
        self._steps = 0
        self._running = ExitStack()

    def __enter__(self) -> Self:
        if self._is_tracing:
            settings = self.config
            self._steps = 0
            self._profiler = get_platform().profiler(
                self.folder,
                wait_steps=settings.wait_steps,
                warmup_steps=settings.warmup_steps,
                active_steps=settings.active_steps,
                repeat=settings.repeat,
                record_shapes=settings.record_shapes,
                profile_memory=settings.profile_memory,
                with_stack=settings.with_stack,
            )
            self._profiler.start()
            self._running.callback(self._profiler.stop)
        return self

    def step(self) -> None:
        """A step has ended."""
        if self._is_tracing:
            self._steps += 1
            self._profiler.step()

    def __exit__(self, *exc_info: object) -> None:
        self._running.close()
        settings = self.config
        needed = settings.wait_steps + settings.warmup_steps + settings.active_steps
        if self._is_tracing and self._steps < needed:
            logger.warning(
                "profiler: the run ended after %d steps, before its window of steps %d to %d was full; lower "
                "profiler.wait_steps %d",
                self._steps,
                needed - settings.active_steps + 1,
                needed,
                settings.wait_steps,
            )
