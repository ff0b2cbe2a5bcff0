"""LLMTrainer: the trainer of model/data/train scripts."""

from __future__ import annotations

from hyper_parallel.config import manager
from hyper_parallel.config.errors import ConfigError
from hyper_parallel.distributed.process_group import launched_world_size
from hyper_parallel.trainer.config import TrainerConfig
from hyper_parallel.trainer.hyper_trainer import HyperTrainer
from hyper_parallel.trainer.legacy import HyperTrainerConfig, in_legacy_words, legacy_to_trainer_config


class LLMTrainer(HyperTrainer):
    """A HyperTrainer that is its own front door: ``LLMTrainer(parse_args(HyperTrainerConfig)).train()`` is a script."""

    def __init__(self, args: HyperTrainerConfig | TrainerConfig) -> None:
        """Converts and checks `args`, saves what is trained in its dump folder, and builds all of it.

        Raises:
            ConfigError: with every fault, in the words of `args`; nothing is written or built then.
        """
        if isinstance(args, TrainerConfig):
            self._open(args.derive())
            return
        try:
            self._open(legacy_to_trainer_config(args))
        except ConfigError as error:
            raise ConfigError(in_legacy_words(error.faults)) from error

    def _open(self, config: TrainerConfig) -> None:
        config = manager.finish(config, launched_world_size())
        manager.save(config)
        super().__init__(config)

    def train(self) -> None:
        """Trains to the end, then ends writers and threads and leaves the process group."""
        with self:
            super().train()
