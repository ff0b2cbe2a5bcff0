"""Front door: argv -> TrainerConfig -> build() -> train().

    python -m hyper_parallel.train --model_spec qwen3_moe --training.steps 20 --optimizer.lr 1e-3

Exit codes: 0 trained; 2 a configuration that cannot train (one line per fault, nothing created); 1 any other error.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

from hyper_parallel.platform.environment import prepare_environment

LAST_WORD_SECONDS = 10
"""How long a rank that failed without a word leaves the one that speaks for it to do so."""


def main(argv: Sequence[str] | None = None, prog: str = "hyper_parallel.train") -> int:
    """Trains what `argv` (default: this process's command line) asks for; returns the exit code.

    `prog`: the module that was started, for what is printed.
    """
    prepare_environment()
    # Only now, since all that follows loads torch.
    from hyper_parallel.config import manager
    from hyper_parallel.config.errors import ConfigError, RunError
    from hyper_parallel.distributed.process_group import launched_world_size
    from hyper_parallel.trainer.hyper_trainer import HyperTrainer

    words = sys.argv[1:] if argv is None else argv
    try:
        config = manager.load(HyperTrainer.Config, words, world_size=launched_world_size(), prog=prog)
        manager.save(config)
    except ConfigError as error:
        if manager.speaks():  # every rank has read the same words
            manager.report(error)
        return 2
    try:
        with config.build() as trainer:
            trainer.train()
    except ConfigError as error:  # what only building can see, such as a file without text
        if manager.speaks():
            manager.report(error)
        return 2
    except RunError as error:
        if error.told:
            time.sleep(LAST_WORD_SECONDS)
        elif manager.speaks() or not error.every_rank:
            print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def leave(code: int) -> None:
    """Ends this process with `code`. A failed rank goes without cleaning up: the others may wait in a collective for
    good, and gloo aborts an interpreter that ends with its group open."""
    from hyper_parallel.config import manager

    if code == 0:
        sys.exit(0)
    if not manager.speaks():
        # Launchers end every rank when the first one ends, which would silence the one that says why.
        time.sleep(LAST_WORD_SECONDS)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(prog: str = "hyper_parallel.train") -> None:
    """What ``python -m prog`` does."""
    try:
        leave(main(prog=prog))
    except BrokenPipeError:  # `--help | head`: the reader has seen enough
        os._exit(0)


if __name__ == "__main__":
    run()
