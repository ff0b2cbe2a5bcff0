"""RMSNorm (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F

from hyper_parallel.protocols.initializer import Constant
from hyper_parallel.protocols.module import Module

Float64Rounding = Literal["none", "transformers"]
"""What a float64 model rounds to float32: nothing, or what transformers rounds in every type."""


class RMSNorm(Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dim; the mean is taken in float32 or wider."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Size and guard of the norm."""

        size: int
        """Size of the last dim."""
        eps: float = 1e-6
        """Added to the mean square."""
        float64_rounding: Float64Rounding = "none"
        """See Decoder.Config."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.eps = config.eps
        self.rounds_float64 = config.float64_rounding == "transformers"
        self.add_parameter("weight", config.size, role="norm", init=Constant(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.rounds_float64 and x.dtype == torch.float64:
            narrow = x.float()
            unit = narrow * torch.rsqrt(narrow.pow(2).mean(-1, keepdim=True) + self.eps)
            return self.weight * unit.double()
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """torch's fused kernel where there is one; on CPU, where torch has none, the fewest passes over `x`."""
    if x.is_cpu:
        return _RMSNormCPU.apply(x, weight, eps)
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


class _RMSNormCPU(torch.autograd.Function):
    """Saves `x` and one number a row, where the composite version saves three tensors of the size of `x`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale.to(x.dtype)).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        scale = scale.to(x.dtype)
        unit = x * scale
        grad_weight = (grad * unit).flatten(0, -2).sum(0)
        grad_unit = grad * weight
        along = (grad_unit * unit).mean(-1, keepdim=True)
        grad_x = torch.addcmul(grad_unit, unit, along, value=-1).mul_(scale)
        return grad_x, grad_weight, None
