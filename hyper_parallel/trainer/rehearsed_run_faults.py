"""What one process that stands for all ranks (`comm.mode` fake) must not be asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hyper_parallel.components.checkpoint import CheckpointManager
from hyper_parallel.config.errors import Fault
from hyper_parallel.trainer.callbacks import CheckpointCallback, SafetensorsExportCallback

if TYPE_CHECKING:
    from hyper_parallel.trainer.config import TrainerConfig

_NO_NUMBERS = "comm.mode is fake: numbers that mean nothing"


def rehearsed_run_faults(config: TrainerConfig, world_size: int) -> Iterator[Fault]:
    """Faults of a run of `world_size` ranks with one process."""
    if config.comm.mode == "real":
        return
    if (started := int(os.environ.get("LOCAL_WORLD_SIZE", "1"))) > 1:
        fact = f"fake, but {started} processes were started: one stands for all ranks"
        yield Fault("comm.mode", fact, "start it without a launcher, with WORLD_SIZE in the environment")
    if (rank := int(os.environ.get("RANK", "0"))) > 0:
        fact = f"fake, but RANK is {rank}: the process that stands for all ranks is rank 0"
        yield Fault("comm.mode", fact, "leave RANK out of the environment")
    if world_size == 1:
        fact = "fake, but there is one rank, which needs no other"
        yield Fault("comm.mode", fact, "set degrees of parallelism, or WORLD_SIZE in the environment")
    if config.parallelism.pp > 1:
        fact = (
            f"{config.parallelism.pp}, but comm.mode is fake: a stage computes with what others send, and nobody does"
        )
        yield Fault("parallelism.pp", fact, "see what it would do with python -m hyper_parallel.explain")
    checkpoint = config.checkpoint
    if not isinstance(checkpoint, CheckpointManager.Config) or checkpoint.enable:
        yield Fault("checkpoint.enable", f"True, but {_NO_NUMBERS} are not kept", "set False")
    elif checkpoint.load_from is not None:
        fact = f"{checkpoint.load_from}, but {_NO_NUMBERS} need no weights to start from"
        yield Fault("checkpoint.load_from", fact, "leave it out")
    if getattr(config.validator, "enable", True):
        yield Fault("validator.enable", f"True, but {_NO_NUMBERS} tell nothing of held-out data", "set False")
    if config.debug.check_nan_inf:
        yield Fault("debug.check_nan_inf", f"True, but {_NO_NUMBERS} may well not be finite", "set False")
    for i, callback in enumerate(config.callbacks):
        for kind in (CheckpointCallback, SafetensorsExportCallback):
            if isinstance(callback, kind.Config):
                yield Fault(f"callbacks.{i}", f"{kind.__name__}, but {_NO_NUMBERS} are not for it", "leave it out")
