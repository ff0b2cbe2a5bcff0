"""Moves between placements, forward and back, against what each rank must hold by definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from hyper_parallel.protocols.redistribute import Move, change, redistribute
from tests.distributed_world import run_world

RANKS = 2
MOVES = {
    "gather, then scatter a sum": Move(Shard(1), Replicate(), Partial(), Shard(1)),
    "gather rows, then split": Move(Shard(0), Replicate(), Replicate(), Shard(0)),
    "copy, then sum": Move(Replicate(), Replicate(), Partial(), Replicate()),
    "sum, then copy": Move(Partial(), Replicate(), Replicate(), Replicate()),
    "scatter a sum, then gather": Move(Partial(), Shard(1), Shard(1), Replicate()),
    "split, then gather": Move(Replicate(), Shard(1), Shard(1), Replicate()),
}


def locals_of(whole: torch.Tensor, placement: Placement, generator: torch.Generator) -> list[torch.Tensor]:
    """What the ranks hold of `whole`."""
    if placement.is_shard():
        return [part.clone() for part in whole.chunk(RANKS, placement.dim)]
    if placement.is_partial():
        first = torch.randn(whole.shape, generator=generator, dtype=whole.dtype)
        return [first, whole - first]
    return [whole.clone()] * RANKS


def case(move: Move) -> list[tuple[torch.Tensor, ...]]:
    """Per rank: what it starts from, the gradient it is given, and what must come out of both ways."""
    generator = torch.Generator().manual_seed(1)
    whole, grad = (torch.randn(4, 6, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    starts, grads = locals_of(whole, move.src, generator), locals_of(grad, move.grad_src, generator)
    moved, moved_grads = locals_of(whole, move.dst, generator), locals_of(grad, move.grad_dst, generator)
    return list(zip(starts, grads, moved, moved_grads, strict=True))


def move_all() -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, move in MOVES.items():
        start, grad, _, _ = case(move)[dist.get_rank()]
        x = start.clone().requires_grad_()
        moved = redistribute(x, move, dist.group.WORLD)
        moved.backward(grad)
        assert torch.equal(x, start)
        results[name] = moved.detach(), x.grad
    for src, dst, size in ((Replicate(), Shard(1), 3), (Shard(0), Shard(1), 2)):
        try:
            change(torch.zeros(2, size), src, dst, dist.group.WORLD)
        except ValueError as error:
            results[str(error)] = None
    return results


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_world(RANKS, move_all)


@pytest.mark.parametrize("name", MOVES)
def test_every_rank_holds_what_the_placement_says(results: list[dict[str, Any]], name: str) -> None:
    for rank, (_, _, moved, grad) in enumerate(case(MOVES[name])):
        torch.testing.assert_close(results[rank][name][0], moved, rtol=0, atol=1e-15)
        torch.testing.assert_close(results[rank][name][1], grad, rtol=0, atol=1e-15)


def test_what_cannot_be_moved_is_told(results: list[dict[str, Any]]) -> None:
    assert "dim 1 of a tensor of shape (2, 3) does not divide by 2 ranks" in results[0]
    assert "a tensor of shape (2, 2) cannot be moved from S(0) to S(1)" in results[0]


def test_nothing_to_move_is_the_tensor_itself() -> None:
    x = torch.zeros(2)
    assert redistribute(x, Move(Replicate(), Replicate(), Replicate(), Replicate()), dist.group.WORLD) is x
