"""Front door: argv -> TrainerConfig -> build() -> train().

    python -m hyper_parallel.train --model_spec qwen3_moe --training.steps 20 --optimizer.lr 1e-3

Exit codes: 0 trained; 2 a configuration that cannot train (one line per fault, nothing created); 1 any other error.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hyper_parallel.platform.environment import prepare_environment


def main(argv: Sequence[str] | None = None) -> int:
    """Trains what `argv` (default: this process's command line) asks for; returns the exit code."""
    prepare_environment()
    # Only now, since all that follows loads torch.
    from hyper_parallel.config import manager
    from hyper_parallel.config.errors import ConfigError
    from hyper_parallel.distributed.process_group import launched_world_size
    from hyper_parallel.trainer.errors import TrainingError
    from hyper_parallel.trainer.hyper_trainer import HyperTrainer

    words = sys.argv[1:] if argv is None else argv
    try:
        config = manager.load(HyperTrainer.Config, words, world_size=launched_world_size())
        manager.save(config)
    except ConfigError as error:
        if manager.speaks():  # every rank has read the same words
            manager.report(error)
        return 2
    try:
        trainer = config.build()
        try:
            trainer.train()
        except BaseException:
            trainer.close(failed=True)
            raise
        trainer.close()
    except ConfigError as error:
        manager.report(error)
        return 2
    except TrainingError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
