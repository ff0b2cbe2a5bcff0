"""Metrics: one producer of a step's numbers, and one file for each place they go to."""

from hyper_parallel.components.metrics.console import ConsoleLog
from hyper_parallel.components.metrics.json_lines import JsonLines
from hyper_parallel.components.metrics.processor import MetricsProcessor
from hyper_parallel.components.metrics.progress_bar import ProgressBar
from hyper_parallel.components.metrics.record import RateWindow, StepMetrics
from hyper_parallel.components.metrics.sink import MetricsSink
from hyper_parallel.components.metrics.tensorboard import TensorBoard
from hyper_parallel.components.metrics.wandb import WandB

__all__ = [
    "ConsoleLog",
    "JsonLines",
    "MetricsProcessor",
    "MetricsSink",
    "ProgressBar",
    "RateWindow",
    "StepMetrics",
    "TensorBoard",
    "WandB",
]
