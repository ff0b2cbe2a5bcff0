"""Which combinations are run."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from benchmarks.parity.combination import DEGREES, MODELS, Combination, layouts, literals
from benchmarks.parity.covering import Choice, Space, cover
from hyper_parallel.config.sections import ActivationCheckpointConfig, ParallelismConfig
from hyper_parallel.distributed.capabilities import features_of
from hyper_parallel.distributed.topology import resolve_degrees

WORLD_SIZES = (2, 4, 8)
FACTORS: dict[str, tuple[Any, ...]] = {
    "layout": layouts(WORLD_SIZES),
    "micro_batches": (1, 2, 4),
    "compile": (False, True),
    "cp_method": (None, *literals(ParallelismConfig, "cp_method")),
    "pp_schedule": (None, *literals(ParallelismConfig, "pp_schedule")),
    "sequence_parallel": (None, False, True),
    "loss_parallel": (None, False, True),
    "mode": (None, *literals(ParallelismConfig, "mode")),
    "recompute": literals(ActivationCheckpointConfig, "mode"),
    "swap": (False, True),
    "model": tuple(MODELS),
    "packing": ("concat", "pad", "best_fit"),
    "cpu_offload": (False, True),
    "loss": ("whole", "chunked"),
    "reshard_after_forward": (None, True, False),
}
"""Values of each factor. A layout is a value for each of DEGREES. None of what depends on a degree is the default,
whatever the degree; all other values ask for one above 1."""
FLEXIBLE = ("layout", "micro_batches", "compile", "pp_schedule")
"""Of these others may demand another than the first value."""

NAMED: tuple[Choice, ...] = tuple(
    {"layout": dict.fromkeys(DEGREES, 1) | degrees}
    for degrees in (
        {"tp": 2, "cp": 2, "dp_shard": 2},
        {"tp": 2, "cp": 2, "dp_shard": 2, "ep": 4},
        {"tp": 2, "dp_shard": 4, "ep": 2},
        {"pp": 2, "tp": 2, "dp_shard": 2},
        {"pp": 2, "dp_shard": 4, "ep": 2},
        {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
    )
)
"""Layouts of 8 ranks that are run in any case: tp x cp x dp; tp x ep x dp, with experts over dp and cp, and over dp;
pp x tp x dp; pp x ep x dp; hsdp x tp."""

_DEPENDENT = {
    "cp_method": "cp",
    "pp_schedule": "pp",
    "sequence_parallel": "tp",
    "loss_parallel": "tp",
    "mode": "tp",
}
"""Settings that mean nothing where this degree is 1."""


def combination(choice: Choice) -> Combination:
    """The run of a value for every factor."""
    rest = {name: value for name, value in choice.items() if name != "layout" and value is not None}
    return Combination(**choice["layout"], **rest)


@functools.cache
def is_legal(run: Combination) -> bool:
    """Whether a run takes the combination. What is set without an effect is left to the run's own tests."""
    idle = (name for name, degree in _DEPENDENT.items() if getattr(run, degree) == 1)
    return not any(name in run.items() for name in idle) and not run.faults()


def settings(run: Combination) -> list[tuple[str, Hashable]]:
    """What a combination sets, as far as it has an effect."""
    names = [*DEGREES, *(name for name in FACTORS if name != "layout")]
    effective = [name for name in names if getattr(run, _DEPENDENT.get(name, ""), 2) > 1]
    return [("ranks", run.world_size), *((name, getattr(run, name)) for name in effective)]


@functools.cache
def setting_pairs(run: Combination) -> frozenset[Hashable]:
    """Every two settings that occur together, and the set of degrees above 1."""
    degrees = frozenset(name for name in DEGREES if getattr(run, name) > 1)
    return frozenset(itertools.combinations(settings(run), 2)) | {degrees}


@functools.cache
def feature_pairs(run: Combination) -> frozenset[Hashable]:
    """Every two features of the capability table that occur together."""
    config = run.config("unused", 50)
    used = features_of(config, resolve_degrees(config.parallelism, run.world_size))
    return frozenset(map(frozenset, itertools.combinations(used, 2)))


@functools.cache
def whole_matrix() -> list[Combination]:
    """NAMED, and what it takes for every two values of different factors to occur together, on every number of ranks,
    and for every set of degrees to be above 1 at once, unless that is refused."""
    return list(map(combination, cover(_space(FACTORS["layout"], setting_pairs), NAMED)))


@functools.cache
def short_matrix() -> list[Combination]:
    """What it takes for every two features of the capability table to occur together, unless they are refused, and for
    every setting to occur at all. Few ranks: tests run it."""
    space = _space(layouts((2, 4)), lambda run: feature_pairs(run) | frozenset(settings(run)))
    return list(map(combination, cover(space)))


def _is_choice(choice: Choice) -> bool:
    asked = (degree for name, degree in _DEPENDENT.items() if choice[name] is not None)
    return all(choice["layout"][degree] > 1 for degree in asked) and is_legal(combination(choice))


def _space(layouts: Sequence[Choice], goals: Callable[[Combination], frozenset[Hashable]]) -> Space:
    return Space(
        FACTORS | {"layout": layouts},
        FLEXIBLE,
        _is_choice,
        lambda choice: goals(combination(choice)),
    )
