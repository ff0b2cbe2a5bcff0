"""Who shares what with whom: ranks of every group, on a world of four."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from hyper_parallel.config.sections import ParallelismConfig
from hyper_parallel.distributed.parallel_dims import ParallelDims
from tests.distributed_world import run_world

LAYOUTS = {
    "cp 4": {"cp": 4, "dp_shard": 1},
    "shard 2 x cp 2": {"cp": 2, "dp_shard": 2},
    "replicate 2 x cp 2": {"cp": 2, "dp_replicate": 2, "dp_shard": 1},
    "cp 2 x tp 2": {"cp": 2, "tp": 2, "dp_shard": 1},
    "shard 2 x tp 2": {"tp": 2, "dp_shard": 2},
}
EXPERTS = {
    "shard 4, ep 2": {"ep": 2, "dp_shard": 4},
    "shard 2 x cp 2, ep 4": {"ep": 4, "cp": 2, "dp_shard": 2},
    "replicate 2 x shard 2, ep 2": {"ep": 2, "dp_replicate": 2, "dp_shard": 2},
    "cp 2 x tp 2, ep 2": {"ep": 2, "cp": 2, "tp": 2, "dp_shard": 1},
}


def places() -> dict[str, dict[str, Any]]:
    found = {}
    for name, degrees in LAYOUTS.items():
        dims = ParallelDims.from_config(ParallelismConfig(**degrees), dist.get_world_size())
        dims.build_mesh("cpu")
        assert dims.fsdp_mesh is not None and dims.dp_group is not None and dims.loss_group is not None
        found[name] = {
            "dp": (dims.dp_rank, dims.dp_size, dist.get_process_group_ranks(dims.dp_group)),
            "tokens": (dims.token_rank, dist.get_process_group_ranks(dims.loss_group)),
            "fsdp": tuple(zip(dims.fsdp_mesh.mesh_dim_names or (), dims.fsdp_mesh.shape, strict=True)),
            "cp": None if dims.cp_mesh is None else dist.get_process_group_ranks(dims.cp_mesh.get_group()),
            "tp": None if dims.tp_group is None else dist.get_process_group_ranks(dims.tp_group),
        }
    return found


def experts_places() -> dict[str, Any]:
    """Of each mesh of experts: its axes, and this rank's group along each."""
    found = {}
    for name, degrees in EXPERTS.items():
        dims = ParallelDims.from_config(ParallelismConfig(**degrees), dist.get_world_size())
        dims.build_mesh("cpu")
        found[name] = [
            {axis: dist.get_process_group_ranks(mesh.get_group(axis)) for axis in mesh.mesh_dim_names or ()}
            for mesh in (dims.efsdp_mesh, dims.expert_mesh, dims.ep_mesh)
            if mesh is not None
        ]
    return found


def test_ranks_that_share_experts() -> None:
    """Rank 2 of 4, by hand: of `fully_shard`, of the experts' matrices, of the tokens."""
    assert run_world(4, experts_places)[2] == {
        "shard 4, ep 2": [{"efsdp": [0, 2]}, {"ep": [2, 3]}, {"ep": [2, 3]}],
        "shard 2 x cp 2, ep 4": [{"efsdp": [2]}, {"ep": [0, 1, 2, 3]}, {"ep": [0, 1, 2, 3]}],
        "replicate 2 x shard 2, ep 2": [{"dp_replicate": [0, 2], "efsdp": [2]}, {"ep": [2, 3]}, {"ep": [2, 3]}],
        "cp 2 x tp 2, ep 2": [{"efsdp": [2]}, {"ep": [0, 2], "tp": [2, 3]}, {"ep": [0, 2]}],
    }


def test_ranks_of_every_group() -> None:
    """Rank 2 of 4, by hand."""
    found = run_world(4, places)[2]
    everyone = [0, 1, 2, 3]
    assert found["cp 4"] == {
        "dp": (0, 1, [2]), "tokens": (2, everyone), "fsdp": (("fsdp", 4),), "cp": everyone, "tp": None,
    }  # fmt: skip
    assert found["shard 2 x cp 2"] == {
        "dp": (1, 2, [0, 2]), "tokens": (2, everyone), "fsdp": (("fsdp", 4),), "cp": [2, 3], "tp": None,
    }  # fmt: skip
    assert found["replicate 2 x cp 2"] == {
        "dp": (1, 2, [0, 2]),
        "tokens": (2, everyone),
        "fsdp": (("dp_replicate", 2), ("fsdp", 2)),
        "cp": [2, 3],
        "tp": None,
    }
    assert found["cp 2 x tp 2"] == {
        "dp": (0, 1, [2]), "tokens": (1, [0, 2]), "fsdp": (("fsdp", 2),), "cp": [0, 2], "tp": [2, 3],
    }  # fmt: skip
    assert found["shard 2 x tp 2"] == {
        "dp": (1, 2, [0, 2]), "tokens": (1, [0, 2]), "fsdp": (("dp_shard", 2),), "cp": None, "tp": [2, 3],
    }  # fmt: skip
