"""Degrees of parallelism for a number of ranks: plain arithmetic, so that a topology is refused before torch loads."""

from __future__ import annotations

from typing import NamedTuple

from hyper_parallel.config.errors import ConfigError
from hyper_parallel.config.sections import ParallelismConfig


class Degrees(NamedTuple):
    """Size of every mesh axis. Their product is the number of ranks."""

    dp_replicate: int
    dp_shard: int
    pp: int = 1


def resolve_degrees(parallelism: ParallelismConfig, world_size: int) -> Degrees:
    """The degrees that `parallelism` means for `world_size` ranks, with ``dp_shard=-1`` filled in.

    Raises:
        ConfigError: the degrees do not multiply to `world_size`. The fault names every factor.
    """
    dp_replicate, dp_shard, pp = parallelism.dp_replicate, parallelism.dp_shard, parallelism.pp
    pipeline = f"pp {pp} x " if pp > 1 else ""
    if dp_shard == -1:
        given = pp * dp_replicate
        if world_size % given:
            factors = f"{pipeline}dp_replicate {dp_replicate} = {given}" if pp > 1 else f"{dp_replicate}"
            raise ConfigError.one(
                "parallelism.dp_replicate" if dp_replicate > 1 else "parallelism.pp",
                f"{factors} does not divide the world size {world_size}",
                f"set a divisor of {world_size}, or start a multiple of {given} ranks",
            )
        return Degrees(dp_replicate, world_size // given, pp)
    ranks = pp * dp_replicate * dp_shard
    if ranks != world_size:
        factors = f"{pipeline}dp_replicate {dp_replicate} x dp_shard {dp_shard}"
        raise ConfigError.one(
            "parallelism.dp_shard",
            f"{factors} = {ranks} ranks, but the world size is {world_size}",
            f"start {ranks} ranks (torchrun --nproc_per_node={ranks}), or set dp_shard -1 to take what is left",
        )
    return Degrees(dp_replicate, dp_shard, pp)
