from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hyper_parallel.components.checkpoint import initial_weights, manager
from hyper_parallel.components.checkpoint.retention import best_step, remove_old
from hyper_parallel.components.checkpoint.step_locks import being_read, remove_unused
from hyper_parallel.components.checkpoint.step_reader import StepReader
from hyper_parallel.components.checkpoint.storage import step_folder
from tests.components.checkpoint.run import Run


def steps(root: Path) -> list[int]:
    return sorted(int(folder.name.removeprefix("step-")) for folder in root.iterdir())


def save(tmp_path: Path, losses: dict[int, float | None], **config: object) -> Path:
    run = Run(tmp_path, **config)
    for step, loss in losses.items():
        run.manager.save(step, validation_loss=loss)
    return tmp_path / "checkpoint"


def test_the_best_by_validation_is_kept(tmp_path: Path) -> None:
    root = save(tmp_path, {1: 2.5, 2: 1.5, 3: None, 4: 1.5, 5: 3.0, 6: 2.0}, keep_latest_k=2)
    assert steps(root) == [2, 5, 6]
    assert best_step(root, [5, 6]) == 6
    root = save(tmp_path, {7: 1.25, 8: 4.0}, keep_latest_k=2)
    assert steps(root) == [7, 8]


def test_a_loss_that_is_no_number_is_never_the_best(tmp_path: Path) -> None:
    root = save(tmp_path, {1: math.nan, 2: 1.5, 3: math.nan, 4: math.inf}, keep_latest_k=1)
    assert steps(root) == [2, 4]
    assert best_step(root, [4]) == 4


def test_without_validation_only_the_newest_are_kept(tmp_path: Path) -> None:
    root = save(tmp_path, dict.fromkeys((1, 2, 3)), keep_latest_k=1)
    assert steps(root) == [3]
    assert best_step(root, [3]) is None


def test_what_another_process_reads_is_kept_until_it_has(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = save(tmp_path, dict.fromkeys((1, 2, 3)))
    code = (
        "import pathlib, sys; from hyper_parallel.components.checkpoint.step_locks import being_read\n"
        "with being_read(pathlib.Path(sys.argv[1])): print('reads', flush=True); sys.stdin.read()"
    )
    reader = subprocess.Popen(
        [sys.executable, "-c", code, str(step_folder(root, 1))],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert reader.stdout is not None and reader.stdout.readline() == "reads\n"
    with caplog.at_level("INFO"):
        remove_old(root, 3, 1)
    assert steps(root) == [1, 3]
    assert "checkpoint: step 1 is being read, and removed another time" in caplog.text
    reader.kill()  # which ends its hold as well
    reader.communicate()
    remove_old(root, 3, 1)
    assert steps(root) == [3]


@pytest.mark.parametrize(("place", "config"), [(manager, {}), (initial_weights, {"enable": False})])
def test_a_run_that_loads_a_step_keeps_it_meanwhile(
    place: ModuleType, config: dict[str, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own newest step, and that of another run (load_from)."""
    root, read, removed = save(tmp_path, {1: None}), place.read, []

    def asked_for(reader: StepReader, state: dict[str, Any]) -> None:
        removed.append(remove_unused(root / "step-1"))
        read(reader, state)

    monkeypatch.setattr(place, "read", asked_for)
    run = Run(tmp_path, load_from=str(root), **config)
    assert run.manager.load() == (0 if config else 1)
    assert removed == [False]
    assert remove_unused(root / "step-1")


def test_several_may_read(tmp_path: Path) -> None:
    root = save(tmp_path, {1: None, 2: None})
    with being_read(root / "step-1"), being_read(root / "step-1"):
        remove_old(root, 2, 1)
        assert steps(root) == [1, 2]
