"""The experts that transformers' models call here: ours, on their matrices."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from hyper_parallel.models.common.expert_parallel import dispatched_experts
from hyper_parallel.models.common.moe import weighted_experts

NAME = "hyper_parallel"
"""Under which transformers finds them: a model's `_experts_implementation`."""


def register() -> None:
    """Makes the experts known to transformers."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, experts)


def experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Weighted sum over each token's experts, as transformers calls it.

    Args:
        module: owns `gate_up_proj` [E, 2, I, C], gate before up, and `down_proj` [E, C, I].
        hidden_states: [N, C].
        top_k_index: [N, K] experts of each token.
        top_k_weights: [N, K] their weights.

    Returns:
        [N, C].
    """
    gate_up_EIC, down_ECI = module.gate_up_proj.flatten(1, 2), module.down_proj
    weights_NK, rows_E = top_k_weights.to(hidden_states.dtype), _rows_of_each(top_k_index, len(down_ECI))
    return weighted_experts(hidden_states, weights_NK, top_k_index, rows_E, gate_up_EIC, down_ECI)


def dispatched(
    module: Any,
    group: dist.ProcessGroup,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    *,
    num_experts: int,
) -> torch.Tensor:
    """The forward of `module`, whoever wrote it, where each rank of `group` has some of the `num_experts`: it is called
    with the tokens that reach this rank, one expert each, and this rank's experts counted from 0."""
    weights_NK, rows_E = top_k_weights.to(hidden_states.dtype), _rows_of_each(top_k_index, num_experts)
    return dispatched_experts(module, group, hidden_states, weights_NK, top_k_index, rows_E, compute=_own_forward)


def _own_forward(
    module: Any, x_NC: torch.Tensor, weights_NK: torch.Tensor, experts_NK: torch.Tensor, rows_E: torch.Tensor
) -> torch.Tensor:
    made_NC: torch.Tensor = type(module).forward(module, x_NC, experts_NK, weights_NK)
    return made_NC


def _rows_of_each(experts_NK: torch.Tensor, num_experts: int) -> torch.Tensor:
    """int64 [E]: how often each expert was chosen."""
    chosen_A = experts_NK.flatten()
    rows_E = torch.zeros(num_experts, dtype=torch.int64, device=chosen_A.device)
    return rows_E.scatter_add(0, chosen_A, torch.ones_like(chosen_A))
