"""No pair of features in between: each is refused at parse, or the loss of a run with both is compared."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from benchmarks.parity.matrix import short_matrix
from hyper_parallel.distributed.capabilities import FEATURES, REFUSED, capability_faults, capability_table, features_of
from hyper_parallel.distributed.topology import resolve_degrees
from tests.trainer import (
    test_activation_memory,
    test_context_parallel,
    test_expert_parallel,
    test_pipeline,
    test_pipeline_plans,
    test_tensor_parallel,
)
from tests.trainer.runs import tiny_config, with_parallelism


def compared_pairs() -> set[frozenset[str]]:
    """Pairs of features that occur together in a case of the parity tests."""
    pairs = set()
    tests = (
        test_tensor_parallel,
        test_context_parallel,
        test_expert_parallel,
        test_pipeline_plans,
        test_activation_memory,
    )
    spread = [item for test in tests for item in test.CASES.items()]
    runs = [(world_size, case.config("unused", 50)) for world_size, cases in spread for case in cases.values()]
    for world_size, cases in test_pipeline.CASES.items():
        runs += [(world_size, test_pipeline.config_of(Path("unused"), {"pp": 2} | case)) for case in cases.values()]
    runs += [(run.world_size, run.config("unused", 50)) for run in short_matrix()]
    for world_size, config in runs:
        used = features_of(config, resolve_degrees(config.parallelism, world_size))
        pairs |= set(map(frozenset, combinations(used, 2)))
    return pairs


def test_every_pair_is_refused_or_compared() -> None:
    every = set(map(frozenset, combinations(FEATURES, 2)))
    compared = compared_pairs()
    assert not REFUSED.keys() - every
    assert sorted(map(sorted, every - REFUSED.keys() - compared)) == []
    assert sorted(map(sorted, compared & REFUSED.keys())) == []


def test_the_table_in_the_documents_is_current() -> None:
    document = (Path(__file__).parents[2] / "docs" / "parallelism.md").read_text()
    assert f"-->\n{capability_table()}\n<!-- end of capabilities -->" in document


def test_a_refused_pair_is_told_with_both_fields_and_the_reason() -> None:
    config = with_parallelism(tiny_config("unused", steps=1), tp=2, dp_shard=1, mode="validate")
    config.compile.enable = True
    (fault,) = capability_faults(config, resolve_degrees(config.parallelism, 2))
    assert str(fault) == (
        "compile.enable: compile does not go with validate mode (parallelism.mode): a compiled graph runs without the "
        "boundaries that are to be compared; switch one of them off"
    )
    assert fault in list(config.cross_faults(2))


@pytest.mark.parametrize(("degrees", "expected"), [({"dp_shard": -1}, "sharding"), ({"dp_replicate": 2}, "replicas")])
def test_degrees_count_as_they_resolve(degrees: dict[str, int], expected: str) -> None:
    config = with_parallelism(tiny_config("unused", steps=1), **degrees)
    used = features_of(config, resolve_degrees(config.parallelism, 2))
    assert used == {expected, "packed documents", "accumulation"}
