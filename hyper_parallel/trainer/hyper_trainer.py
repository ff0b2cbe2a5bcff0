"""HyperTrainer: the trainer that TrainerConfig builds, in eleven steps."""

from __future__ import annotations

from hyper_parallel.config.configurable import Configurable
from hyper_parallel.trainer import phases
from hyper_parallel.trainer.base import BaseTrainer
from hyper_parallel.trainer.callbacks import TrainerState
from hyper_parallel.trainer.config import TrainerConfig


class HyperTrainer(BaseTrainer, Configurable):
    """Trains our own model families. Each line of `__init__` is one step of set-up; see `phases`."""

    Config = TrainerConfig

    def __init__(self, config: TrainerConfig) -> None:
        self.config = config = config.described()
        self.parallel_dims = phases.set_up_process(config)  # 1
        self.tokenizer = phases.build_tokenizer(config)  # 2
        self.dataloader = phases.build_dataloader(config, self.parallel_dims, self.tokenizer)  # 3
        self.training_steps = phases.plan_steps(config, self.dataloader)
        self.state = TrainerState(max_steps=self.training_steps)
        model_config = phases.prepare_model_config(config)  # 4
        model, self.model_parts = phases.build_model(config, model_config, self.parallel_dims)  # 5 to 8
        phases.check_vocabulary(self.tokenizer, self.model_parts[-1].vocab_size)
        self.optimizers = phases.build_optimizers(config, self.model_parts, self.parallel_dims)  # 9
        self.lr_schedulers = phases.build_lr_schedulers(config, self.optimizers, self.training_steps)
        self.clip_grad_fn = phases.choose_clip_grad_fn(config, self.model_parts, self.parallel_dims)
        self.loss = phases.build_loss(config, self.model_parts, self.parallel_dims)
        self.forward_backward = phases.build_forward_backward(
            config, self.model_parts, self.parallel_dims, self.loss, self.get_batch
        )
        self.checkpointer = phases.build_checkpointer(config, self, model_config)  # 10
        self.metrics = phases.build_metrics(config, model, self.training_steps)  # 11
        self.profiler = phases.build_profiler(config)
        self.validator = phases.build_validator(config, self)
        self.finite_guard = phases.guard_finite(config, self.model_parts)
        self.callbacks = phases.build_callbacks(config, self)
        self.dispatch("on_init_end")
