"""Lists of runs cover whatever any legal run could, and hold no illegal one."""

from __future__ import annotations

import itertools
from typing import Any

from benchmarks.parity.covering import Choice, Space, cover

FACTORS: dict[str, tuple[Any, ...]] = {
    "ranks": (1, 2, 4),
    "spread": (False, True),
    "method": ("ring", "all", "heads"),
    "compiled": (False, True),
    "model": ("small", "large", "wide", "deep"),
}


def is_legal(run: Choice) -> bool:
    """A setting that needs ranks, one that goes with no other, and one that three ask for."""
    if run["spread"] and run["ranks"] == 1:
        return False
    if run["method"] == "heads" and run["compiled"]:
        return False
    return not (run["spread"] and run["model"] == "deep" and run["ranks"] < 4)


def pairs(run: Choice) -> frozenset[Any]:
    return frozenset(itertools.combinations(sorted(run.items()), 2))


SPACE = Space(FACTORS, ("ranks",), is_legal, pairs)


def every_legal_run() -> list[Choice]:
    runs = (dict(zip(FACTORS, values, strict=True)) for values in itertools.product(*FACTORS.values()))
    return list(filter(is_legal, runs))


def test_every_legal_pair_and_no_illegal_run() -> None:
    runs = list(cover(SPACE))
    everything = every_legal_run()
    assert all(run in everything for run in runs)
    assert set().union(*map(pairs, runs)) == set().union(*map(pairs, everything))
    assert 12 <= len(runs) <= 18 < len(everything) == 95  # 4 models x 3 methods at least


def test_what_is_named_comes_first_unless_it_is_illegal() -> None:
    named = [{"ranks": 4, "method": "all"}, {"ranks": 1, "spread": True}, {"ranks": 2, "model": "deep"}]
    first, second, *_ = cover(SPACE, named)
    assert (first["ranks"], first["method"]) == (4, "all")
    assert (second["ranks"], second["model"], second["spread"]) == (2, "deep", False)


def test_a_list_depends_on_the_seed_alone() -> None:
    assert list(cover(SPACE, seed=1)) == list(cover(SPACE, seed=1)) != list(cover(SPACE, seed=2))


def test_factors_that_others_demand_are_looked_for() -> None:
    assert SPACE.least({"spread": True, "model": "deep"}) == {
        "ranks": 4,
        "spread": True,
        "method": "ring",
        "compiled": False,
        "model": "deep",
    }
    assert SPACE.least({"method": "heads", "compiled": True}) is None
