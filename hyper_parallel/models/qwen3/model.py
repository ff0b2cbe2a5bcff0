"""Qwen3, dense (Yang et al. 2025, https://arxiv.org/abs/2505.09388)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hyper_parallel.config.sections import ParallelismConfig
from hyper_parallel.models.common.decoder import Decoder


class Qwen3Model(Decoder):
    """The decoder as it stands."""

    @dataclass(kw_only=True, slots=True)
    class Config(Decoder.Config):
        """Sizes of Qwen3 under Hugging Face's names."""

        model_type: ClassVar[str] = "qwen3"
        architecture: ClassVar[str] = "Qwen3ForCausalLM"

        head_dim: int | None = 128
        """Size of one head. None: hidden_size / num_attention_heads."""

        def set_sharding_config(self, parallelism: ParallelismConfig) -> None:
            from hyper_parallel.models.qwen3.sharding import set_qwen3_sharding_config

            set_qwen3_sharding_config(self, parallelism)
