"""What `make train` does, 20 steps of qwen3_moe:debug: how long it takes from start to end, and how the loss falls."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.report import Gate, Report

SECONDS = 60
LOSS_FALL = 1.0
STEPS = 20


def measure(folder: Path, *, quick: bool) -> Report:
    """One run of the command."""
    dump_folder = folder / "debug_run"
    shutil.rmtree(dump_folder, ignore_errors=True)
    steps = 2 if quick else STEPS
    command = [sys.executable, "-m", "hyper_parallel.train", "--model_spec", "qwen3_moe"]
    begin = time.perf_counter()
    subprocess.run([*command, "--training.steps", str(steps), "--dump_folder", str(dump_folder)], check=True)
    seconds = time.perf_counter() - begin
    lines = (dump_folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    run = f"qwen3_moe:debug, {steps} steps"
    return Report(
        "debug_run",
        [
            Gate(what=f"{run}: from start to end", unit="seconds", ours=[seconds], relation="<=", bound=SECONDS),
            Gate(
                what=f"{run}: loss of the first less that of the last",
                unit="loss",
                ours=[losses[0] - losses[-1]],
                relation=">=",
                bound=LOSS_FALL,
            ),
        ],
    )
