"""GPT-2's linear map: what transformers' Conv1D does here in the place of its own forward."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


def conv1d(module: Any, x: torch.Tensor) -> torch.Tensor:
    """``y = x W + b`` with the weight [in, out], or [in, maps, out] where it is several maps whose outputs lie side by
    side."""
    return F.linear(x, module.weight.flatten(1).t(), module.bias.flatten())


def row_parallel_conv1d(module: nn.Module, group: dist.ProcessGroup, x: torch.Tensor) -> torch.Tensor:
    """A part of the product; the sum over ranks is whole and holds the bias once."""
    return F.linear(x, module.weight.t(), module.bias * (dist.get_rank(group) == 0))
