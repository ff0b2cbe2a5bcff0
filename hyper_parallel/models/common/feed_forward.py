"""Gated feed-forward layer (SwiGLU: Shazeer 2020, https://arxiv.org/abs/2002.05202)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from hyper_parallel.models.common.linear import Linear
from hyper_parallel.protocols.module import Module


class FeedForward(Module):
    """``down(silu(gate(x)) * up(x))``."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Sizes of the layer."""

        hidden_size: int
        """Size of the residual stream."""
        intermediate_size: int
        """Size between the projections."""
        init_std: float = 0.02
        """Standard deviation of the first weights."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)

        def linear(in_features: int, out_features: int) -> Linear:
            return Linear.Config(in_features=in_features, out_features=out_features, init_std=config.init_std).build()

        self.gate_proj = linear(config.hidden_size, config.intermediate_size)
        self.up_proj = linear(config.hidden_size, config.intermediate_size)
        self.down_proj = linear(config.intermediate_size, config.hidden_size)

    def forward(self, x_BTC: torch.Tensor) -> tuple[torch.Tensor, None]:
        """[B, T, C], and None where a mixture of experts has its statistics."""
        return self.down_proj(F.silu(self.gate_proj(x_BTC)) * self.up_proj(x_BTC)), None
