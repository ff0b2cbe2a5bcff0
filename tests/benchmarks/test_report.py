"""Medians, ratios, gates, and how they are written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.comparison import Comparison
from benchmarks.report import Gate, Report, markdown, write_json
from benchmarks.turns import Contender

SPEED = Gate(
    what="ours / theirs", unit="tokens/s", ours=[90, 1200, 110], theirs=[100, 50, 99], relation=">=", bound=1.1
)
SECONDS = Gate(what="a run", unit="seconds", ours=[61.0], relation="<=", bound=60)


def test_a_figure_is_a_ratio_of_medians_or_a_median() -> None:
    assert SPEED.figure == 110 / 99
    assert SECONDS.figure == 61.0


@pytest.mark.parametrize(
    ("ours", "relation", "bound", "is_kept"),
    [(3.0, ">=", 1.5, True), (2.9, ">=", 1.5, False), (3.0, "<=", 1.5, True), (3.1, "<=", 1.5, False)],
)
def test_a_bound_itself_is_kept(ours: float, relation: str, bound: float, is_kept: bool) -> None:
    gate = Gate(what="", unit="loss", ours=[ours], theirs=[2.0], relation=relation, bound=bound)
    assert gate.is_kept is is_kept


def test_what_is_not_a_number_keeps_no_bound() -> None:
    nan = float("nan")
    assert not Gate(what="", unit="loss", ours=[nan], relation=">=", bound=1).is_kept
    assert not Gate(what="", unit="loss", ours=[nan], relation="<=", bound=1).is_kept


def test_the_table() -> None:
    reports = [Report("speed", [SPEED], ["three turns"]), Report("run", [SECONDS])]
    lines = markdown(reports).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:4]]
    assert cells == [
        ["ours / theirs", "110 tokens/s", "99 tokens/s", "1.111", ">= 1.1", "PASS"],
        ["a run", "61.00 s", "", "", "<= 60", "FAIL"],
    ]
    assert lines[4:] == ["", "- speed: three turns"]


def test_json_holds_every_sample(tmp_path: Path) -> None:
    path = tmp_path / "bench" / "results.json"
    write_json([Report("speed", [SPEED])], path, threads=2)
    content = json.loads(path.read_text())
    assert content["threads"] == 2
    (gate,) = content["benchmarks"]["speed"]["gates"]
    assert gate["ours"] == [90, 1200, 110]
    assert gate["figure"] == pytest.approx(110 / 99)
    assert gate["is_kept"] is True


def test_a_comparison_is_gated_on_speed_and_on_memory() -> None:
    ours, theirs = Contender(name="ours", module=""), Contender(name="theirs", module="")
    found = Comparison(1.0, {"ours": [120.0], "theirs": [100.0]}, {"ours": 101, "theirs": 100})
    speed, memory = found.gates("packed", ours, [(theirs, 1.15)])
    assert (speed.figure, speed.is_kept, speed.what) == (1.2, True, "packed: ours / theirs")
    assert (memory.figure, memory.is_kept, memory.unit) == (1.01, False, "bytes")
