"""The config tree and what turns a command line into it. Nothing in this package imports a framework."""

from hyper_parallel.config.configurable import Buildable, ConfigNode, Configurable, setting, slot
from hyper_parallel.config.errors import ConfigError, Fault
from hyper_parallel.config.sections import (
    ActivationCheckpointConfig,
    CommConfig,
    CompileConfig,
    DebugConfig,
    ParallelismConfig,
    TrainingConfig,
)
from hyper_parallel.config.target import Target

__all__ = [
    "ActivationCheckpointConfig",
    "Buildable",
    "CommConfig",
    "CompileConfig",
    "ConfigError",
    "ConfigNode",
    "Configurable",
    "DebugConfig",
    "Fault",
    "ParallelismConfig",
    "Target",
    "TrainingConfig",
    "setting",
    "slot",
]
