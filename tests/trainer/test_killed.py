"""kill -9, at whatever instant it hits, of one rank or of all: started again, a run ends in the same bits.

``HYPER_PARALLEL_KILLS=30 python -m pytest tests/trainer/test_killed.py`` kills as often, for each way of saving.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from hyper_parallel.components.checkpoint.storage import complete_steps, step_folder
from hyper_parallel.components.checkpoint.verification import damage
from tests.trainer.runs import deterministic, metrics

KILLS = int(os.environ.get("HYPER_PARALLEL_KILLS", "3"))
STEPS = 12
VICTIMS = ((0,), (1,), (0, 1))


class Ranks:
    """Two ranks at a time, which `forked_ranks` starts."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.trainer.forked_ranks"],
            env=os.environ | {"OMP_NUM_THREADS": "1"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, start_new_session=True,
        )  # fmt: skip

    def start(self, folder: Path, mode: str) -> list[int]:
        """Begins the run, or goes on with it; its process ids."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        words = ["--recipe", "tests.trainer.runs.saved_every_second_step", "--training.steps", str(STEPS)]
        assert self._server.stdin is not None
        words += ["--checkpoint.async_mode", mode, "--dump_folder", str(folder)]
        print(json.dumps([port, words]), file=self._server.stdin, flush=True)
        return self._answer()

    def exit_codes(self) -> list[int]:
        """Waits until both have ended."""
        return self._answer()

    def _answer(self) -> list[int]:
        assert self._server.stdout is not None
        return [int(word) for word in self._server.stdout.readline().split()]

    def close(self) -> None:
        os.killpg(self._server.pid, signal.SIGKILL)
        self._server.communicate()


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    ranks = Ranks()
    yield ranks
    ranks.close()


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
def test_a_run_that_is_killed_ends_as_one_that_is_not(mode: str, ranks: Ranks, tmp_path: Path) -> None:
    straight = tmp_path / "straight"
    ranks.start(straight, mode)
    begun = time.monotonic()
    assert ranks.exit_codes() == [0, 0]
    seconds = time.monotonic() - begun
    instants = random.Random(mode)
    killed, folders = 0, (tmp_path / f"killed{i}" for i in count())
    folder = next(folders)
    while killed < KILLS:
        pids = ranks.start(folder, mode)
        time.sleep(instants.uniform(0, seconds))
        for rank in VICTIMS[killed % len(VICTIMS)]:
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(pids[rank], signal.SIGKILL)
        codes = ranks.exit_codes()
        if codes == [0, 0]:  # it was faster
            assert_equal_runs(straight, folder)
            folder = next(folders)
            continue
        assert -signal.SIGKILL in codes
        killed += 1
        root = folder / "checkpoint"
        assert [reason for step in complete_steps(root) if (reason := damage(step_folder(root, step)))] == []
    ranks.start(folder, mode)
    assert ranks.exit_codes() == [0, 0]
    assert_equal_runs(straight, folder)


def assert_equal_runs(straight: Path, killed: Path) -> None:
    assert deterministic(metrics(killed)) == deterministic(metrics(straight))
    assert_equal(weights(straight), weights(killed))


def assert_equal(expected: dict[str, Any], found: dict[str, Any]) -> None:
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        same = torch.equal(value, found[name]) if isinstance(value, torch.Tensor) else value == found[name]
        assert same, name
