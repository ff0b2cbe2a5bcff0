"""Mixture of experts: a softmax top-k router, stacked experts, and the numbers that balance them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from hyper_parallel.models.common.grouped_linear import grouped_linear, preferred_row_multiple
from hyper_parallel.models.common.norm import Float64Rounding
from hyper_parallel.protocols.initializer import Normal
from hyper_parallel.protocols.module import Module


class RouterStats(NamedTuple):
    """What the router of one layer did, per row of the batch."""

    tokens_BE: torch.Tensor
    """[B, E] int64: assignments of the row's tokens to each expert; a row of T tokens has T x top_k."""
    probability_BE: torch.Tensor | None
    """[B, E] float32 or wider: the router's probabilities summed over the row's tokens. None: there is no auxiliary
    loss to compute from them."""


class Routing(NamedTuple):
    """Where the router sends each token."""

    weights_BTK: torch.Tensor
    """Weight of each chosen expert, in the activations' dtype."""
    experts_BTK: torch.Tensor
    """Index of each chosen expert."""
    probability_BTE: torch.Tensor
    """Softmax over all experts, float32 or wider."""


class Router(Module):
    """Probabilities over all experts in float32 or wider, of which the largest `top_k` are taken."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Sizes of the router."""

        hidden_size: int
        """Size of the residual stream."""
        num_experts: int
        """Experts to choose from."""
        top_k: int
        """Experts per token."""
        normalize: bool = False
        """Scale the chosen probabilities to a sum of 1."""
        init_std: float = 0.02
        """Standard deviation of the first weights."""
        float64_rounding: Float64Rounding = "none"
        """See Decoder.Config."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.top_k = config.top_k
        self.normalize = config.normalize
        self.rounds_float64 = config.float64_rounding == "transformers"
        self.add_parameter(
            "weight", config.num_experts, config.hidden_size, role="router", init=Normal(config.init_std)
        )

    def forward(self, x_BTC: torch.Tensor) -> Routing:
        logits_BTE = F.linear(x_BTC, self.weight)
        wide = torch.float32 if self.rounds_float64 else torch.promote_types(logits_BTE.dtype, torch.float32)
        probability_BTE = logits_BTE.softmax(-1, dtype=wide)
        weights_BTK, experts_BTK = probability_BTE.topk(self.top_k, dim=-1)
        if self.normalize:
            weights_BTK = weights_BTK / weights_BTK.sum(-1, keepdim=True)
        return Routing(weights_BTK.to(x_BTC.dtype), experts_BTK, probability_BTE)


class Experts(Module):
    """SwiGLU feed-forward layers of one size, their matrices stacked."""

    eager_methods = ("run_eagerly",)  # how many tokens come from other ranks is told by the data

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Sizes of the experts."""

        hidden_size: int
        """Size of the residual stream."""
        intermediate_size: int
        """Size between the projections of one expert."""
        num_experts: int
        """Experts."""
        init_std: float = 0.02
        """Standard deviation of the first weights."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        experts, hidden, inner = config.num_experts, config.hidden_size, config.intermediate_size
        init = Normal(config.init_std)
        # Gate and up of an expert lie side by side, gate first: one grouped product gives both.
        self.add_parameter("gate_up_proj", experts, 2, inner, hidden, role="matrix", init=init)
        self.add_parameter("down_proj", experts, hidden, inner, role="matrix", init=init)

    def forward(
        self, x_BTC: torch.Tensor, weights_BTK: torch.Tensor, experts_BTK: torch.Tensor, rows_E: torch.Tensor
    ) -> torch.Tensor:
        """Weighted sum over each token's experts, [B, T, C]. `rows_E` counts the tokens of each expert. Tokens may as
        well come as [N, C]."""
        gate_up_EIC = self.gate_up_proj.flatten(1, 2)
        out_NC = weighted_experts(
            x_BTC.flatten(0, -2),
            weights_BTK.flatten(0, -2),
            experts_BTK.flatten(0, -2),
            rows_E,
            gate_up_EIC,
            self.down_proj,
        )
        return out_NC.view_as(x_BTC)

    def run_eagerly(self, function: Callable[[], torch.Tensor]) -> torch.Tensor:
        """``function()``, outside of compiled graphs."""
        return function()


def weighted_experts(
    x_NC: torch.Tensor,
    weights_NK: torch.Tensor,
    experts_NK: torch.Tensor,
    rows_E: torch.Tensor,
    gate_up_EIC: torch.Tensor,
    down_ECI: torch.Tensor,
) -> torch.Tensor:
    """Weighted sum over each token's SwiGLU experts, [N, C].

    Args:
        x_NC: tokens.
        weights_NK: of each token's experts.
        experts_NK: their indices.
        rows_E: assignments to each expert.
        gate_up_EIC: first matrices, gate above up.
        down_ECI: second matrices.
    """
    top_k = experts_NK.shape[-1]
    order = experts_NK.flatten().argsort(stable=True)  # assignments, sorted by expert
    token, weight = order // top_k, weights_NK.flatten().index_select(0, order)
    multiple = preferred_row_multiple(x_NC)
    if multiple > 1:  # padding is token 0 with weight 0
        place, rows, rows_E = rounded_up(rows_E, len(order), multiple)
        token = token.new_zeros(rows).index_copy(0, place, token)
        weight = weight.new_zeros(rows).index_copy(0, place, weight)
    gate_up = grouped_linear(x_NC.index_select(0, token), gate_up_EIC, rows_E)
    gate, up = gate_up.chunk(2, dim=-1)
    # The weight multiplies before the last product, where rows are shorter; it commutes with it.
    inner = F.silu(gate) * up * weight[:, None]
    return torch.zeros_like(x_NC).index_add(0, token, grouped_linear(inner, down_ECI, rows_E))


def rounded_up(rows_E: torch.Tensor, rows: int, multiple: int) -> tuple[torch.Tensor, int, torch.Tensor]:
    """Groups of consecutive rows, `rows` in all, each grown at its end to a multiple of `multiple` rows.

    Returns:
        place [rows]: where each row then stands; the number of rows then; and rows_E then.
    """
    grown_E = (rows_E + (multiple - 1)).div(multiple, rounding_mode="floor") * multiple
    added_before_E = (grown_E - rows_E).cumsum(0) - (grown_E - rows_E)
    place = torch.arange(rows, device=rows_E.device) + added_before_E.repeat_interleave(rows_E, output_size=rows)
    return place, int(grown_E.sum()), grown_E


class MoE(Module):
    """Router and experts in the place of a feed-forward layer."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Sizes of the layer."""

        hidden_size: int
        """Size of the residual stream."""
        intermediate_size: int
        """Size between the projections of one expert."""
        num_experts: int
        """Experts in the layer."""
        top_k: int
        """Experts per token."""
        norm_topk_prob: bool = False
        """Scale the weights of a token's experts to a sum of 1."""
        balance: bool = True
        """Hand out what the load-balancing loss is computed from."""
        init_std: float = 0.02
        """Standard deviation of the first weights."""
        float64_rounding: Float64Rounding = "none"
        """See Decoder.Config."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.num_experts = config.num_experts
        self.balance = config.balance
        self.router = Router.Config(
            hidden_size=config.hidden_size,
            num_experts=config.num_experts,
            top_k=config.top_k,
            normalize=config.norm_topk_prob,
            init_std=config.init_std,
            float64_rounding=config.float64_rounding,
        ).build()
        self.experts = Experts.Config(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_experts=config.num_experts,
            init_std=config.init_std,
        ).build()

    def forward(self, x_BTC: torch.Tensor) -> tuple[torch.Tensor, RouterStats]:
        routing = self.router(x_BTC)
        chosen_BA = routing.experts_BTK.flatten(1)
        tokens_BE = torch.zeros(len(chosen_BA), self.num_experts, dtype=torch.int64, device=x_BTC.device)
        tokens_BE = tokens_BE.scatter_add(1, chosen_BA, torch.ones_like(chosen_BA))
        probability_BE = routing.probability_BTE.sum(1) if self.balance else None
        out_BTC = self.experts(x_BTC, routing.weights_BTK, routing.experts_BTK, tokens_BE.sum(0))
        return out_BTC, RouterStats(tokens_BE, probability_BE)


def summed(stats: Sequence[RouterStats]) -> RouterStats:
    """What the routers of several layers did together."""
    probabilities = [s.probability_BE for s in stats if s.probability_BE is not None]
    return RouterStats(
        torch.stack([s.tokens_BE for s in stats]).sum(0), torch.stack(probabilities).sum(0) if probabilities else None
    )


class LoadBalancing(Module):
    """The load-balancing loss: a module, so that it has a boundary of its own."""

    def forward(self, tokens_BE: torch.Tensor, probability_BE: torch.Tensor, layer_tokens: int) -> torch.Tensor:
        """[B] load-balancing loss of each row by itself, over all layers together.

        ``E x sum_e (share of tokens sent to e) x (mean probability of e)``, the Switch Transformer's loss (Fedus et al.
        2021, https://arxiv.org/abs/2101.03961, equations 4-6) with transformers' reading of top-k: shares of all
        choices sum to top_k. Balanced routing gives top_k. A row alone, and not the batch, so that the sum over rows
        does not depend on how rows are grouped into micro-batches or ranks.

        Args:
            tokens_BE: `RouterStats.tokens_BE` summed over the layers.
            probability_BE: `RouterStats.probability_BE` summed over the layers; of some of a row's tokens it gives
                their summand of the loss.
            layer_tokens: layers with experts x tokens of a whole row.
        """
        mean_probability_BE = probability_BE / layer_tokens
        share_BE = tokens_BE.to(mean_probability_BE.dtype) / layer_tokens
        return (share_BE * mean_probability_BE).sum(-1) * share_BE.shape[-1]
