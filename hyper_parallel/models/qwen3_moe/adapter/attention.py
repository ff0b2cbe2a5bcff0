"""Grouped-query attention in the place of transformers' own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hyper_parallel.models.common.attention import HeadAttention


class GroupedQueryAttention(nn.Module):
    """Qwen3MoeAttention by torch's scaled_dot_product_attention: keys and values are not repeated for their queries."""

    is_causal = True

    def __init__(self, attention: Any) -> None:
        """`attention`: whose matrices and norms are taken over."""
        super().__init__()
        self.head_dim, self.layer_idx = attention.head_dim, attention.layer_idx
        for name, module in attention.named_children():
            self.add_module(name, module)
        if not hasattr(self, "heads"):  # an AutoCausalLM's has it already
            self.heads = HeadAttention.Config().build()

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """As Qwen3MoeAttention: [B, T, C], and no weights.

        Raises:
            ValueError: a mask or a cache is given; documents alone say which tokens see which.
        """
        caches = [kwargs.get(name) for name in ("cache", "past_key_values")]  # by the version of transformers
        if any(x is not None for x in (attention_mask, *caches)):
            raise ValueError("GroupedQueryAttention takes neither a mask nor a cache")

        def heads(projected: torch.Tensor) -> torch.Tensor:
            return projected.unflatten(-1, (-1, self.head_dim))

        cos_BT1D, sin_BT1D = (x.unsqueeze(2) for x in position_embeddings)
        q_BTHD = _rotated(self.q_norm(heads(self.q_proj(hidden_states))), cos_BT1D, sin_BT1D)
        k_BTKD = _rotated(self.k_norm(heads(self.k_proj(hidden_states))), cos_BT1D, sin_BT1D)
        v_BTKD = heads(self.v_proj(hidden_states))
        out_BTHD = self.heads(q_BTHD, k_BTKD, v_BTKD, None, kwargs.get("documents"))
        return self.o_proj(out_BTHD.flatten(2)), None


def _rotated(x_BTHD: torch.Tensor, cos_BT1D: torch.Tensor, sin_BT1D: torch.Tensor) -> torch.Tensor:
    first, second = x_BTHD.chunk(2, dim=-1)
    return x_BTHD * cos_BT1D + torch.cat([-second, first], dim=-1) * sin_BT1D
