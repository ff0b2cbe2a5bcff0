"""Denominators of the loss, and the checks of a step's numbers."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from hyper_parallel.trainer.errors import NonFiniteError, TrainingError
from hyper_parallel.trainer.step import StepTotals, check_step, loss_scales

CPU = torch.device("cpu")


def labels(*valid_tokens: int, width: int = 5) -> list[torch.Tensor]:
    """One row for each micro-batch, with that many labels to be trained."""
    return [torch.tensor([[1] * n + [-100] * (width - n)]) for n in valid_tokens]


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [("token_weighted", (6.0 + 4.0) / 4), ("rank_average", (6.0 / 3 + 4.0 / 1) / 2)],
)
@pytest.mark.parametrize("masked", [0, 1, 3])
def test_three_tokens_of_sum_6_and_one_of_sum_4(aggregation: str, expected: float, masked: int) -> None:
    scales, tokens = loss_scales(labels(3, 1, *[0] * masked), aggregation, None, CPU)
    sums = torch.tensor([6.0, 4.0, *[0.0] * masked], dtype=torch.float64)
    assert float((scales * sums).sum()) == pytest.approx(expected, abs=1e-15)
    assert int(tokens) == 4
    assert torch.isfinite(scales).all()


def test_gradients_of_split_micro_batches_equal_those_of_one_batch() -> None:
    weight = torch.randn(4, dtype=torch.float64, requires_grad=True)
    features, targets = torch.randn(4, 4, dtype=torch.float64), torch.tensor([[1, 1, 1, -100], [1, -100, -100, -100]])

    def loss_sum(rows: slice) -> torch.Tensor:
        return ((features * weight).square()[rows, None].expand(-1, 4, -1).sum(-1)[targets[rows] != -100]).sum()

    features = features[:2]
    whole, _ = loss_scales([targets], "token_weighted", None, CPU)
    (loss_sum(slice(0, 2)) * whole[0]).backward()
    expected, weight.grad = weight.grad, None
    split, _ = loss_scales([targets[:1], targets[1:]], "token_weighted", None, CPU)
    for row, scale in enumerate(split):
        (loss_sum(slice(row, row + 1)) * scale).backward()
    torch.testing.assert_close(weight.grad, expected, rtol=0, atol=1e-14)


def test_totals_add_micro_batches_and_keep_the_auxiliary_loss_apart() -> None:
    totals = StepTotals()
    totals.add(torch.tensor(1.25, dtype=torch.float64), torch.tensor(0.5))
    totals.add(torch.tensor(2.0, dtype=torch.float64), torch.tensor(0.25))
    assert totals.reduce(None, torch.tensor(7.0)) == (3.25, 0.75, 7.0)
    dense = StepTotals()
    dense.add(torch.tensor(1.0), None)
    assert dense.reduce(None, torch.tensor(2.0)) == (1.0, None, 2.0)


@pytest.mark.parametrize(("loss", "norm", "what"), [(math.nan, 1.0, "the loss is nan"), (1.0, math.inf, "norm is inf")])
def test_numbers_that_are_not_finite_name_the_step_and_the_last_checkpoint(loss: float, norm: float, what: str) -> None:
    with pytest.raises(NonFiniteError, match=rf"step 7: .*{what}.*the last finite checkpoint is out/step-5"):
        check_step(7, 10, loss, norm, lambda: Path("out/step-5"))
    with pytest.raises(NonFiniteError, match="no checkpoint was saved before it"):
        check_step(7, 10, loss, norm, lambda: None)


def test_a_loss_without_a_token_to_train_is_refused() -> None:
    check_step(1, 0, 0.0, 0.0, lambda: None)
    with pytest.raises(TrainingError, match=r"step 1: the loss is 0\.5 though no label"):
        check_step(1, 0, 0.5, 0.0, lambda: None)
