"""Tensor- and expert-parallel plan of Qwen3-MoE."""

from __future__ import annotations

from hyper_parallel.config.sections import ParallelismConfig
from hyper_parallel.models.common.decoder import Decoder
from hyper_parallel.models.common.decoder_sharding import (
    attention_plan,
    feed_forward_plan,
    moe_plan,
    vocabulary_plan,
)
from hyper_parallel.models.common.moe import MoE


def set_qwen3_moe_sharding_config(config: Decoder.Config, parallelism: ParallelismConfig) -> None:
    """Fills the plan for `parallelism` into `config`."""
    config.sharding = vocabulary_plan(config, parallelism) | attention_plan(config, parallelism)
    for layer in range(config.num_hidden_layers):
        plan = moe_plan if isinstance(config.mlp(layer), MoE.Config) else feed_forward_plan
        config.sharding |= plan(parallelism, str(layer))
