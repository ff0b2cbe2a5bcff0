"""One loss curve: every two features together follow one process, on 2 and 4 ranks. `make parity` runs all, longer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.parity import run as parity
from benchmarks.parity.combination import Combination
from benchmarks.parity.matrix import short_matrix
from benchmarks.parity.run import Result, run, table
from tests.distributed_world import RankError

STEPS = 3


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[Combination, Result]:
    found = run(short_matrix(), tmp_path_factory.mktemp("parity") / "runs", STEPS)
    return {result.combination: result for result in found}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("combination", short_matrix(), ids=lambda each: each.name)
def test_follows_one_process(results: dict[Combination, Result], combination: Combination) -> None:
    result = results[combination]
    assert result.error == ""
    assert result.passes, (result.loss, result.grad_norm)


ONE, TWO, THREE = (Combination(tp=2, packing=packing) for packing in ("concat", "pad", "best_fit"))


def write(folder: Path, each: Combination, losses: list[float], *, done: bool = True) -> None:
    place = folder / each.name
    place.mkdir(parents=True)
    lines = [{"step": step, "loss": loss, "grad_norm": 1.0} for step, loss in enumerate(losses, 1)]
    (place / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if done:
        (place / "done").write_text("2.5")


def test_a_run_that_falls_is_told_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks are stood in for: what they would leave behind is written."""
    worlds: list[list[Combination]] = []

    def run_world(size: int, function: Any, rows: list[Combination], folder: Path, steps: int, timeout: float) -> None:
        worlds.append(rows)
        for each in rows:
            write(folder, each, [2.0, 1.0 + 2e-9 * (each == THREE)], done=each != TWO)
            if each == TWO:
                raise RankError("rank 1 raised:\nwhy")

    monkeypatch.setattr(parity, "run_world", run_world)
    monkeypatch.setattr(parity, "_train_reference", lambda each, folder, _: write(folder, each, [2.0, 1.0], done=False))
    found = list(run([ONE, TWO, THREE], tmp_path / "runs", 2))
    assert worlds == [[ONE, TWO, THREE], [THREE]]
    assert [result.passes for result in found] == [True, False, False]
    assert found[1].error == "rank 1 raised:\nwhy"
    assert found[2].loss == pytest.approx(2e-9) and found[2].grad_norm == 0.0
    assert table(found, 2).splitlines()[2:] == [
        "| ranks | combination | loss | grad_norm | seconds | |",
        "|---|---|---|---|---|---|",
        "| 2 | tp2, moe tied | 0.0e+00 | 0.0e+00 | 2 | PASS |",
        "| 2 | tp2, moe tied, packing=pad | nan | nan | nan | FAIL |",
        "| 2 | tp2, moe tied, packing=best_fit | 2.0e-09 | 0.0e+00 | 2 | FAIL |",
        "",
        "tp2, moe tied, packing=pad:",
        "    rank 1 raised:",
        "    why",
        "",
        "1 passed, 2 failed: FAIL",
    ]
    worlds.clear()
    assert [result.passes for result in run([ONE, TWO, THREE], tmp_path / "runs", 2, resume=True)] == [
        True,
        False,
        False,
    ]
    assert worlds == [[TWO]]
    worlds.clear()
    assert len(list(run([ONE], tmp_path / "runs", 2))) == 1 and worlds == [[ONE]]


@pytest.mark.parametrize(
    ("losses", "error"), [([2.0], "it took other steps than 1 to 2"), ([2.0, 1.0, 1.0], "it took other steps than")]
)
def test_a_run_of_another_length_fails(tmp_path: Path, losses: list[float], error: str) -> None:
    write(tmp_path, ONE, losses)
    write(tmp_path, ONE.reference, [2.0, 1.0])
    result = parity._result(ONE, "", tmp_path, 2)
    assert result.error.startswith(error) and not result.passes


def test_a_loss_that_is_not_finite_fails(tmp_path: Path) -> None:
    write(tmp_path, ONE, [2.0, float("nan")])
    write(tmp_path, ONE.reference, [2.0, 1.0])
    assert not parity._result(ONE, "", tmp_path, 2).passes


@pytest.mark.parametrize(("loss", "norm", "passes"), [(1e-9, 1e-9, True), (1.1e-9, 0, False), (0, 1.1e-9, False)])
def test_the_gate(loss: float, norm: float, passes: bool) -> None:
    assert Result(ONE, loss, norm, 1.0).passes is passes
