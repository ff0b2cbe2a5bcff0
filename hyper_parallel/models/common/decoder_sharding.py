"""The tensor-parallel plan of a decoder (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053), in parts.

Attention heads, feed-forward layers and the vocabulary are split over the ranks of axis tp; between them runs the
residual stream, whole on each rank, or under sequence_parallel a part of each row (Korthikanti et al. 2022,
https://arxiv.org/abs/2205.05198). A family's plan puts the parts together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from hyper_parallel.config.errors import Fault
from hyper_parallel.config.sections import ParallelismConfig
from hyper_parallel.models.common.expert_parallel import dispatched_experts
from hyper_parallel.models.common.moe import MoE
from hyper_parallel.models.common.tensor_parallel import (
    gather_vocabulary,
    row_parallel_linear_with_bias,
    vocabulary_parallel_embedding,
)
from hyper_parallel.protocols.mesh import MeshAxisName
from hyper_parallel.protocols.redistribute import largest_part
from hyper_parallel.protocols.sharding import LocalMap, NamedPlacement, ShardingConfig, ShardingPlan

if TYPE_CHECKING:
    from hyper_parallel.models.common.decoder import Decoder

ROW, SEQUENCE, FEATURE = 0, 1, 2
"""Dims: rows of a matrix; tokens of [B, T, ...]; features or heads of [B, T, C] and [B, T, H, D]."""


def whole() -> NamedPlacement:
    """The same tensor on every rank."""
    return {}


def split(dim: int) -> NamedPlacement:
    """A part of dim `dim` on each rank."""
    from torch.distributed.tensor import Shard

    return {MeshAxisName.TP: Shard(dim)}


def summand() -> NamedPlacement:
    """A tensor that is the sum over the ranks."""
    from torch.distributed.tensor import Partial

    return {MeshAxisName.TP: Partial()}


def stream(parallelism: ParallelismConfig) -> NamedPlacement:
    """The residual stream between layers."""
    return split(SEQUENCE) if parallelism.sequence_parallel else whole()


def column_linear(*, bias: bool, argument: str = "x") -> ShardingConfig:
    """Each rank makes a part of the output features of the whole input."""
    states = {"weight": split(ROW)} | ({"bias": split(ROW)} if bias else {})
    return ShardingConfig(state_shardings=states, in_src={argument: whole()}, out_src=(split(FEATURE),))


def row_linear(*, bias: bool, argument: str = "x") -> ShardingConfig:
    """Each rank makes a summand of the output from its part of the input features."""
    states = {"weight": split(1)} | ({"bias": whole()} if bias else {})
    return ShardingConfig(
        state_shardings=states,
        state_grads={"bias": summand()} if bias else {},
        in_src={argument: split(FEATURE)},
        out_src=(summand(),),
        local_map=LocalMap(forward=row_parallel_linear_with_bias) if bias else None,
    )


def norm(placement: NamedPlacement, *, bias: bool = False, argument: str = "x") -> ShardingConfig:
    """A norm of what lies as `placement`. Where each rank has a part, so has it of the gradients of its vectors."""
    vectors = ("weight", "bias") if bias else ("weight",)
    return ShardingConfig(
        state_shardings={name: whole() for name in vectors},
        state_grads={name: summand() for name in vectors} if placement else {},
        in_src={argument: placement},
        out_src=(placement,),
        local_map=LocalMap(),
    )


def split_layer(argument: str, parallelism: ParallelismConfig) -> ShardingConfig:
    """A layer that every rank computes a part of from the whole of `argument`, between two places of the stream."""
    return ShardingConfig(
        in_src={argument: stream(parallelism)},
        in_dst={argument: whole()},
        in_grads={argument: summand()},
        out_src=(summand(),),
        out_dst=(stream(parallelism),),
    )


def head_attention() -> ShardingConfig:
    """HeadAttention on some of the heads."""
    return ShardingConfig(
        in_src={argument: split(FEATURE) for argument in ("q_BTHD", "k_BTKD", "v_BTKD")},
        out_src=(split(FEATURE),),
        local_map=LocalMap(),
    )


def attention_plan(config: Decoder.Config, parallelism: ParallelismConfig) -> ShardingPlan:
    """Each rank has some of the heads. Their norms are shared, so each has a summand of the norms' gradients."""
    column = column_linear(bias=config.attention_bias)
    return {
        "layers.*.input_layernorm": norm(stream(parallelism)),
        "layers.*.self_attn": split_layer("x_BTC", parallelism),
        "layers.*.self_attn.q_proj": column,
        "layers.*.self_attn.k_proj": column,
        "layers.*.self_attn.v_proj": column,
        "layers.*.self_attn.q_norm": norm(split(FEATURE)),
        "layers.*.self_attn.k_norm": norm(split(FEATURE)),
        "layers.*.self_attn.heads": head_attention(),
        "layers.*.self_attn.o_proj": row_linear(bias=config.attention_bias),
        "layers.*.post_attention_layernorm": norm(stream(parallelism)),
    }


