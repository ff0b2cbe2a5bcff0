"""Qwen3-MoE."""

from __future__ import annotations

from hyper_parallel.components.lr_scheduler import LRSchedulersContainer
from hyper_parallel.components.optimizer import AdamW
from hyper_parallel.components.validator import Validator
from hyper_parallel.config.sections import ActivationCheckpointConfig, ParallelismConfig, TrainingConfig
from hyper_parallel.models.qwen3_moe import create_model_spec
from hyper_parallel.trainer.config import TrainerConfig


def debug() -> TrainerConfig:
    """Twenty steps of a model of some 15 M parameters on the embedded corpus: half a minute on two CPU cores."""
    return TrainerConfig(
        model_spec=create_model_spec("debug"),
        training=TrainingConfig(steps=20, seq_len=256, global_batch_size=8, micro_batch_size=8),
        optimizer=AdamW.Config(lr=1e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2, min_lr=1e-4),
        validator=Validator.Config(enable=True, interval_steps=10, steps=2),
    )


def pretrain_30b_a3b_64_devices() -> TrainerConfig:
    """Qwen3-30B-A3B from random weights on 64 accelerators of 64 GB: two copies, each over 32 ranks."""
    return TrainerConfig(
        model_spec=create_model_spec("30b_a3b"),
        training=TrainingConfig(
            steps=10_000,
            seq_len=4096,
            global_batch_size=512,
            micro_batch_size=1,
            mixed_precision_param="bfloat16",
        ),
        parallelism=ParallelismConfig(dp_replicate=2, dp_shard=32),
        activation_checkpoint=ActivationCheckpointConfig(mode="full"),
        optimizer=AdamW.Config(lr=3e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=500, min_lr=3e-5),
    )
