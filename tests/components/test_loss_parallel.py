"""Losses whose vocabulary is spread over ranks give the numbers and gradients of torch's own over the whole of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from hyper_parallel.components.loss import AutoCELoss, BaseLoss, ChunkedCELoss, CrossEntropyLoss
from tests.distributed_world import run_world

VOCAB, HIDDEN = 12, 5
LOSSES: dict[str, BaseLoss.Config] = {
    "whole": CrossEntropyLoss.Config(),
    "chunked": ChunkedCELoss.Config(chunk_tokens=4),
    "auto, chunked": AutoCELoss.Config(chunk_from_vocab=VOCAB),
    "auto, whole": AutoCELoss.Config(chunk_from_vocab=VOCAB + 1),
}


def data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states [2, 7, D], weight [V, D] with logits far from 0, labels with every id and ignored ones."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 7, HIDDEN, generator=generator, dtype=torch.float64)
    weight = 30 * torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64)
    labels = torch.tensor([*range(VOCAB), -100, -100]).view(2, 7)
    return hidden, weight, labels


class Head:
    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.weight)


def spread_losses() -> dict[str, Any]:
    hidden, weight, labels = data()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    results = {}
    for name, config in LOSSES.items():
        loss = config.build(vocab_size=VOCAB)
        loss.spread_over(dist.group.WORLD)
        h, w = hidden.clone().requires_grad_(), weight.chunk(ranks)[rank].clone().requires_grad_()
        loss_sum = loss(h, Head(w), labels)
        (2 * loss_sum).backward()
        dist.all_reduce(h.grad)  # what the boundary in front of the head does
        with torch.no_grad():
            unlabelled = loss(h, Head(w), torch.full_like(labels, -100))
            again = loss(h, Head(w), labels)
        results[name] = loss_sum.detach(), h.grad, w.grad, unlabelled, again
    return results


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_world(2, spread_losses)


@pytest.mark.parametrize("name", LOSSES)
def test_agrees_with_torch(results: list[dict[str, Any]], name: str) -> None:
    hidden, weight, labels = data()
    hidden.requires_grad_()
    weight.requires_grad_()
    expected = F.cross_entropy(F.linear(hidden, weight).flatten(0, 1), labels.flatten(), reduction="sum")
    (2 * expected).backward()
    for rank in range(2):
        loss_sum, grad_hidden, grad_weight, unlabelled, again = results[rank][name]
        torch.testing.assert_close(loss_sum, expected.detach(), rtol=1e-14, atol=0)
        torch.testing.assert_close(grad_hidden, hidden.grad, rtol=0, atol=1e-11)
        torch.testing.assert_close(grad_weight, weight.grad.chunk(2)[rank], rtol=0, atol=1e-11)
        assert unlabelled == 0
        assert again == loss_sum
