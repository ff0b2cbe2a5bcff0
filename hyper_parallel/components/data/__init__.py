"""From text to batches: sources -> documents -> packing (in the epoch's order) -> collate -> loader."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hyper_parallel.components.data.dataset_loader import build_dataloader
    from hyper_parallel.components.data.hyper_iter import HyperIter
    from hyper_parallel.components.data.loader import BaseDataLoader, TextDataLoader
    from hyper_parallel.components.data.micro_batch_collator import MakeMicroBatchCollator
    from hyper_parallel.components.data.step_sampler import StepBatchSampler
    from hyper_parallel.components.data.text_dataset import PlainTextDataTransform, load_text_dataset

__all__ = [
    "BaseDataLoader",
    "HyperIter",
    "MakeMicroBatchCollator",
    "PlainTextDataTransform",
    "StepBatchSampler",
    "TextDataLoader",
    "build_dataloader",
    "load_text_dataset",
]

_MODULES = {
    "BaseDataLoader": "loader",
    "HyperIter": "hyper_iter",
    "MakeMicroBatchCollator": "micro_batch_collator",
    "PlainTextDataTransform": "text_dataset",
    "StepBatchSampler": "step_sampler",
    "TextDataLoader": "loader",
    "build_dataloader": "dataset_loader",
    "load_text_dataset": "text_dataset",
}


def __getattr__(name: str) -> Any:
    # Only a loader needs torch: what prepares and reads data on disk starts without it.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
