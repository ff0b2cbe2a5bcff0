"""Rows of experts, grown to the sizes that the machine likes."""

from __future__ import annotations

import pytest
import torch

from hyper_parallel.models.common import moe
from hyper_parallel.models.common.grouped_linear import preferred_row_multiple
from hyper_parallel.models.common.moe import Experts, Router, rounded_up


def test_each_group_grows_at_its_end() -> None:
    place, rows, rows_E = rounded_up(torch.tensor([3, 0, 4, 5]), 12, 4)
    assert rows_E.tolist() == [4, 0, 4, 8]
    assert rows == 16
    assert place.tolist() == [0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12]


def test_narrow_types_on_cpu_have_few_sizes() -> None:
    assert preferred_row_multiple(torch.empty(1, dtype=torch.bfloat16)) == 32
    assert preferred_row_multiple(torch.empty(1, dtype=torch.float32)) == 1
    assert preferred_row_multiple(torch.empty(1, dtype=torch.bfloat16, device="meta")) == 1


def test_grown_groups_change_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        router = Router.Config(hidden_size=8, num_experts=5, top_k=2, normalize=True).build()
        experts = Experts.Config(hidden_size=8, intermediate_size=4, num_experts=5).build()
    finally:
        torch.set_default_dtype(torch.float32)
    for parameter in (*router.parameters(), *experts.parameters()):
        torch.nn.init.normal_(parameter)
    x_NC = torch.randn(20, 8, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(20, 8, dtype=torch.float64)

    def results() -> list[torch.Tensor]:
        routing = router(x_NC[None])
        rows_E = routing.experts_BTK.flatten().bincount(minlength=5)
        out = experts(x_NC[None], routing.weights_BTK, routing.experts_BTK, rows_E)[0]
        wanted = (x_NC, *router.parameters(), *experts.parameters())
        return [out.detach(), *torch.autograd.grad(out, wanted, upstream)]

    plain = results()
    monkeypatch.setattr(moe, "preferred_row_multiple", lambda x: 8)
    for grown, expected in zip(results(), plain, strict=True):
        assert (grown - expected).abs().max() < 1e-12
