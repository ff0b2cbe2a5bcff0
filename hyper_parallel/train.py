"""Front door: argv -> TrainerConfig -> build() -> train().

    python -m hyper_parallel.train --model_spec qwen3_moe --training.steps 20 --optimizer.lr 1e-3

Exit codes: 0 trained; 2 a configuration that cannot train (one line per fault, nothing created); 1 any other error.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hyper_parallel.platform.environment import prepare_environment


def main(argv: Sequence[str] | None = None, prog: str = "hyper_parallel.train") -> int:
    """Trains what `argv` (default: this process's command line) asks for; returns the exit code.

    `prog`: the module that was started, for what is printed.
    """
    prepare_environment()
    # Only now, since all that follows loads torch.
    from hyper_parallel.config import manager
    from hyper_parallel.distributed.last_words import exit_code, tell
    from hyper_parallel.distributed.process_group import launched_world_size
    from hyper_parallel.trainer import dump_folder
    from hyper_parallel.trainer.hyper_trainer import HyperTrainer

    words = sys.argv[1:] if argv is None else argv
    try:
        config = manager.load(HyperTrainer.Config, words, world_size=launched_world_size(), prog=prog)
        dump_folder.hold(config.dump_folder)  # before a file of a run that goes on there is written over
        manager.save(config)
        with config.build() as trainer:
            trainer.train()
    except Exception as error:  # whatever it is, one rank tells it and all end
        tell(error)
        return exit_code(error)
    return 0


def run(prog: str = "hyper_parallel.train") -> None:
    """What ``python -m prog`` does."""
    code = main(prog=prog)
    from hyper_parallel.distributed.last_words import leave

    leave(code)


if __name__ == "__main__":
    run()
