"""Linear: a matrix, with a bias if asked."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from hyper_parallel.protocols.initializer import Constant, Normal
from hyper_parallel.protocols.module import Module


class Linear(Module):
    """``y = x W^T (+ b)`` with the weight stored [out, in] as in torch."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Sizes of a linear map."""

        in_features: int
        """Size of the input's last dim."""
        out_features: int
        """Size of the output's last dim."""
        bias: bool = False
        """Add a learned vector, which starts at 0."""
        init_std: float = 0.02
        """Standard deviation of the first weights."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.add_parameter(
            "weight", config.out_features, config.in_features, role="matrix", init=Normal(config.init_std)
        )
        if config.bias:
            self.add_parameter("bias", config.out_features, role="bias", init=Constant(0.0))
        else:
            self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)
