"""The model/data/train files of old: read, then turned into a TrainerConfig. Nothing else knows of them."""

from hyper_parallel.trainer.legacy.arguments import parse_args, read_legacy
from hyper_parallel.trainer.legacy.conversion import legacy_to_trainer_config, legacy_words
from hyper_parallel.trainer.legacy.fields import LEGACY_NAMES
from hyper_parallel.trainer.legacy.front_door import FrontDoorError, front_door
from hyper_parallel.trainer.legacy.schema import HyperTrainerConfig

_legacy_to_trainer_config = legacy_to_trainer_config

__all__ = [
    "LEGACY_NAMES",
    "FrontDoorError",
    "HyperTrainerConfig",
    "front_door",
    "legacy_to_trainer_config",
    "legacy_words",
    "parse_args",
    "read_legacy",
]
