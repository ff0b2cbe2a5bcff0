"""Tensor-parallel plan of Qwen3."""

from __future__ import annotations

from hyper_parallel.config.sections import ParallelismConfig
from hyper_parallel.models.common.decoder import Decoder
from hyper_parallel.models.common.decoder_sharding import attention_plan, feed_forward_plan, vocabulary_plan


def set_qwen3_sharding_config(config: Decoder.Config, parallelism: ParallelismConfig) -> None:
    """Fills the plan for `parallelism` into `config`."""
    config.sharding = {
        **vocabulary_plan(config, parallelism),
        **attention_plan(config, parallelism),
        **feed_forward_plan(parallelism, "*"),
    }
