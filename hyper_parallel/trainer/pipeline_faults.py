"""What a run with a pipeline cannot be combined with, and what its schedule demands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from hyper_parallel.config.errors import Fault
from hyper_parallel.distributed.pipeline_plan import (
    micro_batch_faults,
    schedule_faults,
    schedule_of,
    stages_per_rank,
)
from hyper_parallel.protocols.model import BaseModel

if TYPE_CHECKING:
    from hyper_parallel.trainer.config import TrainerConfig


def pipeline_faults(config: TrainerConfig, dp_size: int | None) -> Iterator[Fault]:
    """Faults of a pipeline. Those that concern its layers are the model's to tell.

    Args:
        dp_size: data-parallel ranks. None: batches do not divide exactly over them, or they are not known.
    """
    parallelism, training, spec = config.parallelism, config.training, config.model_spec
    if parallelism.pp == 1 or min(training.micro_batch_size, parallelism.pp_virtual_stages or 1) < 1:
        return
    yield from schedule_faults(parallelism)
    if dp_size is not None:
        yield from micro_batch_faults(
            parallelism,
            global_batch_size=training.global_batch_size,
            micro_batch_size=training.micro_batch_size,
            dp_size=dp_size,
        )
    made = None if spec is None or spec.model is None else type(spec.model).owner
    per_rank, maker = stages_per_rank(parallelism), getattr(config.optimizer, "callable", None)
    rates = getattr(config.lr_scheduler, "callable", None)
    refused = {
        "model_spec.pipelining_fn": (
            spec is not None and spec.pipelining_fn is None,
            "None: this family cannot be taken apart",
        ),
        "model_spec.model": (
            spec is not None
            and spec.pipelining_fn is not None
            and getattr(made, "boundary", None) is BaseModel.boundary,
            f"{getattr(made, '__name__', '')} has no boundary(), which tells what one part of it sends to the next",
        ),
        "model_spec.clip_grad_fn": (
            spec is not None and spec.clip_grad_fn is not None,
            "given: it sees the parameters of one stage alone, and cannot tell the norm of all",
        ),
        "compile.enable": (
            config.compile.enable and schedule_of(parallelism).splits_backward,
            f"True: pp_schedule {parallelism.pp_schedule} takes the backward apart, which a compiled one cannot be",
        ),
        "activation_checkpoint.mode": (
            # Graphs are found by what they were made for, the newest first; recompute must find the very same one.
            config.compile.enable and config.activation_checkpoint.mode == "full",
            "full, and compile.enable is True: between a micro-batch's forward and its recompute a later one may be "
            "compiled, whose graph would run in its place",
        ),
        "parallelism.pp_schedule": (
            config.activation_checkpoint.mode == "selective" and schedule_of(parallelism).splits_backward,
            f"{parallelism.pp_schedule} takes the backward apart, and activation_checkpoint.mode is selective: what it "
            "keeps is given out once",
        ),
        "optimizer": (
            per_rank > 1 and isinstance(maker, type) and issubclass(maker, torch.optim.Optimizer),
            f"a plain {getattr(maker, '__name__', '')}: it is made for one model part, and each rank has {per_rank}",
        ),
        "lr_scheduler": (
            per_rank > 1 and isinstance(rates, type) and issubclass(rates, torch.optim.lr_scheduler.LRScheduler),
            f"a plain {getattr(rates, '__name__', '')}: it is made for one optimizer, and each rank has {per_rank}",
        ),
    }
    for path, (is_on, fact) in refused.items():
        if is_on:
            yield Fault(path, f"{fact}; parallelism.pp is {parallelism.pp}", "change it, or set parallelism.pp 1")
