"""What ranks do together: an error on one is raised on all, and what rank 0 decides is what all do."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from hyper_parallel.config.errors import RunError
from hyper_parallel.distributed.process_group import rank

ResultT = TypeVar("ResultT")


def together(action: Callable[[], ResultT], error_type: type[RunError]) -> ResultT:
    """Runs `action`, which reads or writes files, on every rank and waits for all.

    Raises:
        error_type: on every rank, with the cause that the first failing one met.
    """
    cause = None
    try:
        result = action()
    except _file_errors() as error:
        cause = _cause(error)
    causes = gathered(cause)
    for source, text in enumerate(causes):
        if text is not None:
            raise error_type(text if len(causes) == 1 else f"{text} (on rank {source})")
    return result


def on_rank_0(action: Callable[[], ResultT], error_type: type[RunError]) -> ResultT:
    """What `action` returns, there; elsewhere None, for nobody to look at. All ranks wait for it.

    Raises:
        error_type: on every rank, with the cause that rank 0 met.
    """
    return together(lambda: action() if rank() == 0 else None, error_type)  # type: ignore[return-value]


def broadcast(decide: Callable[[], ResultT], error_type: type[RunError]) -> ResultT:
    """What `decide` returns on rank 0, on every rank: looks at a disk may differ, decisions may not.

    Raises:
        error_type: on every rank, with the cause that rank 0 met.
    """
    decision = [on_rank_0(decide, error_type)]
    if dist.is_initialized():
        dist.broadcast_object_list(decision, src=0)
    return decision[0]


def gathered(item: ResultT) -> list[ResultT]:
    """The `item` of every rank, by rank."""
    items = [item]
    if dist.is_initialized():
        items *= dist.get_world_size()
        dist.all_gather_object(items, item)
    return items


def _file_errors() -> tuple[type[BaseException], ...]:
    """What `together` shares. Looked up when something was raised, so that a run without files loads no libraries."""
    from torch.distributed.checkpoint.api import CheckpointException  # derives from BaseException alone

    return OSError, RunError, CheckpointException


def _cause(error: BaseException) -> str:
    """What went wrong first, in a line: DCP wraps the errors of all ranks, and torch those of the operating system."""
    failures = getattr(error, "failures", None)
    while failures:
        error, _ = failures[min(failures)]
        failures = getattr(error, "failures", None)
    if isinstance(error, RunError):
        return str(error)
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    root = next((link for link in chain if isinstance(link, OSError) and link.strerror), error)
    return f"{type(root).__name__}: {root}"
