"""The model/data/train files of old: read, then turned into a TrainerConfig. Nothing else knows of them."""

from hyper_parallel.trainer.legacy.arguments import is_legacy, parse_args, read_legacy
from hyper_parallel.trainer.legacy.conversion import in_legacy_words, legacy_to_trainer_config
from hyper_parallel.trainer.legacy.fields import LEGACY_NAMES
from hyper_parallel.trainer.legacy.schema import HyperTrainerConfig

_legacy_to_trainer_config = legacy_to_trainer_config

__all__ = [
    "LEGACY_NAMES",
    "HyperTrainerConfig",
    "in_legacy_words",
    "is_legacy",
    "legacy_to_trainer_config",
    "parse_args",
    "read_legacy",
]
