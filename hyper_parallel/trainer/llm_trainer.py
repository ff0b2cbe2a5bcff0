"""LLMTrainer: the trainer of model/data/train scripts."""

from __future__ import annotations

from hyper_parallel.config import manager
from hyper_parallel.distributed.process_group import launched_world_size
from hyper_parallel.trainer import dump_folder
from hyper_parallel.trainer.config import TrainerConfig
from hyper_parallel.trainer.hyper_trainer import HyperTrainer
from hyper_parallel.trainer.legacy import HyperTrainerConfig, front_door, legacy_to_trainer_config, legacy_words


class LLMTrainer(HyperTrainer):
    """A HyperTrainer that is its own front door: ``LLMTrainer(parse_args(HyperTrainerConfig)).train()`` is a script."""

    def __init__(self, args: HyperTrainerConfig | TrainerConfig) -> None:
        """Converts and checks `args`, saves what is trained in its dump folder, and builds all of it.

        Raises:
            FrontDoorError: a ConfigError with every fault, in the words of `args`; nothing is built then.
        """
        with front_door():
            if isinstance(args, TrainerConfig):
                self._open(args.derive())
            else:
                with legacy_words():
                    self._open(legacy_to_trainer_config(args))

    def _open(self, config: TrainerConfig) -> None:
        config = manager.finish(config, launched_world_size())
        dump_folder.hold(config.dump_folder)
        manager.save(config)
        super().__init__(config)

    def train(self) -> None:
        """Trains to the end, then ends writers and threads and leaves the process group."""
        with self:
            super().train()
