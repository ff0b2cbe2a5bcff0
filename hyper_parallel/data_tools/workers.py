"""What runs in the processes that tokenise."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import wait
from typing import Any

import numpy as np
import numpy.typing as npt

from hyper_parallel.data_tools.fast_tokenizer import FastTokenizer

_worker: tuple[FastTokenizer, bool]
"""Of a worker process: its tokenizer, and whether to end documents."""


def start_worker(tokenizer: str, append_eod: bool) -> None:
    """Once in each process."""
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _worker = FastTokenizer(tokenizer), append_eod
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends them
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A parent that is killed does not tell its workers, which would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def encode(texts: list[str]) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32]]:
    """See `FastTokenizer.encode_flat`."""
    tokenizer, append_eod = _worker
    return tokenizer.encode_flat(texts, append_eod=append_eod)
