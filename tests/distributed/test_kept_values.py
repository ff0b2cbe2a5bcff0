"""A recomputed forward takes values from the first one."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from hyper_parallel.distributed.kept_values import keep, kept_values


def test_a_recompute_makes_nothing_anew_however_often_it_runs() -> None:
    made: list[int] = []
    ran: list[list[int]] = []

    def make() -> int:
        made.append(len(made) + 1)
        return made[-1]

    def block(x: torch.Tensor) -> torch.Tensor:
        factors = [keep(make), keep(make)]
        ran.append(factors)
        return (x * factors[0]).sin() * factors[1]

    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    first, second = (checkpoint(block, x, use_reentrant=False, context_fn=kept_values) for _ in range(2))
    for _ in range(2):
        torch.autograd.grad(second.sum(), x, retain_graph=True)
    (grad,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(grad, 2 * torch.cos(torch.ones_like(x)))
    assert ran == [[1, 2], [3, 4], [3, 4], [3, 4], [1, 2]]


def test_without_recompute_everything_is_made() -> None:
    assert [keep(lambda: 1), keep(lambda: 2)] == [1, 2]
