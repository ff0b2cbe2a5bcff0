"""From a model's Config to weights on a device: shapes first, memory once it is known which part of them is here."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hyper_parallel.platform import get_platform
from hyper_parallel.protocols.model import BaseModel


def construct_on_meta(model_config: BaseModel.Config, dtype: torch.dtype) -> BaseModel:
    """The whole model with parameters of `dtype`, on the meta device: shapes without memory."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            return model_config.build()
    finally:
        torch.set_default_dtype(default)


def materialize(model_parts: Iterable[BaseModel], *, cpu_offload: bool, seed: int) -> None:
    """Memory for what this rank holds of each part, with its initial values, ready to train."""
    device = torch.device("cpu") if cpu_offload else get_platform().device()
    for part in model_parts:
        part.to_empty(device=device)
        part.init_weights(seed)
        part.train()
