"""Degrees of parallelism for a number of ranks: plain arithmetic, so that a topology is refused before torch loads."""

from __future__ import annotations

import math
from typing import NamedTuple

from hyper_parallel.config.errors import ConfigError
from hyper_parallel.config.sections import ParallelismConfig


class Degrees(NamedTuple):
    """Size of every mesh axis. Their product is the number of ranks."""

    dp_replicate: int
    dp_shard: int
    cp: int = 1
    tp: int = 1
    pp: int = 1


def resolve_degrees(parallelism: ParallelismConfig, world_size: int) -> Degrees:
    """The degrees that `parallelism` means for `world_size` ranks, with ``dp_shard=-1`` filled in.

    Raises:
        ConfigError: the degrees do not multiply to `world_size`, or ep does not divide the ranks that it spreads
            experts over. The fault names every factor.
    """
    degrees = _resolved(parallelism, world_size)
    spread = degrees.dp_shard * degrees.cp
    if spread % parallelism.ep:
        product = _product({"dp_shard": degrees.dp_shard, "cp": degrees.cp})
        raise ConfigError.one(
            "parallelism.ep",
            f"{parallelism.ep} does not divide {product} = {spread}, the ranks that experts are spread over",
            f"set {f'a divisor of {spread}' if spread > 1 else 1}, or start so many ranks that dp_shard x cp is a "
            f"multiple of {parallelism.ep}",
        )
    return degrees


def _resolved(parallelism: ParallelismConfig, world_size: int) -> Degrees:
    dp_replicate, dp_shard = parallelism.dp_replicate, parallelism.dp_shard
    model = {"cp": parallelism.cp, "tp": parallelism.tp, "pp": parallelism.pp}
    model_ranks = math.prod(model.values())
    beside = {name: degree for name, degree in model.items() if degree > 1}
    if dp_shard == -1:
        given = dp_replicate * model_ranks
        if world_size % given:
            fields = [*beside, "dp_replicate"]
            product = _product({"dp_replicate": dp_replicate} | beside)
            raise ConfigError.one(
                f"parallelism.{next((f for f in fields if world_size % getattr(parallelism, f)), fields[0])}",
                f"{product} = {given} does not divide the world size {world_size}"
                if beside
                else f"{dp_replicate} does not divide the world size {world_size}",
                f"set divisors of {world_size}, or start a multiple of {given} ranks",
            )
        return Degrees(dp_replicate, world_size // given, **model)
    ranks = dp_replicate * dp_shard * model_ranks
    if ranks != world_size:
        product = _product({"dp_replicate": dp_replicate, "dp_shard": dp_shard} | beside)
        raise ConfigError.one(
            "parallelism.dp_shard",
            f"{product} = {ranks} ranks, but the world size is {world_size}",
            f"start {ranks} ranks (torchrun --nproc_per_node={ranks}), or set dp_shard -1 to take what is left",
        )
    return Degrees(dp_replicate, dp_shard, **model)


def given_degrees(parallelism: ParallelismConfig) -> Degrees:
    """The degrees as they are given, with one for a dp_shard of -1: where they do not multiply to the number of ranks,
    the rest of a run can still be judged."""
    p = parallelism
    return Degrees(p.dp_replicate, max(p.dp_shard, 1), p.cp, p.tp, p.pp)


def _product(degrees: dict[str, int]) -> str:
    return " x ".join(f"{name} {degree}" for name, degree in degrees.items())
