"""Qwen3, dense."""

from __future__ import annotations

from hyper_parallel.components.lr_scheduler import LRSchedulersContainer
from hyper_parallel.components.optimizer import AdamW
from hyper_parallel.config.sections import TrainingConfig
from hyper_parallel.models.qwen3 import create_model_spec
from hyper_parallel.trainer.config import TrainerConfig


def debug() -> TrainerConfig:
    """Twenty steps of a small dense model on the embedded corpus."""
    return TrainerConfig(
        model_spec=create_model_spec("debug"),
        training=TrainingConfig(steps=20, seq_len=256, global_batch_size=8, micro_batch_size=8),
        optimizer=AdamW.Config(lr=1e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2, min_lr=1e-4),
    )


def pretrain_0_6b_8_devices() -> TrainerConfig:
    """Qwen3-0.6B from random weights on 8 accelerators."""
    return TrainerConfig(
        model_spec=create_model_spec("0.6b"),
        training=TrainingConfig(
            steps=10_000, seq_len=4096, global_batch_size=256, micro_batch_size=4, mixed_precision_param="bfloat16"
        ),
        optimizer=AdamW.Config(lr=6e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=200, min_lr=6e-5),
    )
