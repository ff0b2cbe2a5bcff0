"""Tokens on their way to experts of other ranks, against all experts in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from hyper_parallel.distributed.kept_values import kept_values
from hyper_parallel.models.common import expert_parallel
from hyper_parallel.models.common.expert_parallel import Dispatch, dispatched_experts, plan_dispatch
from hyper_parallel.models.common.moe import Experts
from tests.distributed_world import run_world

EXPERTS, HIDDEN, INNER, TOKENS = 6, 16, 8, 5

# [ranks, tokens, top_k]: the experts of each rank's tokens. Rank r of two has experts 3r to 3r + 2.
ROUTES: dict[str, list[list[list[int]]]] = {
    "mixed": [[[0, 4], [5, 1], [2, 3], [1, 0], [4, 5]], [[3, 2], [0, 5], [1, 4], [5, 3], [2, 0]]],
    "all on one expert": [[[4]] * TOKENS, [[4]] * TOKENS],
    "a rank that gets nothing": [[[0, 1]] * TOKENS, [[2, 0]] * TOKENS],
    "each rank to itself": [[[0, 1]] * TOKENS, [[5, 3]] * TOKENS],
    "each rank to the other": [[[3, 5]] * TOKENS, [[2, 1]] * TOKENS],
    "a rank without tokens": [[], [[5, 0], [1, 3], [4, 2]]],
}


def built(experts: slice, dtype: torch.dtype) -> Experts:
    """Experts with the same weights on every rank, of which some are kept."""
    generator = torch.Generator().manual_seed(1)
    module = Experts.Config(hidden_size=HIDDEN, intermediate_size=INNER, num_experts=EXPERTS).build()
    for name, parameter in list(module.named_parameters()):
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        module.register_parameter(name, torch.nn.Parameter(drawn[experts].to(dtype).contiguous()))
    return module


def inputs(route: list[list[int]], rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(10 + rank)
    top_k = len(route[0]) if route else 2
    x_BTC = torch.randn(1, len(route), HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    weights_BTK = torch.rand(1, len(route), top_k, generator=generator, dtype=torch.float64).to(dtype)
    experts_BTK = torch.tensor(route, dtype=torch.int64).view(1, len(route), top_k)
    return x_BTC.requires_grad_(), weights_BTK.requires_grad_(), experts_BTK


def results(module: Experts, forward: Callable[..., torch.Tensor], args: tuple[torch.Tensor, ...]) -> list[Any]:
    """Output, and gradients of tokens, weights and experts."""
    rows_E = args[2].flatten().bincount(minlength=EXPERTS)
    out = forward(*args, rows_E)
    wanted = (*args[:2], *module.parameters())
    grads = torch.autograd.grad(out, wanted, torch.cos(torch.arange(out.numel()).view_as(out)).to(out.dtype))
    return [out.detach(), *grads]


TOLERANCES = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 0.05}
"""Relative to the largest number. float64 loops, float32 multiplies groups, bfloat16 grows them on a CPU."""
CASES = {"float64": (torch.float64, False), "float32": (torch.float32, False), "bfloat16": (torch.bfloat16, False)} | {
    "float64, recompute": (torch.float64, True)
}


def on_rank() -> dict[str, dict[str, list[Any]]]:
    """Results by case and by route, with how often ranks told each other their counts at the end."""
    rank, group = dist.get_rank(), dist.group.WORLD
    found: dict[str, dict[str, list[Any]]] = {}
    plans: list[object] = []

    def counted(*args: Any) -> Dispatch:
        plans.append(args)
        return plan_dispatch(*args)

    expert_parallel.plan_dispatch = counted
    for case, (dtype, recompute) in CASES.items():
        module = built(slice(3 * rank, 3 * rank + 3), dtype)

        def forward(*args: torch.Tensor, module: Experts = module, recompute: bool = recompute) -> torch.Tensor:
            if not recompute:
                return dispatched_experts(module, group, *args)
            return checkpoint(dispatched_experts, module, group, *args, use_reentrant=False, context_fn=kept_values)

        found[case] = {}
        for name, routes in ROUTES.items():
            plans.clear()
            found[case][name] = [*results(module, forward, inputs(routes[rank], rank, dtype)), len(plans)]
    return found


@pytest.fixture(scope="module")
def by_rank() -> list[dict[str, dict[str, list[Any]]]]:
    return run_world(2, on_rank)


@pytest.mark.parametrize("name", ROUTES)
@pytest.mark.parametrize("case", CASES)
def test_spread_experts_are_those_of_one_process(by_rank: Any, case: str, name: str) -> None:
    dtype, _ = CASES[case]
    whole, spread = built(slice(None), torch.float64), [rank[case][name] for rank in by_rank]
    exact = []
    for rank, route in enumerate(ROUTES[name]):
        args = (
            a.detach().double().requires_grad_() if a.is_floating_point() else a for a in inputs(route, rank, dtype)
        )
        exact.append(results(whole, whole, tuple(args)))
        for got, expected in zip(spread[rank][:3], exact[rank][:3], strict=True):
            assert_near(got, expected, TOLERANCES[dtype])
        assert spread[rank][5] == 1  # a recompute does not ask again
    for i in (3, 4):
        got = torch.cat([results[i] for results in spread])
        assert_near(got, sum(results[i] for results in exact), TOLERANCES[dtype])
        idle = [e for e in range(EXPERTS) if not any(e in token for route in ROUTES[name] for token in route)]
        assert got[idle].eq(0).all()


def test_a_module_computes_by_its_own_forward(monkeypatch: Any) -> None:
    class Doubled(Experts):
        def forward(self, *args: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(*args)

    module, args = built(slice(None), torch.float64), inputs(ROUTES["mixed"][0], 0, torch.float64)
    rows_E = args[2].flatten().bincount(minlength=EXPERTS)
    expected = module(*args, rows_E)
    module.__class__ = Doubled
    monkeypatch.setattr(expert_parallel, "_dispatched_experts", lambda compute, group, *args: compute(*args))
    assert dispatched_experts(module, None, *args, rows_E).equal(2 * expected)  # type: ignore[arg-type] # none is asked


def assert_near(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert got.shape == expected.shape
    if expected.numel():
        assert (got - expected).abs().max() <= tolerance * expected.abs().max()
