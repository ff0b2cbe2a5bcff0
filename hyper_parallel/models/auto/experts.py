"""The experts that transformers' models call here: ours, on matrices that lie as theirs do."""

from __future__ import annotations

import torch
from torch import nn

from hyper_parallel.models.common.moe import weighted_experts

NAME = "hyper_parallel"
"""Under which transformers finds them: a model's `_experts_implementation`."""


def register() -> None:
    """Makes the experts known to transformers."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, experts)


def experts(
    module: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Weighted sum over each token's experts, as transformers calls it.

    Args:
        module: owns `gate_up_proj` [E, 2 I, C], gate above up, and `down_proj` [E, C, I].
        hidden_states: [N, C].
        top_k_index: [N, K] experts of each token.
        top_k_weights: [N, K] their weights.

    Returns:
        [N, C].
    """
    gate_up_EIC, down_ECI = module.gate_up_proj, module.down_proj
    chosen_A = top_k_index.flatten()
    rows_E = torch.zeros(len(gate_up_EIC), dtype=torch.int64, device=chosen_A.device)
    rows_E = rows_E.scatter_add(0, chosen_A, torch.ones_like(chosen_A))
    weights_NK = top_k_weights.to(hidden_states.dtype)
    return weighted_experts(hidden_states, weights_NK, top_k_index, rows_E, gate_up_EIC, down_ECI)
