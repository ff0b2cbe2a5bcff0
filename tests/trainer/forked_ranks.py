"""Runs of two ranks that start in a moment: forked from a process that has imported all of it.

``python -m tests.trainer.forked_ranks``, for each line of its input, a JSON list (port, words of the command line),
prints the process ids of the ranks, and their exit codes when all have ended. A rank ends as under a launcher, its
interpreter finalised.
"""

from __future__ import annotations

import json
import os
import signal
import sys

from hyper_parallel.distributed import last_words
from hyper_parallel.train import main
from tests.distributed_world import preload

RANKS = 2


def serve() -> None:
    preload()
    last_words.LAST_WORD_SECONDS = 0  # there is no launcher that would take the first to end for the cause
    for line in sys.stdin:
        port, words = json.loads(line)
        pids = [_fork(rank, port, words) for rank in range(RANKS)]
        print(*pids, flush=True)
        print(*_exit_codes(pids), flush=True)


def _exit_codes(pids: list[int]) -> list[int]:
    """Waits for all. As a launcher does, it ends the others when one has failed."""
    codes: dict[int, int] = {}
    while len(codes) < len(pids):
        pid, status = os.wait()
        codes[pid] = os.waitstatus_to_exitcode(status)
        for other in pids if codes[pid] != 0 else ():
            if other not in codes:
                os.kill(other, signal.SIGTERM)
    return [codes[pid] for pid in pids]


def _fork(rank: int, port: int, words: list[str]) -> int:
    pid = os.fork()
    if pid == 0:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in place.items()})
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)  # the input is for the parent, and so is what it prints
        os.dup2(2, 1)
        last_words.leave(main(words))
    return pid


if __name__ == "__main__":
    serve()
