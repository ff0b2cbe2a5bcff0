from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch

from hyper_parallel import ckpt
from hyper_parallel.components.checkpoint.step_locks import being_read, lock_unfinished
from tests.components.checkpoint.run import Run
from tests.components.checkpoint.test_manager import flip_a_byte


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 and 2, and what a kill left of 3."""
    folder = tmp_path_factory.mktemp("run")
    run = Run(folder)
    for step, loss in ((1, 2.25), (2, None)):
        run.manager.save(step, validation_loss=loss)
        run.train(1)
    shutil.copytree(folder / "checkpoint/step-2", folder / "checkpoint/step-3.partial-abc")
    return folder


@pytest.fixture
def run_folder(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "run")


def said(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> str:
    assert ckpt.main([str(word) for word in words]) == code
    captured = capsys.readouterr()
    return captured.out if code < 2 else captured.err


def test_ls(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, "ls", run_folder, code=1).splitlines()
    assert re.fullmatch(r"1 +[\d.]+ kB  20\d\d-\S+ \S+  1      full  2\.2500           complete", lines[1])
    assert re.fullmatch(r"2 .* full  -                complete", lines[2])
    assert re.fullmatch(r"3\.partial-abc .* incomplete: its save did not finish", lines[3])
    assert len(lines) == 4
    assert said(capsys, "ls", run_folder / "checkpoint", code=1).splitlines() == lines
    assert len(said(capsys, "ls", run_folder / "checkpoint/step-2").splitlines()) == 2


def test_verify(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = run_folder / "checkpoint"
    shutil.rmtree(root / "step-3.partial-abc")
    assert said(capsys, "verify", run_folder) == f"{root}/step-1: as written\n{root}/step-2: as written\n"
    flip_a_byte(root / "step-2/__0_0.distcp")
    lines = said(capsys, "verify", run_folder, code=1).splitlines()
    assert lines[1].startswith(f"{root}/step-2: __0_0.distcp is not what was written (digest ")
    (root / "step-1/complete.json").unlink()
    lines = said(capsys, "verify", run_folder, code=1).splitlines()
    assert lines[0] == f"{root}/step-1: it has no complete.json, so its save did not finish"


def test_diff(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = run_folder / "checkpoint"
    equal = said(capsys, "diff", root / "step-1", root / "step-1")
    assert re.fullmatch(r"(\d+) of \1 shared entries are equal in every bit\n", equal)
    run = Run(tmp_path / "other")
    assert run.manager.load() == 0
    shutil.copytree(run_folder, tmp_path / "same")
    run = Run(tmp_path / "same", load_step=1)
    run.manager.load()
    with torch.no_grad():
        run.model.embed.weight[3, 2] += 0.125
    run.manager.save(7)
    lines = said(capsys, "diff", root / "step-1", tmp_path / "same", code=1).splitlines()
    assert [line for line in lines if line.startswith("model.")] == [
        "model.embed.weight: max |difference| 1.250e-01, in 1 of 126 values"
    ]


def test_diff_of_other_models(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Run(tmp_path / "other", model={"tied": True}, dtype="float32").manager.save(1)
    one, other = run_folder / "checkpoint/step-1", tmp_path / "other/checkpoint/step-1"
    lines = said(capsys, "diff", one, other, code=1).splitlines()
    assert f"model.lm_head.weight: only in {one}" in lines
    assert "model.embed.weight: float64 [21, 6] and float32 [21, 6]" in lines


def test_rm(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = run_folder / "checkpoint"
    assert said(capsys, "rm", run_folder, code=2) == "steps: none is given; give numbers of steps, or --unfinished\n"
    assert said(capsys, "rm", run_folder, 1, 9, code=2) == f"steps: 9 not in {run_folder}; choose of 1, 2\n"
    assert said(capsys, "rm", run_folder, 1, 2, code=2) == (
        "steps: 2 is the newest complete step; add --force to remove it\n"
    )
    assert len(list(root.iterdir())) == 3
    with being_read(root / "step-1"):
        said(capsys, "rm", run_folder, 1, code=1)
    assert (root / "step-1/complete.json").exists()
    assert said(capsys, "rm", run_folder, 1) == f"{root}/step-1: removed\n"
    with lock_unfinished(root / "step-3.partial-abc"):
        said(capsys, "rm", run_folder, "--unfinished", code=1)
    assert (root / "step-3.partial-abc/complete.json").exists()
    assert said(capsys, "rm", run_folder, "--unfinished") == f"{root}/step-3.partial-abc: removed\n"
    assert said(capsys, "rm", run_folder, 2, "--force") == f"{root}/step-2: removed\n"
    assert list(root.iterdir()) == []
    fact = f"folder: {run_folder} holds no checkpoint; give a dump folder, or the folder of its steps\n"
    assert said(capsys, "ls", run_folder, code=2) == fact


@pytest.mark.parametrize(("size", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2.5e13, "25 TB")])
def test_sizes(size: float, text: str) -> None:
    assert ckpt._size(size) == text
