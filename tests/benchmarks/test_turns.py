"""Who is on the machine when."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.turns import Contender, ContenderError, Schedule, interleave

MODULE = "tests.benchmarks.waiter"


def waiter(name: str, **arguments: object) -> Contender:
    return Contender(name=name, module=MODULE, arguments={"name": name, **arguments})


def test_turns_are_taken_in_rounds_that_begin_with_another_each_time(tmp_path: Path) -> None:
    steps = tmp_path / "steps"
    results = interleave(
        [waiter("a", step_seconds=0.05), waiter("b")],
        str(steps),
        Schedule(rounds=3, steps=2, warmup_steps=1),
        tmp_path / "logs",
    )
    assert steps.read_text() == "ab" + "aabb" + "bbaa" + "aabb"
    assert [len(results[name].seconds) for name in "ab"] == [3, 3]
    assert min(results["a"].seconds) >= 2 * 0.05  # of the turn's two steps, and of no one else's
    assert min(results["b"].seconds) > 0
    assert min(result.peak_bytes for result in results.values()) > 2**20


def test_a_failure_is_told_with_its_traceback(tmp_path: Path) -> None:
    contenders = [waiter("a"), waiter("b", fails_at=2)]
    with pytest.raises(ContenderError, match=r"(?s)b ended early; .*ValueError: b cannot do step 2"):
        interleave(contenders, str(tmp_path / "steps"), Schedule(rounds=2, steps=1, warmup_steps=1), tmp_path / "logs")
