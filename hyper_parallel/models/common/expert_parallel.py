"""Experts spread over ranks: each token travels to the ranks of its experts, and what they make of it comes back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hyper_parallel.distributed.kept_values import keep
from hyper_parallel.distributed.process_group import is_fake
from hyper_parallel.models.common.moe import Experts
from hyper_parallel.protocols.collectives import all_to_all


class Dispatch(NamedTuple):
    """Which rows this rank sends to which and gets from which. A row is a token on its way to one expert."""

    order: torch.Tensor
    """int64 [sent rows]: this rank's assignments, of which each token has top_k, in the order that they are sent."""
    sent: list[int]
    """Rows to each rank."""
    received: list[int]
    """Rows from each rank."""
    experts: torch.Tensor
    """int64 [received rows]: the expert of each among those of this rank, counted from 0."""
    rows_E: torch.Tensor
    """int64 [experts of this rank]: received rows of each."""


def dispatched_experts(
    module: Experts,
    group: dist.ProcessGroup,
    x_BTC: torch.Tensor,
    weights_BTK: torch.Tensor,
    experts_BTK: torch.Tensor,
    rows_E: torch.Tensor,
    *,
    compute: Callable[..., torch.Tensor] | None = None,
) -> torch.Tensor:
    """`compute`, by default the module's own forward, called as `Experts.forward` is, where each rank of `group` has
    some of the experts (Lepikhin et al. 2020, https://arxiv.org/abs/2006.16668). Every rank must call it, whatever
    tokens it has, and none is dropped."""
    own = partial(compute or type(module).forward, module)
    return module.run_eagerly(partial(_dispatched_experts, own, group, x_BTC, weights_BTK, experts_BTK, rows_E))


def _dispatched_experts(
    compute: Callable[..., torch.Tensor],
    group: dist.ProcessGroup,
    x_BTC: torch.Tensor,
    weights_BTK: torch.Tensor,
    experts_BTK: torch.Tensor,
    rows_E: torch.Tensor,
) -> torch.Tensor:
    dispatch = keep(lambda: plan_dispatch(experts_BTK, rows_E, group))
    x_NC, token = x_BTC.flatten(0, -2), dispatch.order // experts_BTK.shape[-1]
    weight = weights_BTK.flatten().index_select(0, dispatch.order)
    received_RC = exchange(x_NC.index_select(0, token), dispatch.sent, dispatch.received, group)
    # A received row has one expert here; its weight is applied at home.
    one_R1 = weight.new_ones(len(received_RC), 1)
    made_RC = compute(received_RC, one_R1, dispatch.experts[:, None], dispatch.rows_E)
    returned_AC = exchange(made_RC, dispatch.received, dispatch.sent, group)
    out_NC = torch.zeros_like(x_NC).index_add(0, token, returned_AC * weight[:, None])
    return out_NC.view_as(x_BTC).clone()  # FSDP hangs its hooks on the output, and they do not stay on a view


@torch.no_grad()
def plan_dispatch(experts_BTK: torch.Tensor, rows_E: torch.Tensor, group: dist.ProcessGroup) -> Dispatch:
    """Rows sorted by expert, and so by rank. One exchange of counts, and one copy of them to the host.

    Args:
        experts_BTK: the experts of each token, among those of all ranks.
        rows_E: int64, rows of each expert among the tokens of this rank.
    """
    ranks = dist.get_world_size(group)
    sent_RE = rows_E.view(ranks, -1)
    one_each = [1] * ranks
    received_RE = all_to_all(sent_RE, one_each, one_each, group)
    if is_fake(group):  # a rehearsal, which takes equal shares for granted
        shares = [len(part) for part in torch.arange(experts_BTK.numel()).tensor_split(ranks)]
        sent, received = shares, [shares[dist.get_rank(group)]] * ranks
        own = torch.arange(received[0]).tensor_split(sent_RE.shape[1])
        received_RE = received_RE.new_tensor([[len(part) for part in own]] * ranks)
    else:
        sent, received = torch.stack([sent_RE.sum(1), received_RE.sum(1)]).tolist()
    local = torch.arange(sent_RE.shape[1], device=rows_E.device).repeat(ranks)
    experts = local.repeat_interleave(received_RE.flatten(), output_size=sum(received))
    return Dispatch(experts_BTK.flatten().argsort(stable=True), sent, received, experts, received_RE.sum(0))


def exchange(x_RC: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """The rows that all ranks send to this one, by rank, for `x_RC`, sent by rank. Gradients go the other way."""
    exchanged: torch.Tensor = _Exchange.apply(x_RC, sent, received, group)
    return exchanged


class _Exchange(torch.autograd.Function):
    """All-to-all of uneven parts."""

    @staticmethod
    def forward(
        ctx: Any, x_RC: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return all_to_all(x_RC, received, sent, group)

    @staticmethod
    def backward(ctx: Any, grad_RC: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return all_to_all(grad_RC, ctx.sent, ctx.received, ctx.group), None, None, None
