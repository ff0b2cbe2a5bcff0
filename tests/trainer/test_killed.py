"""kill -9, at whatever instant it hits, of one rank or of all: started again, a run ends in the same bits.

``HYPER_PARALLEL_KILLS=30 python -m pytest tests/trainer/test_killed.py`` kills as often, for each way of saving.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from hyper_parallel.components.checkpoint.storage import complete_steps, step_folder
from tests.trainer.runs import deterministic, metrics

KILLS = int(os.environ.get("HYPER_PARALLEL_KILLS", "2"))
STEPS = 20


def command(folder: Path, mode: str) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "hyper_parallel.train"]
    recipe = ["--recipe", "tests.trainer.runs.saved_every_second_step", "--checkpoint.async_mode", mode]
    return [sys.executable, *launcher, *recipe, "--dump_folder", str(folder)]


def start(folder: Path, mode: str) -> subprocess.Popen[bytes]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command(folder, mode), env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def kill(launcher: subprocess.Popen[bytes], *, everyone: bool) -> None:
    ranks = [int(pid) for pid in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()]
    if everyone or not ranks:  # on a busy machine the launcher may not have come to start them
        launcher.kill()
    for pid in ranks if everyone else ranks[-1:]:
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, signal.SIGKILL)


def weights(folder: Path, step: int = STEPS) -> dict[str, Any]:
    """Those of the last `step`, and its optimizer state."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

    root = folder / "checkpoint"
    assert complete_steps(root)[-1] == step
    state = _load_state_dict_from_keys(
        {"model", "optimizer"}, storage_reader=dcp.FileSystemReader(step_folder(root, step))
    )
    return {f"{group}.{name}": value for group, of in state.items() for name, value in of.items()}


@pytest.mark.timeout(300 + 60 * KILLS)
@pytest.mark.parametrize("mode", ["none", "thread"])
def test_a_run_that_is_killed_ends_as_one_that_is_not(mode: str, tmp_path: Path) -> None:
    begun = time.monotonic()
    straight = start(tmp_path / "straight", mode)
    lines = tmp_path / "straight" / "metrics.jsonl"
    while not lines.exists():
        assert straight.poll() is None
        time.sleep(0.02)
    until_training = time.monotonic() - begun
    assert straight.wait(timeout=200) == 0
    seconds = time.monotonic() - begun
    instants = random.Random(mode)
    killed, folders = 0, (tmp_path / f"killed{i}" for i in count())
    folder = next(folders)
    while killed < KILLS:
        process = start(folder, mode)
        time.sleep(instants.uniform(0.9 * until_training, seconds))
        if process.poll() is None:
            kill(process, everyone=bool(killed % 2))
        elif process.returncode != 0:
            pytest.fail(f"ended with {process.returncode} before it was killed")
        if process.wait(timeout=200) == 0:  # it was faster
            folder = next(folders)
        else:
            killed += 1
    assert start(folder, mode).wait(timeout=200) == 0
    assert deterministic(metrics(folder)) == deterministic(metrics(tmp_path / "straight"))
    assert_equal(weights(tmp_path / "straight"), weights(folder))


def assert_equal(expected: dict[str, Any], found: dict[str, Any]) -> None:
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        same = torch.equal(value, found[name]) if isinstance(value, torch.Tensor) else value == found[name]
        assert same, name
