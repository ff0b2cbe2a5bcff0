"""What a user's YAML may name: each call of a function here is noted."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from hyper_parallel.components.loss import CrossEntropyLoss
from hyper_parallel.components.optimizer import AdamW, OptimizersContainer
from hyper_parallel.models.qwen3_moe import create_model_spec
from hyper_parallel.protocols.model_spec import ModelSpec

CALLS: list[str] = []


def fast_adamw(lr: float = 0.1, *, beta: float = 0.9) -> AdamW.Config:
    CALLS.append("fast_adamw")
    return AdamW.Config(lr=lr, betas=(beta, 0.95))


def model(layers: int) -> ModelSpec:
    CALLS.append("model")
    return create_model_spec("debug", num_hidden_layers=layers)


def model_of_nothing() -> ModelSpec:
    CALLS.append("model_of_nothing")
    return {"name": "x"}  # type: ignore[return-value]


def model_that_raises() -> ModelSpec:
    raise KeyError("lost")


def unannotated_model(layers: int = 1):
    CALLS.append("unannotated_model")
    return create_model_spec("debug", num_hidden_layers=layers)


def typed_for_checkers(layers: Unknown = 1) -> None:  # type: ignore[name-defined]  # noqa: F821
    CALLS.append("typed_for_checkers")


def number() -> int:
    CALLS.append("number")
    return 3


def positional(lr: float, /, params: Any) -> torch.optim.Optimizer:
    CALLS.append("positional")
    return torch.optim.SGD(params, lr=lr)


class Sgd:
    """A user's plain class: `params` comes from the trainer, `lr` must be given."""

    def __init__(self, params: Any, lr: float, *, nesterov: bool = False, note: Any = None) -> None:
        CALLS.append("Sgd")
        os.makedirs("made_by_sgd")


class Watch:
    """A user's callback: `trainer` comes from the run."""

    def __init__(self, trainer: Any, every: int) -> None:
        CALLS.append("Watch")


class ScaledLoss(CrossEntropyLoss):
    """Cross entropy times a factor."""

    @dataclass(kw_only=True, slots=True)
    class Config(CrossEntropyLoss.Config):
        factor: float
        """What the loss is multiplied by."""


class Unsuitable(OptimizersContainer):
    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        size: int = 1

        def __post_init__(self) -> None:
            raise ValueError("size is wrong")


NOT_CALLABLE = 3
