"""Stacked experts, in the place of transformers' own."""

from __future__ import annotations

import torch
import torch.distributed as dist

from hyper_parallel.models.common.expert_parallel import dispatched_experts
from hyper_parallel.models.common.moe import Experts


class StackedExperts(Experts):
    """Our experts, called as layers of transformers call theirs. Gate and up matrices lie [E, 2, I, C], the numbers of
    a checkpoint in their order."""

    def __init__(self, config: Experts.Config) -> None:
        super().__init__(config)
        self.num_experts = config.num_experts

    def forward(  # type: ignore[override] # the caller is transformers' layer
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Weighted sum over each token's experts, [N, C].

        Args:
            hidden_states: [N, C].
            top_k_index: [N, K] experts of each token.
            top_k_weights: [N, K] their weights.
        """
        weights_NK = top_k_weights.to(hidden_states.dtype)
        return Experts.forward(self, hidden_states, weights_NK, top_k_index, self.rows_of_each(top_k_index))

    def rows_of_each(self, experts_NK: torch.Tensor) -> torch.Tensor:
        """int64 [E]: how often each of all experts was chosen."""
        chosen_A = experts_NK.flatten()
        rows_E = torch.zeros(self.num_experts, dtype=torch.int64, device=chosen_A.device)
        return rows_E.scatter_add(0, chosen_A, torch.ones_like(chosen_A))


def dispatched_stacked_experts(
    module: StackedExperts,
    group: dist.ProcessGroup,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """`StackedExperts.forward` where each rank of `group` has some of the experts."""
    weights_NK = top_k_weights.to(hidden_states.dtype)
    return dispatched_experts(module, group, hidden_states, weights_NK, top_k_index, module.rows_of_each(top_k_index))
