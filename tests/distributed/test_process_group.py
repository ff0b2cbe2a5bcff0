from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from hyper_parallel.config.errors import ConfigError
from hyper_parallel.config.sections import CommConfig, ParallelismConfig
from hyper_parallel.distributed.parallel_dims import ParallelDims
from hyper_parallel.distributed.process_group import (
    destroy_distributed,
    first_to_tell,
    init_distributed,
    launched_world_size,
    rank,
)
from tests.distributed_world import run_world

ROOT = Path(__file__).parents[2]

# Pairs of ranks that do what gloo has aborted after (sharded model, a backward pass, a group left in cycles), each in a
# process of its own. Forked, so that all is imported once.
LEAVING = """
import os, sys
import tests.distributed.training
from hyper_parallel.config.sections import CommConfig
from hyper_parallel.distributed.process_group import destroy_distributed, init_distributed
from tests.distributed_world import preload

def main(rank, port):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    init_distributed(CommConfig(timeout_seconds=60))
    tests.distributed.training.train(steps=1)
    destroy_distributed()

preload()
codes = []
for port in map(int, sys.argv[1:]):
    ranks = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            main(rank, port)
            sys.exit(0)
        ranks.append(child)
    codes += [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in ranks]
print(codes)
sys.exit(any(codes))
"""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def leave(times: int) -> subprocess.CompletedProcess[str]:
    """Starts and ends a world of two ranks `times` times; fails if any rank did not exit with 0."""
    return subprocess.run(
        [sys.executable, "-c", LEAVING, *(str(_free_port()) for _ in range(times))],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


def test_every_rank_exits_with_0() -> None:
    done = leave(10)
    assert done.returncode == 0, done.stdout + done.stderr


def test_one_process_joins_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    init_distributed(CommConfig())
    assert not dist.is_initialized()
    assert (launched_world_size(), rank()) == (1, 0)
    destroy_distributed()  # nothing to leave


def test_a_backend_that_torch_does_not_know_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"^comm.backend: 'cpu:foo' is no backend of torch.distributed; choose .*gloo"
    ):
        init_distributed(CommConfig(backend="cpu:foo"), even_alone=True)
    assert not dist.is_initialized()


def test_each_group_has_a_first_to_tell_though_they_share_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    kept = dist.HashStore()
    monkeypatch.setattr(dist, "HashStore", lambda: kept)
    for _ in range(2):
        init_distributed(CommConfig(), even_alone=True)
        try:
            assert first_to_tell() and first_to_tell()  # once asked, the answer stays
        finally:
            destroy_distributed()


def test_one_process_alone_in_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    init_distributed(CommConfig(timeout_seconds=17), even_alone=True)
    try:
        assert dist.get_world_size() == 1
        assert dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=17)
        dims = ParallelDims.from_config(ParallelismConfig(), world_size=1)
        dims.build_mesh("cpu")
        assert dims.fsdp_mesh.mesh_dim_names == ("dp_shard",)
    finally:
        destroy_distributed()
    assert not dist.is_initialized()


def train_repeatedly() -> tuple[list[float], list[int]]:
    """Sums over ranks after each of three runs over groups of their own, and how many threads there are then."""
    sums, threads = [], []
    for _ in range(3):
        dims = ParallelDims.from_config(ParallelismConfig(dp_replicate=2, dp_shard=1), world_size=2)
        dims.build_mesh("cpu")
        linear = torch.nn.Linear(4, 4)
        fully_shard(linear, mesh=dims.fsdp_mesh)
        linear(torch.ones(2, 4)).sum().backward()
        del linear
        groups = dims.release_groups()
        assert groups[0] is dist.group.WORLD and len(groups) == 2 and not dims.release_groups()
        destroy_distributed(groups)
        del groups
        del dims
        gc.collect()
        total = torch.tensor(1.0 + dist.get_rank())
        dist.all_reduce(total)  # the group of all stays
        sums.append(total.item())
        threads.append(len(os.listdir("/proc/self/task")))
    return sums, threads


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads of C++ are counted in /proc")
def test_runs_within_a_callers_group_leave_nothing_behind() -> None:
    for sums, threads in run_world(2, train_repeatedly):
        assert sums == [3.0] * 3
        assert threads[1] == threads[2]  # the first starts those of autograd
