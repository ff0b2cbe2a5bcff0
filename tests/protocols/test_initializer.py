"""Initial values: a function of seed, name and position, and normally distributed."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from hyper_parallel.protocols.initializer import Constant, Normal, initialize_


def block(shape: tuple[int, ...], size: tuple[int, ...], offset: tuple[int, ...], **key: object) -> torch.Tensor:
    out = torch.full(size, torch.nan, dtype=torch.float64)
    Normal(0.5).fill(out, **{"seed": 1, "name": "w", **key}, shape=shape, offset=offset)
    return out


def test_shards_are_cut_from_the_whole() -> None:
    shape = (6, 10, 7)
    whole = block(shape, shape, (0, 0, 0))
    for dim in range(3):
        size = shape[dim]
        cuts = [0, size // 3, size // 3, size]  # an empty shard among them
        parts = []
        for start, end in pairwise(cuts):
            part, offset = list(shape), [0, 0, 0]
            part[dim], offset[dim] = end - start, start
            parts.append(block(shape, tuple(part), tuple(offset)))
        assert torch.equal(torch.cat(parts, dim), whole), f"cut along dim {dim}"
    assert torch.equal(block(shape, (2, 3, 4), (1, 5, 2)), whole[1:3, 5:8, 2:6])
    vector = block((100,), (100,), (0,))
    assert torch.equal(block((100,), (30,), (70,)), vector[70:])


def test_chunks_do_not_show() -> None:
    shape = (300, 1000)  # more elements than are drawn at a time
    whole = block(shape, shape, (0, 0))
    rows = torch.cat([block(shape, (1, 1000), (row, 0)) for row in range(300)])
    assert torch.equal(whole, rows)


def test_strided_blocks_and_narrow_types_get_the_same_values() -> None:
    whole = block((8, 6), (8, 6), (0, 0))
    strided = torch.empty(6, 8, dtype=torch.bfloat16).t()
    Normal(0.5).fill(strided, seed=1, name="w", shape=(8, 6), offset=(0, 0))
    assert torch.equal(strided, whole.bfloat16())


def test_the_values_do_not_change_between_releases() -> None:
    values = block((2, 2), (2, 2), (0, 0))
    expected = [1.6486317915833497, 0.19181844562651162, 0.2634874594246116, -0.8203117179908679]
    assert values.flatten().tolist() == pytest.approx(expected, rel=1e-14)


def test_seed_and_name_and_position_all_count() -> None:
    shape = (50, 50)
    drawn = [block(shape, shape, (0, 0), seed=s, name=n) for s, n in ((1, "w"), (2, "w"), (1, "v"), (1, "1/w"))]
    for i, one in enumerate(drawn):
        assert len(one.unique()) == one.numel()
        for other in drawn[:i]:
            correlation = torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1].item()
            assert abs(correlation) < 5 / math.sqrt(one.numel())


def test_the_distribution_is_normal() -> None:
    shape = (1000, 400)
    values = block(shape, shape, (0, 0)).flatten()
    count = values.numel()
    assert abs(values.mean()) < 4 * 0.5 / math.sqrt(count)
    assert abs(values.std() - 0.5) < 4 * 0.5 / math.sqrt(2 * count)
    # Kolmogorov-Smirnov distance; the bound is passed by chance once in 10^6.
    ordered = torch.special.ndtr(values.sort().values / 0.5)
    steps = torch.arange(count + 1, dtype=torch.float64) / count
    distance = torch.maximum((ordered - steps[:-1]).abs().max(), (ordered - steps[1:]).abs().max())
    assert distance < 2.7 / math.sqrt(count)
    neighbours = torch.corrcoef(torch.stack([values[:-1], values[1:]]))[0, 1]
    assert abs(neighbours) < 5 / math.sqrt(count)
    assert values.isfinite().all()


def test_a_plain_parameter_is_filled_in_place() -> None:
    parameter = torch.nn.Parameter(torch.empty(4, 3))
    initialize_(parameter, Normal(0.5), seed=1, name="w")
    assert torch.equal(parameter, block((4, 3), (4, 3), (0, 0)).float())
    initialize_(parameter, Constant(2.5), seed=1, name="w")
    assert parameter.tolist() == [[2.5] * 3] * 4
