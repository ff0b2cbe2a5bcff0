"""A rank draws its own block of a DTensor, and the blocks make up the whole."""

from __future__ import annotations

import torch

from hyper_parallel.protocols.initializer import Normal, initialize_
from tests.distributed_world import run_world

SHAPE = (7, 6, 5)


def draw_sharded() -> dict[str, tuple[torch.Tensor, int]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, empty

    mesh = init_device_mesh("cpu", (2, 2))
    results = {}
    for first, second in [
        (Replicate(), Shard(0)),
        (Shard(0), Shard(1)),
        (Shard(2), Shard(0)),
        (Shard(0), Shard(0)),
        (Replicate(), Replicate()),
    ]:
        tensor = empty(*SHAPE, dtype=torch.float64, device_mesh=mesh, placements=[first, second])
        with torch.no_grad():
            tensor.fill_(torch.nan)
        initialize_(tensor, Normal(1.0), seed=4, name="experts")
        results[f"{first} {second}"] = (tensor.full_tensor(), tensor.to_local().numel())
    return results


def test_blocks_of_a_dtensor_make_up_the_whole() -> None:
    whole = torch.empty(SHAPE, dtype=torch.float64)
    Normal(1.0).fill(whole, seed=4, name="experts", shape=SHAPE, offset=(0, 0, 0))
    for results in run_world(4, draw_sharded):
        for layout, (gathered, local) in results.items():
            assert torch.equal(gathered, whole), layout
            if "S" in layout:
                assert local < whole.numel()
