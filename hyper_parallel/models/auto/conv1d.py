"""GPT-2's linear map, in the place of transformers' Conv1D."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from hyper_parallel.protocols.module import Module


class Conv1D(Module):
    """``y = x W + b`` with the weight stored [in, out]. Where it is several maps in one, it is stored [in, maps, out]
    and the bias [maps, out]: the numbers of a checkpoint in their order, but each map can be split over ranks."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """What it stands for."""

        maps: int = 1
        """Maps of one size whose outputs lie side by side."""

    def __init__(self, config: Config, *, theirs: nn.Module) -> None:
        """`theirs`: transformers' module."""
        super().__init__(config)
        for name, parameter in theirs.named_parameters():
            own = parameter if config.maps == 1 else nn.Parameter(parameter.detach().unflatten(-1, (config.maps, -1)))
            self.register_parameter(name, own)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.flatten(1).t(), self.bias.flatten())


def row_parallel_conv1d(module: Conv1D, group: dist.ProcessGroup, x: torch.Tensor) -> torch.Tensor:
    """A part of the product; the sum over ranks is whole and holds the bias once."""
    return F.linear(x, module.weight.t(), module.bias * (dist.get_rank(group) == 0))