def feed_forward_plan(parallelism: ParallelismConfig, layer: str) -> ShardingPlan:
    """Each rank has a part of the intermediate features."""
    return {
        f"layers.{layer}.mlp": split_layer("x_BTC", parallelism),
        f"layers.{layer}.mlp.gate_proj": column_linear(bias=False),
        f"layers.{layer}.mlp.up_proj": column_linear(bias=False),
        f"layers.{layer}.mlp.down_proj": row_linear(bias=False),
    }


def moe_plan(parallelism: ParallelismConfig, layer: str) -> ShardingPlan:
    """Router and experts, see there."""
    place = stream(parallelism)
    return {
        f"layers.{layer}.mlp": moe_layer("x_BTC", parallelism),
        f"layers.{layer}.mlp.router": router(place, "x_BTC"),
        f"layers.{layer}.mlp.experts": experts(place, "x_BTC", "weights_BTK"),
    }


def moe_layer(argument: str, parallelism: ParallelismConfig) -> ShardingConfig:
    """A layer of a router and experts, between two places of the stream."""
    place = stream(parallelism)
    return ShardingConfig(in_src={argument: place}, out_src=(place,), local_map=LocalMap())


def router(place: NamedPlacement, argument: str) -> ShardingConfig:
    """The router is whole: where the tokens are whole every rank routes all, where each has a part it routes its own
    and the choices are gathered."""
    return ShardingConfig(
        state_shardings={"weight": whole()},
        state_grads={"weight": summand()} if place else {},
        in_src={argument: place},
        out_src=(place,) * 3,
        out_dst=(whole(),) * 3,
    )


def experts(place: NamedPlacement, tokens: str, weights: str) -> ShardingConfig:
    """Each rank has a part of the intermediate features of every expert, or of those of its place on axis ep.

    Args:
        place: how the tokens arrive, and how what is made of them is left.
        tokens, weights: names of those arguments.
    """
    return ShardingConfig(
        state_shardings={
            "gate_up_proj": split(2) | spread_experts(hidden=3),
            "down_proj": split(2) | spread_experts(hidden=1),
        },
        in_src={tokens: place, weights: whole()},
        in_dst={tokens: whole()},
        in_grads={tokens: summand(), weights: summand()},
        out_src=(summand(),),
        out_dst=(place,),
        local_map=LocalMap(forward=dispatched_experts, axis=MeshAxisName.EP),
    )


def spread_experts(*, hidden: int) -> NamedPlacement:
    """Stacked matrices, experts in dim 0: some of them on each rank, and of those each efsdp rank stores a part of dim
    `hidden`, the one dim that nothing else splits."""
    from torch.distributed.tensor import Shard

    return {MeshAxisName.EP: Shard(0), MeshAxisName.EFSDP: Shard(hidden)}


def vocabulary_plan(config: Decoder.Config, parallelism: ParallelismConfig) -> ShardingPlan:
    """Embedding, last norm, output matrix and loss."""
    head = None if config.tie_word_embeddings else "lm_head"
    ends = embedding_and_output(parallelism, "embed_tokens", head, vocab_size=config.vocab_size)
    return ends | {"norm": norm(stream(parallelism))}


