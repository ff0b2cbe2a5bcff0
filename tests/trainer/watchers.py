"""Callbacks for tests, and recipes of small runs that have them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from hyper_parallel.config.target import Target
from hyper_parallel.trainer.callbacks import Callback, TrainerState
from hyper_parallel.trainer.config import TrainerConfig
from tests.trainer.runs import tiny_config

MOMENTS = (
    *("on_init_end", "on_load", "on_train_begin", "on_epoch_begin", "on_step_begin", "on_substep_end"),
    *("on_pre_optimizer_step", "on_step_end", "on_evaluate", "on_log", "on_save", "on_epoch_end", "on_train_end"),
)
"""All there are."""


class Everything(Callback):
    """Calls `see(moment, state)` in every moment."""

    def see(self, moment: str, state: TrainerState) -> None:
        raise NotImplementedError


def _seen(moment: str) -> Any:
    return lambda self, state: self.see(moment, state)


for _moment in MOMENTS:
    setattr(Everything, _moment, _seen(_moment))


class Notes(Everything):
    """Adds (name, moment, step) to a list that all of a trainer share."""

    def __init__(self, trainer: Any, name: str = "") -> None:
        super().__init__(trainer)
        self.name = name
        self.notes: list[tuple[str, str, int]] = trainer.__dict__.setdefault("notes", [])

    def see(self, moment: str, state: TrainerState) -> None:
        self.notes.append((self.name, moment, state.global_step))

    def close(self) -> None:
        self.notes.append((self.name, "close", self.trainer.state.global_step))


class Raises(Everything):
    """Raises in one moment of one step, on one rank or, with None, on all."""

    def __init__(
        self, trainer: Any, moment: str, step: int, rank: int | None = None, error: type[Exception] = ValueError
    ) -> None:
        super().__init__(trainer)
        if moment not in MOMENTS:
            raise TypeError("no moment")
        self.place = (moment, step, rank)
        self.error = error

    def see(self, moment: str, state: TrainerState) -> None:
        here = dist.get_rank() if dist.is_initialized() else 0
        if self.place in ((moment, state.global_step, None), (moment, state.global_step, here)):
            raise self.error("broken\nwatcher")


@contextmanager
def log_lines() -> Iterator[list[str]]:
    """What is logged within, tracebacks included. Not caplog: a run does not hand its lines to the root logger."""
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(self.format(record))

    logger, handler = logging.getLogger("hyper_parallel"), Lines()
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def third_step_raises() -> TrainerConfig:
    """A recipe: a run of ten steps, in the third of which a callback raises; on one rank with --callbacks.0.rank."""
    config = tiny_config("set --dump_folder", steps=10)
    config.callbacks = (Target.of(Raises, moment="on_step_end", step=3),)
    return config
