"""Joining and leaving the process group that torchrun describes in the environment."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable
from datetime import timedelta

import torch.distributed as dist

from hyper_parallel.config.errors import ConfigError
from hyper_parallel.config.sections import CommConfig
from hyper_parallel.platform import get_platform

_joined_here = False
"""Whether `init_distributed` made this process's group. A caller's own group is used, and left to the caller."""
_joined_times = 0
"""Groups that `init_distributed` has made: a number of the present one, the same on every rank."""
_timeout: timedelta | None = None
"""Of that group."""
_is_first_to_tell: bool | None = None
"""What `first_to_tell` has answered in this group."""


def launched_world_size() -> int:
    """Number of ranks: of the process group that stands, else torchrun's WORLD_SIZE, else 1."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def launched_rank() -> int:
    """This process's place: in the process group that stands, else torchrun's RANK, else 0."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def rank() -> int:
    """This process's place in the process group, 0 without one."""
    return dist.get_rank() if dist.is_initialized() else 0


def first_to_tell() -> bool:
    """Whether this rank of the process group is the first to ask this: of the ranks that fail, one tells why.

    No collective, so it works while others wait in one. True without a process group, and where its store is gone
    together with the rank that kept it.
    """
    global _is_first_to_tell
    if not dist.is_initialized():
        return True
    if _is_first_to_tell is None:
        try:
            store = dist.distributed_c10d._get_default_store()  # which may outlive the group
            _is_first_to_tell = store.add(f"hyper_parallel/failed/{_joined_times}", 1) == 1
        except dist.DistError:
            _is_first_to_tell = True
    return _is_first_to_tell


def join_fake(own_rank: int, ranks: int) -> None:
    """A process group of `ranks` in which this process is `own_rank` and no other exists: collectives carry nothing.

    A sum is this rank's own summand, and what is gathered are copies of its part; what another rank would send to it
    alone stays as the memory was.

    Raises:
        ConfigError: torch has no such group for this device.
    """
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  # it makes the backend known

    device_type, known = get_platform().device_type, dist.Backend.backend_capability["fake"]
    if device_type not in known:
        fact = f"{device_type}, but torch's fake process group knows {', '.join(known)} alone"
        raise ConfigError.one("HYPER_PARALLEL_DEVICE", fact, "set it to cpu to rehearse a run")
    dist.init_process_group("fake", store=dist.HashStore(), rank=own_rank, world_size=ranks)


def leave_fake() -> None:
    """Leaves the group of `join_fake`."""
    dist.destroy_process_group()
    forget_meshes()


def is_fake(group: dist.ProcessGroup | None = None) -> bool:
    """Whether `group`, by default that of all ranks, is one of `join_fake`, so that its numbers mean nothing."""
    return dist.is_initialized() and dist.get_backend(group) == "fake"


def init_distributed(comm: CommConfig, ranks: int | None = None, *, even_alone: bool = False) -> None:
    """Joins the other ranks that torchrun started, with the platform's backend unless `comm` names one; or makes as if
    there were `ranks` of them, if `comm` asks for that.

    A process group that stands already is used as it is.

    A process by itself needs no process group and gets none, unless `even_alone` (see `fsdp.fsdp_needed`): then it is
    the one rank of a group whose store lives in its memory, so that no address or port is taken.

    Raises:
        ConfigError: torch.distributed has no such backend, or no fake group for this device.
    """
    global _joined_here, _joined_times, _timeout, _is_first_to_tell
    if dist.is_initialized():
        return
    backend = get_platform().comm_backend(comm.backend)
    known = dist.Backend.backend_list
    if any(part.rpartition(":")[2] not in known for part in backend.split(",")):
        choices = f"choose one of auto, {', '.join(known)}"
        raise ConfigError.one("comm.backend", f"{comm.backend!r} is no backend of torch.distributed", choices)
    _timeout = timeout = timedelta(seconds=comm.timeout_seconds)
    if comm.mode == "fake":
        join_fake(0, launched_world_size() if ranks is None else ranks)
    elif launched_world_size() > 1:
        store, own_rank, ranks = next(dist.rendezvous("env://", timeout=timeout))
        # torchrun may keep one store for all its attempts: in it gloo would find addresses of ranks that have ended.
        store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        dist.init_process_group(backend, store=store, rank=own_rank, world_size=ranks, timeout=timeout)
    elif even_alone:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    _joined_here, _joined_times, _is_first_to_tell = dist.is_initialized(), _joined_times + 1, None


def new_gloo_group() -> dist.ProcessGroup:
    """A second group of all ranks, for host memory, with the timeout of the first. Every rank calls this."""
    return dist.new_group(backend="gloo", timeout=_timeout if _joined_here else None)


def destroy_distributed(groups: Iterable[dist.ProcessGroup] = (), *, callers_too: bool = False) -> None:
    """Leaves the process group together with the other ranks. Without one it does nothing.

    Objects that hold on to the group (meshes, sharded parameters in reference cycles) are collected before and after:
    gloo aborts the process at exit when they outlive it.

    Args:
        groups: of some of the ranks. They end also where a group that `init_distributed` has not made stays: each has
            threads and sockets, which would be left behind by every run in such a group.
        callers_too: leave also such a group.
    """
    global _joined_here
    if not dist.is_initialized():
        return
    is_left = _joined_here or callers_too
    ended = [] if is_left else [group for group in groups if group is not dist.group.WORLD]
    if not (is_left or ended):
        return
    dist.barrier()
    gc.collect()
    for group in ended:
        dist.destroy_process_group(group)
    if is_left:
        dist.destroy_process_group()
        _joined_here = False
    forget_meshes()
    gc.collect()


def forget_meshes() -> None:
    """Has torch forget the meshes of groups that have ended, which compare equal to those that are made next."""
    from torch.distributed.tensor._redistribute import _gen_transform_infos, clear_redistribute_planner_cache
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    clear_redistribute_planner_cache()
    _gen_transform_infos.cache_clear()
