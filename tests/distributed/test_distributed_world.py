"""The world that other tests stand on must itself report, not hang."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from hyper_parallel.config.sections import ParallelismConfig
from hyper_parallel.distributed.parallel_dims import ParallelDims
from hyper_parallel.distributed.reductions import all_reduce_max, all_reduce_sum
from tests.distributed_world import RankError, run_world


def _coordinates(start: int) -> dict[str, object]:
    dims = ParallelDims.from_config(ParallelismConfig(dp_replicate=2), dist.get_world_size())
    dims.build_mesh("cpu")
    mine = torch.tensor([start + dist.get_rank(), -dist.get_rank()])
    with pytest.raises(RuntimeError, match="needs 3 ranks, but the process group has 4"):
        ParallelDims(dp_replicate=1, dp_shard=3).build_mesh("cpu")
    return {
        "dp_rank": dims.dp_rank,
        "axes": dims.fsdp_mesh.mesh_dim_names,
        "shape": dims.fsdp_mesh.shape,
        "sum": all_reduce_sum(mine, dims.loss_group).tolist(),
        "max": all_reduce_max(mine, dims.loss_group).tolist(),
        "mine": mine.tolist(),
        "threads": torch.get_num_threads(),
    }


def test_results_come_back_by_rank() -> None:
    results = run_world(4, _coordinates, 10)
    for rank, result in enumerate(results):
        assert result == {
            "dp_rank": rank,
            "axes": ("dp_replicate", "dp_shard"),
            "shape": (2, 2),
            "sum": [46, -6],
            "max": [13, 0],
            "mine": [10 + rank, -rank],  # a reduction leaves its argument alone
            "threads": 1,
        }


def test_without_a_group_a_reduction_is_the_value() -> None:
    assert all_reduce_sum(torch.tensor(3), None).item() == 3
    assert all_reduce_max(torch.tensor(3), None).item() == 3


def _one_raises() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the planted fault")
    dist.barrier()


def _one_dies() -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    time.sleep(600)


def _one_hangs() -> None:
    if dist.get_rank() == 1:
        time.sleep(600)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_one_raises, "rank 1 raised:\n(.|\n)*ValueError: the planted fault"),
        (_one_dies, r"ranks died without an answer \(rank: exit code\): \{1: 7\}"),
        (_one_hangs, r"ranks \[1\] were still running after 8 s"),
    ],
)
def test_a_fault_on_one_rank_ends_the_world(function: object, message: str) -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match=message):
        run_world(2, function, timeout=8)
    assert time.monotonic() - start < 60
