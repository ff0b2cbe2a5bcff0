"""Trainers, and the phases that they share. What serves model/data/train scripts is imported when it is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hyper_parallel.trainer.hyper_trainer import HyperTrainer

if TYPE_CHECKING:
    from hyper_parallel.trainer.legacy import HyperTrainerConfig, parse_args
    from hyper_parallel.trainer.llm_trainer import LLMTrainer
    from hyper_parallel.trainer.text_trainer import TextTrainer

__all__ = ["HyperTrainer", "HyperTrainerConfig", "LLMTrainer", "TextTrainer", "parse_args"]

_MODULES = {
    "HyperTrainerConfig": "legacy",
    "LLMTrainer": "llm_trainer",
    "TextTrainer": "text_trainer",
    "parse_args": "legacy",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
