"""The parallel plan that is derived from the modules of a transformers model, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from torch.distributed.tensor import Partial, Replicate, Shard

from hyper_parallel.config.errors import ConfigError
from hyper_parallel.config.sections import ParallelismConfig
from hyper_parallel.models.auto.causal_lm import AutoCausalLM
from hyper_parallel.protocols.mesh import MeshAxisName
from hyper_parallel.protocols.sharding import ShardingPlan
from tests.models.auto.folders import FAMILIES

TP = MeshAxisName.TP


def plan_of(family: str, *, changes: dict[str, Any] | None = None, **parallelism: Any) -> ShardingPlan:
    config_class, sizes = FAMILIES[family]
    config = AutoCausalLM.Config(content=config_class(vocab_size=64, **sizes | (changes or {})).to_dict())
    config.set_sharding_config(ParallelismConfig(**parallelism), 32)
    return config.sharding


def parts(plan: ShardingPlan, name: str) -> list[Any]:
    """Over tp: how each parameter of a module lies."""
    return [placement.get(TP, Replicate()) for placement in plan[name].state_shardings.values()]


def test_gpt2_is_split_by_heads_and_features() -> None:
    plan = plan_of("gpt2", tp=2, sequence_parallel=True, loss_parallel=True)
    block = "transformer.h.1"
    assert parts(plan, f"{block}.attn.c_attn") == [Shard(2), Shard(1)]  # three maps side by side, and their biases
    assert plan[f"{block}.attn"].sizes_per_rank == ("split_size",)
    assert parts(plan, f"{block}.attn.c_proj") == [Shard(0), Replicate()]
    assert parts(plan, f"{block}.mlp.c_fc") == [Shard(1), Shard(0)]
    assert parts(plan, f"{block}.mlp.c_proj") == [Shard(0), Replicate()]
    assert plan[f"{block}.ln_2"].state_grads["bias"] == {TP: Partial()}
    assert parts(plan, "transformer.wte") == [Shard(0)]
    assert plan["transformer.wpe"].out_dst == ({TP: Shard(1)},)
    assert "lm_head" not in plan  # it is the embedding


def test_qwen3_moe_spreads_experts_and_keeps_routers_whole() -> None:
    plan = plan_of("qwen3_moe", tp=2, ep=2)
    assert parts(plan, "model.layers.0.mlp.experts") == [Shard(2), Shard(2)]
    assert plan["model.layers.0.mlp.experts"].state_shardings["down_proj"][MeshAxisName.EP] == Shard(0)
    assert parts(plan, "model.layers.0.mlp.gate") == [Replicate()]
    assert parts(plan, "model.layers.1.mlp.down_proj") == [Shard(1)]  # a layer without experts
    assert plan["model.layers.1.self_attn.q_norm"].state_grads["weight"] == {TP: Partial()}
    assert parts(plan, "lm_head") == [Replicate()]
    assert plan["model.layers.2.self_attn"].in_src["position_embeddings"] == {}


def test_rows_are_split_over_cp_before_the_first_layer() -> None:
    plan = plan_of("llama", cp=2)
    heads = [name for name in plan if name.endswith(".heads")]
    assert heads == ["model.layers.0.self_attn.heads", "model.layers.1.self_attn.heads"]
    assert all(plan[name].in_src["k_BTKD"][MeshAxisName.CP] == Shard(1) for name in heads)
    assert plan["rows"].local_map.axis == MeshAxisName.CP


@pytest.mark.parametrize(
    ("family", "changes", "parallelism", "faults"),
    [
        (
            "qwen3_moe",
            {"num_key_value_heads": 1, "moe_intermediate_size": 17, "intermediate_size": 49},
            {"tp": 2},
            [
                "parallelism.tp: 2 does not divide the model's num_key_value_heads 1",
                "parallelism.tp: 2 does not divide the model's moe_intermediate_size 17",
                "parallelism.tp: 2 does not divide the model's model.layers.1.mlp.down_proj.in_features 49",
            ],
        ),
        ("qwen3", {}, {"ep": 2}, ["parallelism.ep: 2, but no layer of the model has experts"]),
        ("qwen3_moe", {}, {"ep": 3}, ["parallelism.ep: 3 does not divide the model's num_experts 4"]),
        (
            "gpt2",
            {},
            {"cp": 8, "cp_method": "ulysses"},
            ["parallelism.cp: 8 does not divide the model's num_attention"],
        ),
        (
            "gpt2",
            {"resid_pdrop": 0.1},
            {"tp": 2},
            ["module transformer.h.0.attn.resid_dropout drops 0.1 of what the ranks of tp share"],
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused(
    family: str, changes: dict[str, Any], parallelism: dict[str, Any], faults: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_of(family, changes=changes, **parallelism)
    for fault in faults:
        assert fault in str(caught.value)


@pytest.mark.parametrize(
    ("config", "module"),
    [
        (
            transformers.Qwen2MoeConfig(
                vocab_size=64,
                hidden_size=32,
                intermediate_size=48,
                moe_intermediate_size=16,
                num_hidden_layers=1,
                num_attention_heads=4,
                num_key_value_heads=2,
                num_experts=4,
                use_sliding_window=False,
                shared_expert_intermediate_size=16,
            ),
            "module model.layers.0.mlp.shared_expert_gate (Linear) has no place in a parallel plan for its weight",
        ),
        (
            transformers.Olmo2Config(
                vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
            ),
            "module model.layers.0.self_attn.q_norm (Olmo2RMSNorm) has no place in a parallel plan for its weight",
        ),
        (
            transformers.Phi3Config(
                vocab_size=64,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=1,
                num_attention_heads=4,
                pad_token_id=0,
                sliding_window=None,
            ),
            "module model.layers.0.self_attn.qkv_proj (Linear) has no place in a parallel plan for its weight",
        ),
        (
            transformers.GemmaConfig(
                vocab_size=64,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=1,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=8,
            ),
            "module model.embed_tokens (GemmaTextScaledWordEmbedding) has no place in a parallel plan for its weight",
        ),
    ],
)
def test_a_block_that_is_not_understood_is_refused_with_the_module(config: Any, module: str) -> None:
    with pytest.raises(ConfigError) as caught:
        AutoCausalLM.Config(content=config.to_dict()).set_sharding_config(ParallelismConfig(tp=2))
    assert module in str(caught.value)
