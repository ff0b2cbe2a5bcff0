"""Processor time, which other work on the machine changes less than it changes the time on the clock."""

from __future__ import annotations

import resource
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path


def of_command(command: Sequence[str | Path], log: Path) -> float:
    """Of a command and all processes that it starts and waits for; what they print goes to `log`."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with log.open("wb") as file:
        subprocess.run(list(map(str, command)), stdout=file, stderr=file, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def of_call(function: Callable[[], object]) -> float:
    """Of a call, in this process."""
    begin = time.process_time()
    function()
    return time.process_time() - begin