def embedding_and_output(
    parallelism: ParallelismConfig, embedding: str, head: str | None, *, vocab_size: int, padding_id: int | None = None
) -> ShardingPlan:
    """Embedding, output matrix and loss.

    With loss_parallel each rank has a part of the vocabulary's rows, and the loss is told so when it is built.
    Without it each has the whole output matrix, and every rank computes the same loss.

    Args:
        embedding: name of the embedding.
        head: name of the output matrix. None: it is the embedding.
        padding_id: the token whose vector the embedding gives no gradient.
    """
    place, is_split = stream(parallelism), parallelism.loss_parallel
    is_embedding_split = is_split or head is not None
    lookup = partial(vocabulary_parallel_embedding, vocab_size=vocab_size, padding_id=padding_id)
    output = ShardingConfig(
        in_src={"hidden_BTC": place},
        in_dst={"hidden_BTC": whole()},
        in_grads={"hidden_BTC": summand() if is_split else whole()},
        local_map=LocalMap(),
    )
    rows = split(ROW) if is_split else whole()
    plan = {
        embedding: ShardingConfig(
            state_shardings={"weight": split(ROW) if is_embedding_split else whole()},
            out_src=(summand() if is_embedding_split else whole(),),
            out_dst=(place,),
            local_map=LocalMap(forward=lookup if is_embedding_split else None),
        ),
        "loss_output": output,
        "logits_output": replace(output, out_src=(whole(),)),
        "vocabulary": ShardingConfig(local_map=LocalMap(forward=gather_vocabulary if is_split else None)),
    }
    if head is not None:
        plan[head] = ShardingConfig(state_shardings={"weight": rows}, local_map=LocalMap())
    return plan


def handover_plan(parallelism: ParallelismConfig) -> ShardingPlan:
    """Between the parts of a pipeline the residual stream stays as it lies: a rank hands on what it has of it."""
    place = stream(parallelism)
    return {
        "handed_in": ShardingConfig(in_src={"hidden_BTC": place}, out_src=(place,)),
        "handed_on": ShardingConfig(in_src={"hidden_BTC": place}, local_map=LocalMap()),
    }


def expert_faults(config: Decoder.Config, parallelism: ParallelismConfig) -> Iterator[Fault]:
    """Faults of experts that cannot be spread over the expert-parallel ranks."""
    mlps = map(config.mlp, range(config.num_hidden_layers))
    yield from expert_count_faults({mlp.num_experts for mlp in mlps if isinstance(mlp, MoE.Config)}, parallelism.ep)


def expert_count_faults(counts: Collection[int], ep: int) -> Iterator[Fault]:
    """Faults of layers with `counts` experts on `ep` ranks."""
    if not counts:
        yield Fault("parallelism.ep", f"{ep}, but no layer of the model has experts", "set 1, or choose another model")
    for count in sorted(counts):
        if count % ep:
            yield Fault(
                "parallelism.ep", f"{ep} does not divide the model's num_experts {count}", f"set a divisor of {count}"
            )


def divisibility_faults(config: Decoder.Config, parallelism: ParallelismConfig, seq_len: int) -> Iterator[Fault]:
    """Faults of sizes that do not divide by the tensor-parallel degree."""
    sizes = {"num_attention_heads": config.num_attention_heads, "num_key_value_heads": config.kv_heads}
    for layer in range(config.num_hidden_layers):
        mlp = config.mlp(layer)
        sizes["moe_intermediate_size" if isinstance(mlp, MoE.Config) else "intermediate_size"] = mlp.intermediate_size
    is_split = parallelism.loss_parallel or not config.tie_word_embeddings
    yield from size_faults(sizes, parallelism, seq_len, vocab_size=config.vocab_size if is_split else None)


def size_faults(
    sizes: Mapping[str, int], parallelism: ParallelismConfig, seq_len: int, *, vocab_size: int | None
) -> Iterator[Fault]:
    """Faults of `sizes` that do not divide by the tensor-parallel degree. The vocabulary need not: the last ranks have
    fewer of its rows, but some. `vocab_size`: None: it is not split."""
    tp = parallelism.tp
    for name, size in sizes.items():
        if size % tp:
            yield Fault("parallelism.tp", f"{tp} does not divide the model's {name} {size}", f"set a divisor of {size}")
    if vocab_size is not None and (tp - 1) * (rows := largest_part(vocab_size, tp)) >= vocab_size:
        yield Fault(
            "parallelism.tp",
            f"of the model's vocab_size {vocab_size}, in parts of {rows} rows, the last of {tp} ranks has none",
            "set a smaller tp",
        )
    if parallelism.sequence_parallel and seq_len % tp:
        yield Fault(
            "training.seq_len",
            f"{seq_len} is not a multiple of parallelism.tp {tp}, and sequence_parallel splits every row",
            f"set {seq_len // tp * tp or tp} or {(seq_len // tp + 1) * tp}, or sequence_parallel False",
        )
