"""The factories that a file names as `replace_module._target_`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hyper_parallel.models.common.moe import weighted_experts
from hyper_parallel.models.common.norm import rms_norm
from hyper_parallel.models.qwen3_moe.adapter.attention import GroupedQueryAttention
from hyper_parallel.protocols.module_replacement import ReplacementContext, module_replacement


class FusedRMSNorm(nn.Module):
    """Qwen3MoeRMSNorm in one kernel, computed in the type of its input."""

    def __init__(self, norm: Any) -> None:
        """`norm`: whose scale is taken over."""
        super().__init__()
        self.weight, self.variance_epsilon = norm.weight, norm.variance_epsilon

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`hidden_states` with a mean square of 1 along the last dim, times the scale."""
        return rms_norm(hidden_states, self.weight, self.variance_epsilon)


class GroupedExperts(nn.Module):
    """Qwen3MoeExperts by grouped products: one for all first matrices, one for all second ones."""

    def __init__(self, experts: Any) -> None:
        """`experts`: whose matrices are taken over."""
        super().__init__()
        self.gate_up_proj, self.down_proj = experts.gate_up_proj, experts.down_proj

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Weighted sum over each token's experts, [N, C].

        Args:
            hidden_states: [N, C].
            top_k_index: [N, K] experts of each token.
            top_k_weights: [N, K] their weights.
        """
        rows_E = torch.zeros(len(self.gate_up_proj), dtype=torch.int64, device=top_k_index.device)
        rows_E = rows_E.scatter_add(0, top_k_index.flatten(), torch.ones_like(top_k_index.flatten()))
        weights_NK = top_k_weights.to(hidden_states.dtype)
        gate_up_EIC = self.gate_up_proj.flatten(1, -2)  # an AutoCausalLM keeps gate and up apart
        return weighted_experts(hidden_states, weights_NK, top_k_index, rows_E, gate_up_EIC, self.down_proj)


@module_replacement
def replace_rms_norm(module: nn.Module, module_fqn: str, context: ReplacementContext) -> nn.Module:
    """A FusedRMSNorm."""
    return FusedRMSNorm(module).train(module.training)


@module_replacement
def replace_attention(module: nn.Module, module_fqn: str, context: ReplacementContext) -> nn.Module:
    """A GroupedQueryAttention."""
    return GroupedQueryAttention(module).train(module.training)


@module_replacement
def replace_experts(module: nn.Module, module_fqn: str, context: ReplacementContext) -> nn.Module:
    """A GroupedExperts."""
    return GroupedExperts(module).train(module.training)
