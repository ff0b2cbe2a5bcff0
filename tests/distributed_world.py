"""A world of a few gloo ranks on this machine, for tests.

Ranks are forked from a server that has imported what most need. A world still costs a second or two, so let one
function run many cases and hand back all their results::

    def cases(scale):
        return {"rank": dist.get_rank(), "loss": ...}

    results_by_rank = run_world(4, cases, 2.0)
"""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import queue
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from hyper_parallel.distributed.process_group import destroy_distributed

PRELOADED = [
    "pytest",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint.staging",
    "torch.distributed.checkpoint.state_dict_saver",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.experimental",
    "transformers.modeling_utils",
    "transformers.tokenization_utils_tokenizers",
    "hyper_parallel.trainer.hyper_trainer",
    __name__,
]
"""What ranks need and what is slow to import. None of it starts a thread, which a fork would lose."""


def preload() -> None:
    """Imports what each rank would import; for processes that ranks are forked from."""
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()  # or each collection in a rank, and its end, would go through all of it


class RankError(AssertionError):
    """A rank raised, died or hung."""


def run_world(nproc: int, function: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
    """Calls `function(*args)` on each of `nproc` ranks and returns what each returned, by rank.

    `function` must be importable (module level), its arguments and results picklable. Ranks have one thread each.

    Raises:
        RankError: with the traceback of the rank that raised first; or which ranks died or were still running after
            `timeout` seconds. All ranks have ended by then.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        ranks = [
            context.Process(
                target=_rank_main, args=(rank, nproc, store, dict(os.environ), answers, function, args), daemon=True
            )
            for rank in range(nproc)
        ]
        for process in ranks:
            process.start()
        try:
            return _collect(ranks, answers, time.monotonic() + timeout, timeout)
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
                process.join()


def _collect(ranks: list[Any], answers: Any, deadline: float, timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(ranks):
        try:
            rank, error, pickled = answers.get(timeout=0.2)
        except queue.Empty:
            missing = [rank for rank in range(len(ranks)) if rank not in results]
            dead = {rank: ranks[rank].exitcode for rank in missing if ranks[rank].exitcode is not None}
            if dead and answers.empty():
                raise RankError(f"ranks died without an answer (rank: exit code): {dead}") from None
            if time.monotonic() > deadline:
                raise RankError(f"ranks {missing} were still running after {timeout} s") from None
            continue
        if error is not None:
            raise RankError(f"rank {rank} raised:\n{error}")
        results[rank] = pickle.loads(pickled)
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
    codes = [process.exitcode for process in ranks]
    if any(codes):
        raise RankError(f"ranks answered, but did not leave cleanly: exit codes {codes}")
    return [results[rank] for rank in range(len(ranks))]


def _rank_main(
    rank: int,
    nproc: int,
    store: str,
    environment: dict[str, str],
    answers: Any,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    gc.freeze()
    os.environ.clear()  # that of the server is as old as its start
    os.environ.update(environment, OMP_NUM_THREADS="1")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(nproc), LOCAL_WORLD_SIZE=str(nproc))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, nproc), rank=rank, world_size=nproc)
    try:
        # By value: a queue would share the memory of tensors, which ends with the rank.
        pickled = pickle.dumps(function(*args))
    except BaseException:
        answers.put((rank, traceback.format_exc(), None))
        answers.close()
        answers.join_thread()
        os._exit(1)  # the others may wait for this rank: leave without them, the parent ends them
    answers.put((rank, None, pickled))
    destroy_distributed(callers_too=True)
