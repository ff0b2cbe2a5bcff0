"""SIGTERM and SIGINT: the run ends after a whole step, with a checkpoint of it."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from types import FrameType
from typing import Any, Self

from hyper_parallel.distributed.agreed_step import AgreedStep

logger = logging.getLogger(__name__)

ONE_SIGNAL_SECONDS = 0.25
"""Signals within this time are one: a launcher passes on what it is sent, and may not be the only one to send it."""


class StopSignals:
    """While entered, the first signal asks for the end after the step in progress (on several ranks, after the next
    one). A second one ends the process at once, as if nobody listened.

    Only the main thread may listen; in another one, signals do what they did before.
    """

    def __init__(self) -> None:
        self._agreed = AgreedStep()
        self._signal: signal.Signals | None = None
        self._at = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def due(self, step: int) -> bool:
        """Whether to stop after `step`, which has ended. Every rank asks once after every step."""
        if self._signal is not None:
            logger.warning("%s: stopping after a whole step; a second signal ends the run at once", self._signal.name)
            self._signal = None
            self._agreed.request(step)
        return self._agreed.due(step)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        # No logging in here: it may have been interrupted while it held its lock.
        now = time.monotonic()
        if self._at == 0.0:
            self._signal, self._at = signal.Signals(number), now
        elif now - self._at > ONE_SIGNAL_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
