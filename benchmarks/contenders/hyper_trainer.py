"""Our trainer with its default sinks, as a recipe gets it; only checkpoints are off."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.training import SEED, Training
from benchmarks.turns import Turn
from hyper_parallel.components.checkpoint import CheckpointManager
from hyper_parallel.components.data import TextDataLoader
from hyper_parallel.components.lr_scheduler import LRSchedulersContainer
from hyper_parallel.components.metrics import MetricsProcessor, StepMetrics
from hyper_parallel.components.metrics.processor import default_sinks
from hyper_parallel.components.metrics.sink import MetricsSink
from hyper_parallel.components.optimizer import AdamW
from hyper_parallel.config.sections import TrainingConfig
from hyper_parallel.models.qwen3_moe import create_model_spec
from hyper_parallel.trainer.config import TrainerConfig


class TurnTaker(MetricsSink):
    """Ends a step of the turn: a sink is what is called after each step, whatever else the trainer does."""

    turn: Turn

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsSink.Config):
        """Nothing to set."""

    def write(self, record: StepMetrics) -> None:
        self.turn.step_done()


def run(training: Training, turn: Turn) -> None:
    """Trains through `TrainerConfig.build()` and `train()`."""
    TurnTaker.turn = turn
    config = TrainerConfig(
        model_spec=create_model_spec("debug"),
        dump_folder=str(Path(training.folder) / "hyper_trainer"),
        dataloader=TextDataLoader.Config(path=str(training.text)),
        training=TrainingConfig(
            steps=turn.steps,
            seq_len=training.row_tokens,
            global_batch_size=training.rows,
            micro_batch_size=training.rows,
            max_grad_norm=training.max_grad_norm,
            seed=SEED,
            dtype=training.dtype,
        ),
        optimizer=AdamW.Config(lr=training.lr, betas=training.betas, weight_decay=training.weight_decay),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=training.warmup_steps),
        checkpoint=CheckpointManager.Config(enable=False),
        metrics=MetricsProcessor.Config(sinks=(*default_sinks(), TurnTaker.Config())),
    )
    with config.build() as trainer:
        trainer.train()
