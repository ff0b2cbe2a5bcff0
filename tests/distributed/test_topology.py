from __future__ import annotations

import subprocess
import sys

import pytest

from hyper_parallel.config.errors import ConfigError
from hyper_parallel.config.sections import ParallelismConfig
from hyper_parallel.distributed.parallel_dims import ParallelDims
from hyper_parallel.distributed.topology import Degrees, resolve_degrees


@pytest.mark.parametrize(
    ("dp_replicate", "dp_shard", "world_size", "expected"),
    [(1, -1, 1, (1, 1)), (1, -1, 8, (1, 8)), (2, -1, 8, (2, 4)), (2, 2, 4, (2, 2)), (4, -1, 4, (4, 1))],
)
def test_what_is_left_is_sharded(dp_replicate: int, dp_shard: int, world_size: int, expected: tuple) -> None:
    config = ParallelismConfig(dp_replicate=dp_replicate, dp_shard=dp_shard)
    assert resolve_degrees(config, world_size) == Degrees(*expected)


def test_wrong_product_names_every_factor() -> None:
    with pytest.raises(ConfigError) as error:
        resolve_degrees(ParallelismConfig(dp_replicate=2, dp_shard=3), 4)
    (fault,) = error.value.faults
    assert fault.path == "parallelism.dp_shard"
    assert fault.fact == "dp_replicate 2 x dp_shard 3 = 6 ranks, but the world size is 4"
    assert "--nproc_per_node=6" in fault.remedy


def test_replicas_that_do_not_divide_the_ranks() -> None:
    with pytest.raises(ConfigError, match=r"parallelism\.dp_replicate: 3 does not divide the world size 4"):
        resolve_degrees(ParallelismConfig(dp_replicate=3), 4)


def test_arithmetic_loads_no_torch() -> None:
    code = "import sys, hyper_parallel.distributed.topology; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_one_process_has_neither_mesh_nor_group() -> None:
    dims = ParallelDims.from_config(ParallelismConfig(), world_size=1)
    dims.build_mesh("cpu")
    assert (dims.dp_size, dims.dp_rank, dims.dp_enabled) == (1, 0, False)
    assert dims.fsdp_mesh is None
    assert dims.loss_group is None


def test_several_ranks_without_process_group_are_refused() -> None:
    with pytest.raises(RuntimeError, match="needs 4 ranks, but no process group was initialised"):
        ParallelDims(dp_replicate=2, dp_shard=2).build_mesh("cpu")
