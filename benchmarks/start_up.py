"""Time of `python -m hyper_parallel.train --help`, against that of `import torch`."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from benchmarks.report import Gate, Report

TIMES_IMPORT_TORCH = 1.5
RUNS = 7

HELP = (sys.executable, "-m", "hyper_parallel.train", "--help")
IMPORT_TORCH = (sys.executable, "-c", "import torch")


def measure(folder: Path, *, quick: bool) -> Report:
    """The two in turns; the first of each, which may have to write byte code, does not count."""
    ours, theirs = [], []
    for run in range(2 if quick else 1 + RUNS):
        help_seconds, import_seconds = _seconds(HELP), _seconds(IMPORT_TORCH)
        if run > 0:
            ours.append(help_seconds)
            theirs.append(import_seconds)
    what = "train --help / import torch"
    gate = Gate(what=what, unit="seconds", ours=ours, theirs=theirs, relation="<=", bound=TIMES_IMPORT_TORCH)
    return Report("start_up", [gate])


def _seconds(command: tuple[str, ...]) -> float:
    begin = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - begin
