"""BaseTrainer: the training algorithm. Subclasses assemble the parts and may replace the hook `get_batch`."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any, Self

from torch import Tensor

from hyper_parallel.components.checkpoint import CheckpointManager
from hyper_parallel.components.data import BaseDataLoader
from hyper_parallel.components.loss import BaseLoss
from hyper_parallel.components.lr_scheduler import LRSchedulersContainer
from hyper_parallel.components.metrics import MetricsProcessor, StepMetrics
from hyper_parallel.components.optimizer import OptimizersContainer
from hyper_parallel.components.profiler import Profiler
from hyper_parallel.components.tokenizer import BaseTokenizer
from hyper_parallel.components.validator import Validator
from hyper_parallel.config.errors import RunError
from hyper_parallel.distributed.last_words import lost_peers_at
from hyper_parallel.distributed.parallel_dims import ParallelDims
from hyper_parallel.distributed.process_group import destroy_distributed, is_fake
from hyper_parallel.platform import get_platform
from hyper_parallel.protocols.model import BaseModel
from hyper_parallel.trainer import dump_folder
from hyper_parallel.trainer.callbacks import Callback, CallbackHandler, TrainerState
from hyper_parallel.trainer.config import TrainerConfig
from hyper_parallel.trainer.forward_backward import ForwardBackward
from hyper_parallel.trainer.phases import ClipGradFn
from hyper_parallel.trainer.step import FiniteGuard, StepTotals, check_step, loss_scales, loss_shares
from hyper_parallel.trainer.stop_signals import StopSignals

logger = logging.getLogger(__name__)


class BaseTrainer:
    """Trains what a subclass has assembled: every attribute below is set by its `__init__`."""

    config: TrainerConfig
    parallel_dims: ParallelDims
    tokenizer: BaseTokenizer
    model_parts: list[BaseModel]
    clip_grad_fn: ClipGradFn
    loss: BaseLoss
    forward_backward: ForwardBackward
    dataloader: BaseDataLoader
    optimizers: OptimizersContainer
    lr_schedulers: LRSchedulersContainer
    checkpointer: CheckpointManager
    metrics: MetricsProcessor
    profiler: Profiler
    validator: Validator
    finite_guard: FiniteGuard | None
    state: TrainerState
    training_steps: int
    callbacks: CallbackHandler

    def get_batch(self, micro_batch: dict[str, Any]) -> dict[str, Any]:
        """Hook: the keyword arguments of the model's forward for one micro-batch, on the device.

        Args:
            micro_batch: `input_ids`, `labels`, `position_ids` [B, T] on the host, and `cu_seqlens`, host integers.
        """
        device = get_platform().device()

        def move(name: str) -> Tensor:
            return micro_batch[name].to(device, non_blocking=True)

        return {
            "input_ids_BT": move("input_ids"),
            "position_ids_BT": move("position_ids"),
            "cu_seqlens": micro_batch["cu_seqlens"],
            "labels_BT": move("labels"),
        }

    def train(self) -> None:
        """Trains from the newest checkpoint, or from the start, to `training_steps`; or saves the start alone, if
        `checkpoint.create_seed` asks for that.

        Raises:
            PeerLostError: another rank has ended, or hangs.
        """
        with lost_peers_at(lambda: f"step {self.state.global_step}"):
            self._train()

    def _train(self) -> None:
        state = self.state
        state.max_steps = self.training_steps  # which may have been changed since it was planned
        self.checkpointer.load()
        if self.checkpointer.last_complete is not None:
            self._dispatch_checkpoint("on_load")
        if self.checkpointer.creates_seed:
            self.save_checkpoint()
            return
        first, last = state.global_step + 1, self.training_steps
        if first > last:
            logger.info(
                "already at step %d of %d, nothing to train: raise --training.steps, or give another --dump_folder",
                state.global_step,
                last,
            )
            return
        state.epoch = self._epoch(first)
        self.dispatch("on_train_begin")
        batches = iter(self.dataloader)
        with self.profiler, StopSignals() as signals:
            for step in range(first, last + 1):
                state.epoch = self._epoch(step)
                if step == first or state.epoch != self._epoch(step - 1):
                    self.dispatch("on_epoch_begin")
                state.record = self.train_step(batches)
                self.dispatch("on_step_end")
                self.dispatch("on_log")
                self.profiler.step()
                stop = signals.due(step)
                self._maybe_save(step, last=stop or step == last)
                if stop or step == last or state.epoch != self._epoch(step + 1):
                    self.dispatch("on_epoch_end")
                if stop and step < last:
                    saved = (
                        "" if self.checkpointer.last_step == step else ", not saved, since checkpoint.enable is False"
                    )
                    logger.info("stopped after step %d of %d%s", step, last, saved)
                    break
        self.checkpointer.wait()
        self.dispatch("on_train_end")

    def _epoch(self, step: int) -> int:
        """The pass over the data that the first row of `step` belongs to. Data without a known end is one pass."""
        rows = getattr(self.dataloader, "rows_per_epoch", None)
        return (step - 1) * self.config.training.global_batch_size // rows if rows else 0

    def train_step(self, batches: Iterator[list[dict[str, Any]]]) -> StepMetrics:
        """One optimizer step over the next item of the dataloader.

        Raises:
            NonFiniteError: loss or gradient norm is not finite; on every rank, before any weight is changed.
            TrainingError: the loss is not zero though no label is to be trained.
        """
        state = self.state
        state.global_step += 1
        self.dispatch("on_step_begin")
        start = time.perf_counter()
        micro_batches = next(batches)
        data_seconds = time.perf_counter() - start
        lr = self.optimizers.lr

        dims, device = self.parallel_dims, get_platform().device()
        scales, valid_tokens = loss_scales(
            [m["labels"] for m in micro_batches], self.config.training.loss_aggregation, dims.dp_group, device
        )
        totals = StepTotals()
        rows = self.config.training.global_batch_size
        for output, scale in zip(self.forward_backward(micro_batches, scales), scales, strict=True):
            totals.add(*loss_shares(output, scale, rows))
            state.model_output = output
            self.dispatch("on_substep_end")
            state.model_output = None
        if self.finite_guard is not None:
            self.finite_guard.check_gradients()
        grad_norm = self.clip_grad_fn(
            [p for part in self.model_parts for p in part.parameters()], self.config.training.max_grad_norm
        )
        loss, aux_loss, norm = totals.reduce(dims.loss_group, grad_norm)
        state.grad_norm = norm
        self.dispatch("on_pre_optimizer_step")
        if not is_fake():  # whose numbers are none
            check_step(state.global_step, int(valid_tokens), loss, norm, self.checkpointer.finish)
        self.checkpointer.wait_copied()
        self.optimizers.step()
        self.optimizers.zero_grad()
        self.lr_schedulers.step()

        figures = self.checkpointer.take_figures()
        tokens = dims.dp_size * sum(m["input_ids"].numel() for m in micro_batches)
        state.tokens += tokens
        seconds = time.perf_counter() - start
        return StepMetrics(
            step=state.global_step,
            loss=loss,
            grad_norm=norm,
            lr=lr,
            tokens=tokens,
            step_seconds=seconds,
            tokens_per_second=tokens / seconds,
            data_seconds=data_seconds,
            memory_bytes=get_platform().memory_bytes(),
            extra={"aux_loss": aux_loss, **figures} if aux_loss is not None else figures,
        )

    def evaluate(self) -> float:
        """The loss on held-out data, as it is now. Every rank must call it; callbacks are told."""
        self.state.validation_loss = self.validator.validate()
        self.dispatch("on_evaluate")
        return self.state.validation_loss

    def save_checkpoint(self) -> None:
        """Saves the step that has ended, unless it is saved already. Every rank must call it; callbacks are told."""
        step = self.state.global_step
        if self.checkpointer.last_step != step:
            self.checkpointer.save(step, validation_loss=self._validation_loss())
            self._dispatch_checkpoint("on_save")

    def _maybe_save(self, step: int, *, last: bool) -> None:
        if self.checkpointer.maybe_save(step, last=last, validation_loss=self._validation_loss()):
            self._dispatch_checkpoint("on_save")

    def _validation_loss(self) -> float | None:
        """That of the step that has ended, if it was measured."""
        return None if self.state.record is None else self.state.record.extra.get("validation_loss")

    def _dispatch_checkpoint(self, moment: str) -> None:
        self.state.checkpoint_folder = self.checkpointer.last_folder
        self.dispatch(moment)

    def add_callback(self, callback: Callback) -> None:
        """Puts `callback`, made with this trainer, behind all others; its `on_init_end` is called at once."""
        self.callbacks.add(callback, self.state)

    def dispatch(self, moment: str) -> None:
        """Tells every callback of `moment`."""
        self.callbacks.dispatch(moment, self.state)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        self.close(failed=error_type is not None)

    def close(self, *, failed: bool = False) -> None:
        """Ends threads and writers and leaves the process group. May be called more than once.

        `failed`: this rank ends with an error, so the others are not waited for, and what callbacks raise now is but
        logged.
        """
        self.dataloader.close()
        self.validator.close()
        self.metrics.close()
        try:
            self.callbacks.close(self.state)
        except RunError as error:
            if not failed:
                raise
            logger.error("%s", error)
        if not failed:
            self.checkpointer.close()
            destroy_distributed(self.parallel_dims.release_groups())
            dump_folder.release(self.config.dump_folder)
