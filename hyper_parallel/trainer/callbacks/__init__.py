"""Callbacks: observers of a run, one a file, and the state that they see."""

from hyper_parallel.trainer.callbacks.base import Callback, ConfiguredCallback, TrainerState
from hyper_parallel.trainer.callbacks.checkpoint_callback import CheckpointCallback
from hyper_parallel.trainer.callbacks.environ_meter_callback import EnvironMeterCallback
from hyper_parallel.trainer.callbacks.evaluate_callback import EvalCallback, EvaluateCallback
from hyper_parallel.trainer.callbacks.expert_dispatch_callback import ExpertDispatchCallback
from hyper_parallel.trainer.callbacks.garbage_collection_callback import GarbageCollectionCallback, GCCallback
from hyper_parallel.trainer.callbacks.gradient_health_callback import GradientHealthCallback
from hyper_parallel.trainer.callbacks.handler import CallbackHandler
from hyper_parallel.trainer.callbacks.logging_callback import LoggingCallback
from hyper_parallel.trainer.callbacks.memory_monitor_callback import MemoryMonitorCallback
from hyper_parallel.trainer.callbacks.moe_monitor_callback import MoEMonitorCallback
from hyper_parallel.trainer.callbacks.profiler_callback import ProfilerCallback
from hyper_parallel.trainer.callbacks.safetensors_export_callback import SafetensorsExportCallback
from hyper_parallel.trainer.callbacks.sink_callback import SinkCallback
from hyper_parallel.trainer.callbacks.tensorboard_callback import TensorBoardCallback
from hyper_parallel.trainer.callbacks.tqdm_callback import ProgressCallback, TqdmCallback
from hyper_parallel.trainer.callbacks.wandb_callback import WandbCallback

__all__ = [
    "Callback",
    "CallbackHandler",
    "CheckpointCallback",
    "ConfiguredCallback",
    "EnvironMeterCallback",
    "EvalCallback",
    "EvaluateCallback",
    "ExpertDispatchCallback",
    "GCCallback",
    "GarbageCollectionCallback",
    "GradientHealthCallback",
    "LoggingCallback",
    "MemoryMonitorCallback",
    "MoEMonitorCallback",
    "ProfilerCallback",
    "ProgressCallback",
    "SafetensorsExportCallback",
    "SinkCallback",
    "TensorBoardCallback",
    "TqdmCallback",
    "TrainerState",
    "WandbCallback",
]
