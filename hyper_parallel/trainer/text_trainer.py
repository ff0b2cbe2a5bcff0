"""TextTrainer: the trainer of a `dataset`, in thirteen stages that may be overridden one by one."""

from __future__ import annotations

from typing import Any

from hyper_parallel.config import manager
from hyper_parallel.config.errors import Fault, raise_faults
from hyper_parallel.trainer import phases
from hyper_parallel.trainer.base import BaseTrainer
from hyper_parallel.trainer.callbacks import TrainerState
from hyper_parallel.trainer.config import TrainerConfig, dataset_faults


class TextTrainer(BaseTrainer):
    """``TextTrainer(config).train()`` is a script. A stage is one phase or more, and takes what those before it made.

    The model stands before anything that knows its parameters is built, and the process group before all.
    """

    def __init__(self, config: TrainerConfig) -> None:
        """
        Raises:
            ConfigError: there is no `dataset`, or what it needs is missing; nothing is built then.
        """
        remedy = "give one, such as hyper_parallel.components.data.load_text_dataset, or train with a HyperTrainer"
        lacks = [] if config.dataset is not None else [Fault("dataset", "is missing: a TextTrainer reads one", remedy)]
        raise_faults([*lacks, *dataset_faults(config)])
        self.config = config.described()
        self._setup()
        self._build_model()
        self._build_loss()
        self._build_model_assets()
        self._build_data_transform()
        self._build_dataset()
        self._build_collate_fn()
        self._build_dataloader()
        self._compute_train_steps()
        self._build_optimizer()
        self._build_lr_scheduler()
        self._build_training_context()
        self._init_callbacks()
        self.dispatch("on_init_end")

    def _setup(self) -> None:
        """Device, process group, meshes, random seed, log; and the config in the dump folder."""
        self.parallel_dims = phases.set_up_process(self.config)
        manager.save(self.config)

    def _build_model(self) -> None:
        """`model_parts`: constructed, sharded, materialised, with their weights."""
        self.model_config = phases.prepare_model_config(self.config)
        self.model, self.model_parts = phases.build_model(self.config, self.model_config, self.parallel_dims)

    def _build_loss(self) -> None:
        """`loss`, told of the model."""
        self.loss = phases.build_loss(self.config, self.model_parts, self.parallel_dims)

    def _build_model_assets(self) -> None:
        """`tokenizer`."""
        self.tokenizer = phases.build_tokenizer(self.config)
        phases.check_vocabulary(self.tokenizer, self.model_parts[-1].vocab_size)

    def _build_data_transform(self) -> None:
        """`data_transform`, or None."""
        self.data_transform: Any = phases.build_data_transform(self.config, self.tokenizer)

    def _build_dataset(self) -> None:
        """`dataset`: samples."""
        self.dataset = phases.build_dataset(self.config, self.parallel_dims, self.tokenizer, self.data_transform)

    def _build_collate_fn(self) -> None:
        """`collate_fn`: from the samples of a step to its micro-batches."""
        self.collate_fn = phases.build_collate_fn(self.config, self.parallel_dims)

    def _build_dataloader(self) -> None:
        """`dataloader`, an endless iterator with a position."""
        self.dataloader = phases.build_dataset_loader(
            self.config, self.parallel_dims, self.tokenizer, self.dataset, self.collate_fn
        )

    def _compute_train_steps(self) -> None:
        """`training_steps`, and the state that counts them."""
        self.training_steps = phases.plan_steps(self.config, self.dataloader)
        self.state = TrainerState(max_steps=self.training_steps)

    def _build_optimizer(self) -> None:
        """`optimizers`, and how their gradients are clipped."""
        self.optimizers = phases.build_optimizers(self.config, self.model_parts, self.parallel_dims)
        self.clip_grad_fn = phases.choose_clip_grad_fn(self.config, self.model_parts, self.parallel_dims)

    def _build_lr_scheduler(self) -> None:
        """`lr_schedulers`."""
        self.lr_schedulers = phases.build_lr_schedulers(self.config, self.optimizers, self.training_steps)

    def _build_training_context(self) -> None:
        """What a step runs within: passes, checks of its numbers, checkpoints, validation."""
        self.forward_backward = phases.build_forward_backward(
            self.config, self.model_parts, self.parallel_dims, self.loss, self.get_batch
        )
        self.finite_guard = phases.guard_finite(self.config, self.model_parts)
        self.checkpointer = phases.build_checkpointer(self.config, self, self.model_config)
        self.validator = phases.build_validator(self.config, self)

    def _init_callbacks(self) -> None:
        """What watches the run."""
        self.metrics = phases.build_metrics(self.config, self.model, self.training_steps)
        self.profiler = phases.build_profiler(self.config)
        self.callbacks = phases.build_callbacks(self.config, self)

    def train(self) -> None:
        """Trains to the end, then ends writers and threads and leaves the process group."""
        with self:
            super().train()
