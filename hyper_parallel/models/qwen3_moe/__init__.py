"""Qwen3-MoE: sizes as published in the config.json of each model on the hub."""

from __future__ import annotations

from typing import Any

from hyper_parallel.models.common.family import Family
from hyper_parallel.models.qwen3_moe.model import Qwen3MoeModel
from hyper_parallel.protocols.model_spec import ModelSpec

_PUBLISHED = {
    "vocab_size": 151936,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_theta": 1e6},
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}

FLAVORS: dict[str, dict[str, Any]] = {
    "debug": {
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 96,
        "norm_topk_prob": True,
    },
    "30b_a3b": {
        **_PUBLISHED,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "moe_intermediate_size": 768,
    },
    "235b_a22b": {
        **_PUBLISHED,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "moe_intermediate_size": 1536,
    },
}
"""Per flavor the fields that differ from the defaults of `Qwen3MoeModel.Config`."""

FAMILY = Family(Qwen3MoeModel.Config, FLAVORS)


def create_model_spec(flavor: str = "debug", **overrides: Any) -> ModelSpec:
    """The spec of a flavor of Qwen3-MoE, or of a folder that holds a Hugging Face config.json.

    Raises:
        ConfigError: unknown flavor or field, a folder of another model, impossible sizes.
    """
    return FAMILY.model_spec(flavor, overrides)
