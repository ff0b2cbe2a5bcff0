"""StateDictAdapter: between a model's parameters and the tensors of a Hugging Face checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hyper_parallel.protocols.model import BaseModel


class HFBlock(NamedTuple):
    """A tensor of a checkpoint, or a part of it, and the block of a parameter that it fills."""

    hf_name: str
    """Name of the tensor in the checkpoint."""
    block: tuple[int | slice, ...]
    """The block `parameter[block]`, which has the shape of what fills it. Empty: the whole parameter."""
    part: tuple[slice, ...] = ()
    """What of the checkpoint's tensor that is, per dim; the last of several parts ends where the tensor does. Empty:
    the whole tensor. Only for layouts that are read."""


class StateDictAdapter(ABC):
    """Maps names and layouts. One table serves both directions, a tensor at a time, so no second copy is needed."""

    def __init__(self, config: BaseModel.Config) -> None:
        self.config = config

    @abstractmethod
    def hf_blocks(self, name: str, shape: Sequence[int]) -> list[HFBlock]:
        """The checkpoint tensors that make up the parameter `name` of `shape`. Their blocks cover it exactly once."""

    def hf_layouts(self, name: str, shape: Sequence[int]) -> list[list[HFBlock]]:
        """Every layout in which a checkpoint may hold the parameter. The first is `hf_blocks`, the one written."""
        return [self.hf_blocks(name, shape)]

    def hf_copies(self) -> dict[str, str]:
        """Tensors that a checkpoint may hold besides, because they equal another: name -> name of that one."""
        return {}

    @abstractmethod
    def hf_config(self, dtype: str) -> dict[str, Any]:
        """The content of config.json for weights in `dtype`, such as bfloat16."""

    @abstractmethod
    def hf_differences(self, folder: Path) -> list[str]:
        """Settings that `folder`'s config.json gives another value than this model has, with both values.

        Raises:
            ConfigError: config.json is missing, is of another family, or says what is not implemented.
        """

    def to_hf(self, name: str, parameter: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name, tensor) of the checkpoint for one parameter, as views of it."""
        for hf_name, block, _ in self.hf_blocks(name, parameter.shape):
            yield hf_name, parameter[block] if block else parameter
