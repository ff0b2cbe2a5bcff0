"""What context parallelism adds to the sharding plan of a decoder, and the runs that it refuses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from hyper_parallel.config.errors import Fault
from hyper_parallel.config.sections import ParallelismConfig
from hyper_parallel.models.common.context_parallel import ATTENTIONS
from hyper_parallel.models.common.context_parallel.boundaries import (
    output_of_whole_rows,
    own_part_of_rows,
    spread_head_attention,
)
from hyper_parallel.protocols.mesh import MeshAxisName
from hyper_parallel.protocols.sharding import LocalMap, NamedPlacement, ShardingConfig, ShardingPlan


def with_context_parallel(
    plan: ShardingPlan, parallelism: ParallelismConfig, heads: Sequence[str] = ("layers.*.self_attn.heads",)
) -> ShardingPlan:
    """`plan`, in which `heads` are those of a HeadAttention, with a part of every row on each rank of axis cp.

    Rows are split before the first layer. All layers work on a rank's own tokens, but for the attention, which sees
    those of the other ranks; losses are summands.
    """
    from torch.distributed.tensor import Partial, Shard

    def on_ranks(forward: partial) -> LocalMap:
        return LocalMap(forward=forward, axis=MeshAxisName.CP)

    def split(placement: NamedPlacement) -> NamedPlacement:
        return placement | {MeshAxisName.CP: Shard(1)}

    unit = parallelism.sequence_ranks()
    attention = ATTENTIONS[parallelism.cp_method]

    def over_tokens(heads: ShardingConfig) -> ShardingConfig:
        return replace(
            heads,
            in_src={argument: split(placement) for argument, placement in heads.in_src.items()},
            out_src=tuple(map(split, heads.out_src)),
            local_map=on_ranks(partial(spread_head_attention)),
        )

    return plan | {
        "rows": ShardingConfig(local_map=on_ranks(partial(own_part_of_rows, attention=attention, unit=unit))),
        **{name: over_tokens(plan[name]) for name in heads},
        "balance": ShardingConfig(
            in_src={"tokens_BE": {MeshAxisName.CP: Partial()}}, in_dst={"tokens_BE": {}}, local_map=LocalMap()
        ),
        "logits_output": replace(plan["logits_output"], local_map=on_ranks(partial(output_of_whole_rows, unit=unit))),
    }


def context_parallel_faults(num_attention_heads: int, parallelism: ParallelismConfig, seq_len: int) -> Iterator[Fault]:
    """Faults of sizes that cannot be spread over the context-parallel ranks."""
    cp, tp = parallelism.cp, parallelism.tp
    if parallelism.cp_method == "ulysses" and num_attention_heads % (cp * tp):
        factors = f"cp {cp} x tp {tp} = {cp * tp}" if tp > 1 else f"{cp}"
        yield Fault(
            "parallelism.cp",
            f"{factors} does not divide the model's num_attention_heads {num_attention_heads}, which cp_method ulysses "
            "spreads over the ranks",
            "set a divisor, or cp_method ring or allgather",
        )
    fewest = cp * parallelism.sequence_ranks()
    if seq_len < fewest:
        factors = f"cp {cp} x tp {tp} = {fewest}" if parallelism.sequence_parallel else f"cp {cp}"
        yield Fault(
            "training.seq_len",
            f"{seq_len} is below parallelism.{factors}: there are ranks without a token",
            f"set {fewest} or more, or a smaller cp",
        )
