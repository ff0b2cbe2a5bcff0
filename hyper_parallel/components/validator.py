"""Loss on held-out data, which leaves the training run as it found it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hyper_parallel.components.data import BaseDataLoader, TextDataLoader
from hyper_parallel.components.eval_mode import eval_mode
from hyper_parallel.components.loss import IGNORE_INDEX
from hyper_parallel.config.configurable import Buildable, Configurable, slot
from hyper_parallel.config.errors import Fault, RunError
from hyper_parallel.config.sections import at_least
from hyper_parallel.distributed.reductions import all_reduce_sum
from hyper_parallel.platform import get_platform

if TYPE_CHECKING:
    import torch.distributed as dist


class Validator(Configurable):
    """Measures the token-weighted loss on the same rows every time."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """When and on what to validate."""

        enable: bool = False
        """Measure the loss on held-out data while training."""
        interval_steps: int = 100
        """Validate after every this many steps, and after the last one."""
        steps: int = 10
        """Batches of training.global_batch_size rows in one validation."""
        dataloader: Buildable[BaseDataLoader] = slot(
            lambda: TextDataLoader.Config(split="validation", shuffle=False),
            runtime="tokenizer seq_len micro_batch_size global_batch_size dp_rank dp_size seed",
        )
        """The held-out data. Training on data of one's own wants a path here too."""

        def faults(self) -> Iterator[Fault]:
            yield from at_least(self, 1, "interval_steps", "steps")

    def __init__(
        self,
        config: Config,
        *,
        model_parts: list[nn.Module],
        evaluate: Callable[[list[dict[str, Any]]], torch.Tensor],
        loader_arguments: dict[str, Any],
        dp_group: dist.ProcessGroup | None,
        loss_group: dist.ProcessGroup | None,
        training_steps: int,
    ) -> None:
        """Builds the held-out dataloader when validation is enabled.

        Args:
            evaluate: from the micro-batches of a batch to the sum of the loss over their tokens on this rank.
            loader_arguments: runtime arguments of the training dataloader; the held-out one gets the same.
            dp_group: the ranks that read different rows; None for one process.
            loss_group: the ranks that hold different tokens of them.
        """
        self._config = config
        self._model_parts = model_parts
        self._evaluate = evaluate
        self._dp_group, self._loss_group = dp_group, loss_group
        self._training_steps = training_steps
        self._dataloader = config.dataloader.build(**loader_arguments) if config.enable else None
        self._start = self._dataloader.state_dict() if self._dataloader is not None else None

    def due(self, step: int) -> bool:
        """Whether to validate after optimizer step `step`."""
        return self._config.enable and (step % self._config.interval_steps == 0 or step == self._training_steps)

    @torch.no_grad()
    def validate(self) -> float:
        """Sum of the loss over all valid tokens of all ranks, divided by their number.

        Every rank must call it. Train mode, random state and the training data's position are as before.

        Raises:
            RunError: `enable` is False, or no token of the held-out rows is to be predicted.
        """
        if self._dataloader is None:
            raise RunError("validator.enable is False, so there is no held-out data to measure; set it True")
        assert self._start is not None
        platform, device = get_platform(), get_platform().device()
        rng_state = platform.rng_state()
        try:
            self._dataloader.load_state_dict(self._start)
            loss_sum, valid_tokens = torch.zeros((), device=device), 0
            with eval_mode(self._model_parts):
                for micro_batches in islice(self._dataloader, self._config.steps):
                    valid_tokens += sum(int((m["labels"] != IGNORE_INDEX).sum()) for m in micro_batches)
                    loss_sum = loss_sum + self._evaluate(micro_batches)
        finally:
            self._dataloader.close()
            platform.set_rng_state(rng_state)
        loss = float(all_reduce_sum(loss_sum, self._loss_group))
        tokens = int(all_reduce_sum(torch.tensor(valid_tokens, device=device), self._dp_group))
        if tokens == 0:
            raise RunError("validator: no token of the held-out rows is to be predicted; give other data")
        return loss / tokens

    def close(self) -> None:
        """Ends the held-out dataloader."""
        if self._dataloader is not None:
            self._dataloader.close()
