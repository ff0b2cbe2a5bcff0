"""Start-up: `--help` against `import torch`, and what the YAML door adds to the model door."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import Gate, Report

TIMES_IMPORT_TORCH = 1.5
YAML_SECONDS = 0.15
RUNS = 7

IMPORT_TORCH = (sys.executable, "-c", "import torch")
HELP = (sys.executable, "-m", "hyper_parallel.train", "--help")
MODEL_DOOR = (*HELP, "--model_spec", "qwen3_moe")
YAML_DOOR = (*HELP, "--config-file", "recipes/yaml/qwen3_moe_complete.yaml")


def measure(folder: Path, *, quick: bool) -> Report:
    """All in turns; the first round, which may have to write byte code, does not count."""
    commands = (HELP, IMPORT_TORCH, YAML_DOOR, MODEL_DOOR)
    rounds = [[clock_seconds(command) for command in commands] for _ in range(2 if quick else 1 + RUNS)][1:]
    help_seconds, import_seconds, yaml_seconds, model_seconds = zip(*rounds, strict=True)
    return Report(
        "start_up",
        [
            Gate(
                what="train --help / import torch",
                unit="seconds",
                ours=help_seconds,
                theirs=import_seconds,
                relation="<=",
                bound=TIMES_IMPORT_TORCH,
            ),
            Gate(
                what="--help behind a complete YAML file, beyond --help behind --model_spec",
                unit="seconds",
                ours=[y - m for y, m in zip(yaml_seconds, model_seconds, strict=True)],
                relation="<=",
                bound=YAML_SECONDS,
            ),
        ],
    )


def clock_seconds(command: Sequence[str | Path]) -> float:
    """Of a whole process, from its start to its end."""
    begin = time.perf_counter()
    subprocess.run(list(map(str, command)), capture_output=True, check=True)
    return time.perf_counter() - begin
