"""Rotary position embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864) and the scalings of its frequencies."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch

from hyper_parallel.config.configurable import ConfigNode
from hyper_parallel.config.errors import Fault
from hyper_parallel.config.sections import above_zero

RopeType = Literal["default", "linear", "dynamic", "yarn", "llama3"]
ROPE_TYPES: tuple[str, ...] = get_args(RopeType)


@dataclass(kw_only=True, slots=True)
class RopeParameters(ConfigNode):
    """Frequencies of the rotation, under the names of Hugging Face's `rope_parameters`."""

    rope_type: RopeType = "default"
    """How frequencies are stretched for longer rows. dynamic only changes rows longer than the model's limit, which
    are refused, so here it equals default."""
    rope_theta: float = 10000.0
    """Base of the wavelengths."""
    factor: float | None = None
    """How many times longer rows are than those of the first training. All types but default need it."""
    original_max_position_embeddings: int | None = None
    """yarn, llama3: row length of the first training. None: max_position_embeddings."""
    attention_factor: float | None = None
    """yarn: multiplies cos and sin. None: from `factor`, `mscale` and `mscale_all_dim`."""
    beta_fast: float | None = None
    """yarn: dims that turn at least this often within the original length keep their frequency. None: 32."""
    beta_slow: float | None = None
    """yarn: dims that turn at most this often are stretched in full. None: 1."""
    mscale: float | None = None
    """yarn: weight of log(factor) in the numerator of the attention factor, beside `mscale_all_dim`."""
    mscale_all_dim: float | None = None
    """yarn: the same in the denominator."""
    truncate: bool = True
    """yarn: round the range of stretched dims outwards to whole dims."""
    low_freq_factor: float | None = None
    """llama3: wavelengths above original length / this are stretched in full."""
    high_freq_factor: float | None = None
    """llama3: wavelengths below original length / this are kept."""

    def faults(self) -> Iterator[Fault]:
        if self.rope_type not in ROPE_TYPES:
            yield Fault("rope_type", f"{self.rope_type!r} is not implemented", f"choose one of {', '.join(ROPE_TYPES)}")
            return
        yield from above_zero(self, "rope_theta", "factor", "original_max_position_embeddings", "attention_factor")
        needed = {
            "linear": ("factor",),
            "dynamic": ("factor",),
            "yarn": ("factor",),
            "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
        }
        for name in needed.get(self.rope_type, ()):
            if getattr(self, name) is None:
                yield Fault(name, f"is missing and rope_type {self.rope_type} needs it", "give a number")


class RopeTables(NamedTuple):
    """Rotation of each position, shared by all layers."""

    cos: torch.Tensor
    """[B or 1, T, 1, D/2]"""
    sin: torch.Tensor
    """[B or 1, T, 1, D/2]"""


def rope_tables(
    parameters: RopeParameters,
    position_ids_BT: torch.Tensor,
    *,
    head_dim: int,
    max_position_embeddings: int,
    dtype: torch.dtype,
) -> RopeTables:
    """Cos and sin of every position in `dtype`. Angles are float32 in every dtype, as transformers computes them."""
    frequencies, scale = rope_frequencies(
        parameters, head_dim=head_dim, max_position_embeddings=max_position_embeddings, device=position_ids_BT.device
    )
    angles = position_ids_BT[..., None, None].float() * frequencies
    return RopeTables((angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype))


def rope_frequencies(
    p: RopeParameters, *, head_dim: int, max_position_embeddings: int, device: torch.device | str | None = None
) -> tuple[torch.Tensor, float]:
    """Radians per position of each pair of dims, [D/2] float32, and the factor on cos and sin.

    yarn: Peng et al. 2023, https://arxiv.org/abs/2309.00071, sections 3.2-3.4. llama3: as published with Llama 3.1.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    wavelengths = p.rope_theta**exponents  # in units of 2 pi positions
    frequencies = 1.0 / wavelengths
    if p.rope_type in ("default", "dynamic"):
        return frequencies, 1.0
    assert p.factor is not None, "RopeParameters.faults() was not asked"
    if p.rope_type == "linear":
        return frequencies / p.factor, 1.0
    original = p.original_max_position_embeddings or max_position_embeddings
    if p.rope_type == "yarn":
        ramp = _yarn_ramp(p, head_dim, original, device)
        stretched = 1.0 / (p.factor * wavelengths)
        return stretched * (1 - ramp) + frequencies * ramp, _yarn_attention_factor(p, p.factor)
    assert p.low_freq_factor is not None and p.high_freq_factor is not None
    turns = original * frequencies / (2 * math.pi)  # turns within the original length
    share = ((turns - p.low_freq_factor) / (p.high_freq_factor - p.low_freq_factor)).clamp(0, 1)
    return (1 - share) * frequencies / p.factor + share * frequencies, 1.0


def apply_rope(x_BTHD: torch.Tensor, tables: RopeTables) -> torch.Tensor:
    """Rotates each pair (i, i + D/2) of the last dim by its position's angle."""
    return _Rotation.apply(x_BTHD, tables.cos, tables.sin)


class _Rotation(torch.autograd.Function):
    """The gradient of a rotation is the rotation back: as many passes as forward, and `x` is not kept."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _rotate(grad, *ctx.saved_tensors, -1), None, None


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, direction: int) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat(
        (
            (first * cos).addcmul_(second, sin, value=-direction),
            (second * cos).addcmul_(first, sin, value=direction),
        ),
        dim=-1,
    )


def _yarn_ramp(p: RopeParameters, head_dim: int, original: int, device: torch.device | str | None) -> torch.Tensor:
    """[D/2] share of the unstretched frequency: 1 for fast dims, 0 for slow ones, linear between."""

    def dim_that_turns(times: float) -> float:
        return head_dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(p.rope_theta))

    low, high = dim_that_turns(p.beta_fast or 32), dim_that_turns(p.beta_slow or 1)
    if p.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    dims = torch.arange(head_dim // 2, dtype=torch.float32, device=device)
    return 1 - ((dims - low) / (high - low)).clamp(0, 1)


def _yarn_attention_factor(p: RopeParameters, factor: float) -> float:
    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if p.attention_factor is not None:
        return p.attention_factor
    if p.mscale and p.mscale_all_dim:
        return magnitude(p.mscale) / magnitude(p.mscale_all_dim)
    return magnitude(1.0)
