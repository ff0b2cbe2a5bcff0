"""Degrees of parallelism for a number of ranks: plain arithmetic, so that a topology is refused before torch loads."""

from __future__ import annotations

from typing import NamedTuple

from hyper_parallel.config.errors import ConfigError
from hyper_parallel.config.sections import ParallelismConfig


class Degrees(NamedTuple):
    """Size of every mesh axis, outermost first. Their product is the number of ranks."""

    dp_replicate: int
    dp_shard: int
    tp: int = 1


def resolve_degrees(parallelism: ParallelismConfig, world_size: int) -> Degrees:
    """The degrees that `parallelism` means for `world_size` ranks, with ``dp_shard=-1`` filled in.

    Raises:
        ConfigError: the degrees do not multiply to `world_size`. The fault names every factor.
    """
    dp_replicate, dp_shard, tp = parallelism.dp_replicate, parallelism.dp_shard, parallelism.tp
    factors = f"dp_replicate {dp_replicate} x tp {tp} = {dp_replicate * tp}" if tp > 1 else str(dp_replicate)
    if dp_shard == -1:
        if world_size % (dp_replicate * tp):
            raise ConfigError.one(
                "parallelism.tp" if world_size % tp else "parallelism.dp_replicate",
                f"{factors} does not divide the world size {world_size}",
                f"set divisors of {world_size}, or start a multiple of {dp_replicate * tp} ranks",
            )
        return Degrees(dp_replicate, world_size // (dp_replicate * tp), tp)
    ranks = dp_replicate * dp_shard * tp
    if ranks != world_size:
        product = f"dp_replicate {dp_replicate} x dp_shard {dp_shard}" + (f" x tp {tp}" if tp > 1 else "")
        raise ConfigError.one(
            "parallelism.dp_shard",
            f"{product} = {ranks} ranks, but the world size is {world_size}",
            f"start {ranks} ranks (torchrun --nproc_per_node={ranks}), or set dp_shard -1 to take what is left",
        )
    return Degrees(dp_replicate, dp_shard, tp)
