"""The grouped product, fused and looped, against one product per group."""

from __future__ import annotations

import pytest
import torch

from hyper_parallel.models.common.grouped_linear import grouped_linear, grouped_mm_applies


def inputs(dtype: torch.dtype, rows: list[int], size: int = 16, out: int = 8) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(rows), size, generator=generator, dtype=torch.float64)
    weight = torch.randn(len(rows), out, size, generator=generator, dtype=torch.float64)
    upstream = torch.randn(sum(rows), out, generator=generator, dtype=torch.float64)
    return [t.to(dtype) for t in (x, weight, upstream)]


def run(x: torch.Tensor, weight: torch.Tensor, upstream: torch.Tensor, rows: list[int]) -> list[torch.Tensor]:
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    out = grouped_linear(x, weight, torch.tensor(rows))
    out.backward(upstream)
    return [out.detach(), x.grad, weight.grad]


def expected(x: torch.Tensor, weight: torch.Tensor, upstream: torch.Tensor, rows: list[int]) -> list[torch.Tensor]:
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    out = torch.cat([part @ w.T for part, w in zip(x.split(rows), weight, strict=True)])
    out.backward(upstream)
    return [out.detach(), x.grad, weight.grad]


@pytest.mark.parametrize("rows", [[3, 5, 4], [0, 12, 0], [7, 0, 5], [0, 0, 6]])
def test_float64_agrees_with_float32(rows: list[int]) -> None:
    wide, narrow = inputs(torch.float64, rows), inputs(torch.float32, rows)
    assert not grouped_mm_applies(*wide[:2])
    assert grouped_mm_applies(*narrow[:2])
    for got, exact in zip(run(*wide, rows), expected(*wide, rows), strict=True):
        assert (got - exact).abs().max() < 1e-12
    for got, fused in zip(run(*wide, rows), run(*narrow, rows), strict=True):
        assert (got - fused).abs().max() < 1e-6 * max(1, got.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_group_without_rows_has_zero_gradient(dtype: torch.dtype) -> None:
    rows = [4, 0, 8]
    out, _, weight_grad = run(*inputs(dtype, rows), rows)
    assert torch.equal(weight_grad[1], torch.zeros_like(weight_grad[1]))
    assert out.isfinite().all()
    assert weight_grad[0].abs().max() > 0


@pytest.mark.parametrize(
    ("dtype", "size", "out", "fused"),
    [
        (torch.float32, 6, 8, False),  # 24 bytes
        (torch.float32, 8, 6, False),
        (torch.float32, 8, 4, True),
        (torch.bfloat16, 12, 8, False),  # 24 bytes
        (torch.bfloat16, 16, 8, True),
    ],
)
def test_odd_sizes_take_the_loop(dtype: torch.dtype, size: int, out: int, fused: bool) -> None:
    rows = [5, 0, 3]
    x, weight, upstream = inputs(dtype, rows, size, out)
    assert grouped_mm_applies(x, weight) == fused
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    for got, exact in zip(run(x, weight, upstream, rows), expected(x, weight, upstream, rows), strict=True):
        assert (got - exact).abs().max() < tolerance


def test_the_operator_keeps_torch_s_promises() -> None:
    rows = torch.tensor([3, 0, 5])
    x = torch.randn(8, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 4, 6, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(torch.ops.hyper_parallel.grouped_linear_loop, (x, weight, rows))
    assert torch.autograd.gradcheck(lambda a, b: grouped_linear(a, b, rows), (x, weight))
