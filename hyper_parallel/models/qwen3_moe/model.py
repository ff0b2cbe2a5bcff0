"""Qwen3-MoE (Yang et al. 2025, https://arxiv.org/abs/2505.09388)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from hyper_parallel.config.errors import Fault
from hyper_parallel.config.sections import ParallelismConfig, at_least
from hyper_parallel.models.common.decoder import Decoder
from hyper_parallel.models.common.feed_forward import FeedForward
from hyper_parallel.models.common.moe import MoE


class Qwen3MoeModel(Decoder):
    """The decoder with experts in most layers."""

    @dataclass(kw_only=True, slots=True)
    class Config(Decoder.Config):
        """Sizes of Qwen3-MoE under Hugging Face's names."""

        model_type: ClassVar[str] = "qwen3_moe"
        architecture: ClassVar[str] = "Qwen3MoeForCausalLM"

        hidden_size: int = 2048
        """Size of the residual stream."""
        intermediate_size: int = 6144
        """Size between the projections of a feed-forward layer; no expert has it."""
        num_hidden_layers: int = 24
        """Blocks."""
        num_key_value_heads: int | None = 4
        """Key and value heads. None: as many as query heads."""
        num_experts: int = 128
        """Experts in each layer that has them."""
        num_experts_per_tok: int = 8
        """Experts that a token is sent to."""
        moe_intermediate_size: int = 768
        """Size between the projections of one expert."""
        norm_topk_prob: bool = False
        """Scale the weights of a token's experts to a sum of 1."""
        decoder_sparse_step: int = 1
        """Every this many layers there are experts, counted so that layer decoder_sparse_step - 1 is the first."""
        mlp_only_layers: tuple[int, ...] = ()
        """Layers, counted from 0, that have a feed-forward layer all the same."""
        router_aux_loss_coef: float = 0.001
        """Weight of the load-balancing loss. 0: it is not computed."""

        def faults(self) -> Iterator[Fault]:
            yield from Decoder.Config.faults(self)
            yield from at_least(
                self, 1, "num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step"
            )
            yield from at_least(self, 0, "router_aux_loss_coef")
            if self.num_experts_per_tok > self.num_experts:
                yield Fault(
                    "num_experts_per_tok",
                    f"{self.num_experts_per_tok} is above num_experts {self.num_experts}",
                    "a token meets an expert at most once: give num_experts or less",
                )
            outside = [layer for layer in self.mlp_only_layers if not 0 <= layer < self.num_hidden_layers]
            if outside:
                yield Fault(
                    "mlp_only_layers",
                    f"{outside} are not among layers 0 to {self.num_hidden_layers - 1}",
                    "remove them",
                )

        def set_sharding_config(self, parallelism: ParallelismConfig) -> None:
            from hyper_parallel.models.qwen3_moe.sharding import set_qwen3_moe_sharding_config

            set_qwen3_moe_sharding_config(self, parallelism)

        def mlp(self, layer: int) -> FeedForward.Config | MoE.Config:
            if layer in self.mlp_only_layers or (layer + 1) % self.decoder_sparse_step:
                return Decoder.Config.mlp(self, layer)
            return MoE.Config(
                hidden_size=self.hidden_size,
                intermediate_size=self.moe_intermediate_size,
                num_experts=self.num_experts,
                top_k=self.num_experts_per_tok,
                norm_topk_prob=self.norm_topk_prob,
                balance=self.router_aux_loss_coef > 0,
                init_std=self.initializer_range,
                float64_rounding=self.float64_rounding,
            )

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.balance_coefficient = config.router_aux_loss_coef
