"""The parity matrix holds whatever goes together, and nothing that is refused."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from benchmarks.parity.combination import DEGREES, Combination
from benchmarks.parity.matrix import (
    FACTORS,
    NAMED,
    combination,
    feature_pairs,
    is_legal,
    setting_pairs,
    short_matrix,
    whole_matrix,
)
from hyper_parallel.config import manager
from hyper_parallel.distributed.capabilities import FEATURES, REFUSED, features_of
from hyper_parallel.distributed.topology import resolve_degrees


@pytest.mark.parametrize("matrix", [short_matrix, whole_matrix])
def test_every_run_is_taken_by_the_front_door(matrix: Any) -> None:
    for run in matrix():
        config = run.config("unused", 50)
        assert manager.check(config, run.world_size) == [], run.name
        used = features_of(config, resolve_degrees(config.parallelism, run.world_size))
        assert not [pair for pair in REFUSED if pair <= used], run.name


@pytest.mark.parametrize("matrix", [short_matrix, whole_matrix])
def test_every_pair_of_features_that_is_not_refused_is_run(matrix: Any) -> None:
    every = set(map(frozenset, itertools.combinations(FEATURES, 2)))
    run = set().union(*map(feature_pairs, matrix()))
    assert sorted(map(sorted, every - REFUSED.keys() - run)) == []
    assert sorted(map(sorted, run & REFUSED.keys())) == []


def test_no_legal_run_has_a_pair_that_the_matrix_lacks() -> None:
    """Counted apart from the search that made it: in runs that are drawn, whatever of them is legal."""
    draw = random.Random(7)
    covered = set().union(*map(setting_pairs, whole_matrix()))
    legal, lacking = 0, set()
    for _ in range(10_000):
        # Half of the settings off: few runs with all on are legal.
        choice = {name: values[0] if draw.random() < 0.5 else draw.choice(values) for name, values in FACTORS.items()}
        run = combination(choice | {"layout": draw.choice(FACTORS["layout"])})
        if is_legal(run):
            legal += 1
            lacking |= setting_pairs(run) - covered
    assert legal > 300
    assert lacking == set()


def test_there_are_enough_runs_of_every_size() -> None:
    runs = whole_matrix()
    assert len(runs) == len({run.name for run in runs}) >= 60
    assert all(sum(run.world_size == size for run in runs) >= 10 for size in (2, 4, 8))
    layouts = [{name: getattr(run, name) for name in DEGREES} for run in runs]
    for named in (named["layout"] for named in NAMED):
        legal = any(is_legal(Combination(**named, micro_batches=count)) for count in FACTORS["micro_batches"])
        assert legal == (named in layouts), named
    assert {run.world_size for run in short_matrix()} == {2, 4}


def test_a_name_says_what_differs_and_runs_have_their_own_reference() -> None:
    run = Combination(model="dense", tp=2, dp_shard=2, loss_parallel=True, packing="pad", reshard_after_forward=False)
    assert run.name == "shard2 x tp2, dense, loss_parallel=True, packing=pad, reshard_after_forward=False"
    assert run.reference == Combination(model="dense", packing="pad")
    assert run.reference.name == "one process, dense, packing=pad"
    config = run.config("unused", 50)
    assert (config.parallelism.tp, config.parallelism.dp_shard, config.parallelism.loss_parallel) == (2, 2, True)
    assert (config.training.micro_batch_size, config.training.dtype, config.dataloader.packing) == (4, "float64", "pad")


def test_faults_are_those_of_the_run() -> None:
    (fault,) = Combination(tp=2, mode="validate", compile=True).faults()
    assert fault.fact.startswith("compile does not go with validate mode")
    (fault,) = Combination(dp_shard=4, micro_batches=4).faults()
    assert str(fault) == "micro_batches: 4 of 8 rows over 1 x 4 ranks; give a divisor"
