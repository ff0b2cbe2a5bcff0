"""Runs of which one rank fails, and scripts, for test_failing_ranks.py to start under torchrun."""

from __future__ import annotations

import os
import signal
import sys
import time

from hyper_parallel.components.checkpoint import CheckpointManager
from hyper_parallel.components.loss import CrossEntropyLoss
from hyper_parallel.config.errors import RunError
from hyper_parallel.config.manager import parse_training_args
from hyper_parallel.config.target import Target
from hyper_parallel.trainer.config import TrainerConfig
from tests.trainer.runs import tiny_config

LAST, STEP = int(os.environ.get("WORLD_SIZE", "1")) - 1, 3


class FailingLoss(CrossEntropyLoss):
    """On the last rank, in the first micro-batch of step 3 of the launcher's first attempt, something happens."""

    calls = 0

    def __call__(self, *args):
        self.calls += 1
        restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        if self.calls == STEP and int(os.environ["RANK"]) == LAST and not restarted:
            time.sleep(1)  # the others wait in a collective by now
            while not os.path.exists(os.environ.get("AFTER", "/")):  # what is written behind the training
                time.sleep(0.1)
            match os.environ["FAILURE"]:
                case "run_error":
                    raise RunError("the last rank has had enough")
                case "bug":
                    raise KeyError("a bug of the last rank")
                case "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "hangs":
                    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # or torchrun would wait for half a minute
                    time.sleep(600)
        return super().__call__(*args)


def failing_loss(vocab_size: int) -> FailingLoss:
    return FailingLoss(CrossEntropyLoss.Config(), vocab_size=vocab_size)


def recipe() -> TrainerConfig:
    """One micro-batch a step."""
    config = tiny_config("set --dump_folder", steps=5, micro_batch_size=8 // (LAST + 1))
    config.loss = Target.of(failing_loss)
    return config


def saved_before() -> TrainerConfig:
    """As `recipe`, with a checkpoint after every second step."""
    config = recipe()
    config.checkpoint = CheckpointManager.Config(interval_steps=2)
    return config


def late_on_rank_0() -> None:
    """A recipe that is none, and on rank 0 takes its time to say so."""
    if os.environ["RANK"] == "0":
        time.sleep(2)


if __name__ == "__main__":
    config = parse_training_args(sys.argv[1:])
    trainer = config.build()
    trainer.train()  # no `with`, no handler: what ends it is nobody's to catch
