"""Grouped-query attention with normalised queries and keys, within documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from hyper_parallel.config.errors import Fault
from hyper_parallel.config.sections import CompileConfig
from hyper_parallel.models.common.documents import DocumentGroups
from hyper_parallel.models.common.linear import Linear
from hyper_parallel.models.common.norm import Float64Rounding, RMSNorm
from hyper_parallel.models.common.rope import RopeTables, apply_rope
from hyper_parallel.protocols.module import Module

# torch's fused CPU kernel is slower than plain products in narrow types, five times at 16 tokens and twice at 512,
# where the scores begin to weigh in memory. In float32 it is the faster one throughout.
_NARROW = (torch.bfloat16, torch.float16)
_DIRECT_TOKENS = 512

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""From rotated queries [B, T, H, D], rotated keys and values [B, T, K, D] to [B, T, H, D]."""


class Attention(Module):
    """Causal attention (Ainslie et al. 2023, https://arxiv.org/abs/2305.13245) with RMSNorm on each head's q and k."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Sizes of the attention."""

        hidden_size: int
        """Size of the residual stream."""
        num_heads: int
        """Query heads."""
        num_kv_heads: int
        """Key and value heads; each serves num_heads / num_kv_heads query heads."""
        head_dim: int
        """Size of one head."""
        bias: bool = False
        """Biases in all four projections."""
        norm_eps: float = 1e-6
        """Guard of the norms of q and k."""
        float64_rounding: Float64Rounding = "none"
        """See Decoder.Config."""
        init_std: float = 0.02
        """Standard deviation of the first weights."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.head_dim = config.head_dim

        def linear(in_features: int, out_features: int) -> Linear:
            return Linear.Config(
                in_features=in_features, out_features=out_features, bias=config.bias, init_std=config.init_std
            ).build()

        self.q_proj = linear(config.hidden_size, config.num_heads * config.head_dim)
        self.k_proj = linear(config.hidden_size, config.num_kv_heads * config.head_dim)
        self.v_proj = linear(config.hidden_size, config.num_kv_heads * config.head_dim)
        self.o_proj = linear(config.num_heads * config.head_dim, config.hidden_size)
        norm = RMSNorm.Config(size=config.head_dim, eps=config.norm_eps, float64_rounding=config.float64_rounding)
        self.q_norm, self.k_norm = norm.build(), norm.build()
        self.heads = HeadAttention.Config().build()

    def forward(self, x_BTC: torch.Tensor, rope: RopeTables, documents: DocumentGroups | None) -> torch.Tensor:
        def heads(projected: torch.Tensor) -> torch.Tensor:
            return projected.unflatten(2, (-1, self.head_dim))

        q_BTHD = self.q_norm(heads(self.q_proj(x_BTC)))
        k_BTKD = self.k_norm(heads(self.k_proj(x_BTC)))
        v_BTKD = heads(self.v_proj(x_BTC))
        return self.o_proj(self.heads(q_BTHD, k_BTKD, v_BTKD, rope, documents).flatten(2))


class HeadAttention(Module):
    """What attention does on each head by itself, whichever of the heads are given: rotation and the softmax. Without
    `rope` nothing is rotated."""

    eager_methods = ("attend_eagerly",)  # every packing has its own shapes, and each would be compiled anew
    was_called = False
    """Whether `attend_eagerly` was, since this was last set False."""

    def forward(
        self,
        q_BTHD: torch.Tensor,
        k_BTKD: torch.Tensor,
        v_BTKD: torch.Tensor,
        rope: RopeTables | None,
        documents: DocumentGroups | None,
    ) -> torch.Tensor:
        """[B, T, H, D]"""
        if rope is not None:
            q_BTHD, k_BTKD = apply_rope(q_BTHD, rope), apply_rope(k_BTKD, rope)
        if documents is None:
            return causal_attention(q_BTHD, k_BTKD, v_BTKD)
        return self.attend_eagerly(partial(document_attention, documents=documents), q_BTHD, k_BTKD, v_BTKD)

    def attend_eagerly(
        self, attend: Attend, q_BTHD: torch.Tensor, k_BTKD: torch.Tensor, v_BTKD: torch.Tensor
    ) -> torch.Tensor:
        """``attend(q, k, v)``, outside of compiled graphs."""
        self.was_called = True
        return attend(q_BTHD, k_BTKD, v_BTKD)


def fullgraph_faults(compile: CompileConfig) -> Iterator[Fault]:
    """The fault of a run that wants one graph a block."""
    if compile.enable and compile.fullgraph:
        fact = "True, but attention within packed documents stays outside the graph of a block"
        yield Fault("compile.fullgraph", fact, "set it False")


def document_attention(
    q_BTHD: torch.Tensor, k_BTKD: torch.Tensor, v_BTKD: torch.Tensor, documents: DocumentGroups | None
) -> torch.Tensor:
    """Causal attention of each document on itself, [B, T, H, D].

    One call per group of documents instead of a dense mask: work is the sum of squared document lengths, not the
    square of the row.
    """
    if documents is None:
        return causal_attention(q_BTHD, k_BTKD, v_BTKD)
    sizes = [count * length for count, length in documents.shapes]
    q, k, v = (x.flatten(0, 1).index_select(0, documents.gather).split(sizes) for x in (q_BTHD, k_BTKD, v_BTKD))
    outputs = [
        causal_attention(*(x.unflatten(0, shape) for x in group)).flatten(0, 1)
        for shape, *group in zip(documents.shapes, q, k, v, strict=True)
    ]
    return torch.cat(outputs).index_select(0, documents.scatter).view(q_BTHD.shape)


def causal_attention(q_BTHD: torch.Tensor, k_BTKD: torch.Tensor, v_BTKD: torch.Tensor) -> torch.Tensor:
    """Causal attention of each row on itself, [B, T, H, D]."""
    if q_BTHD.is_cpu and q_BTHD.dtype in _NARROW and q_BTHD.shape[1] <= _DIRECT_TOKENS:
        return _direct_attention(q_BTHD, k_BTKD, v_BTKD)
    q, k, v = (x.transpose(1, 2) for x in (q_BTHD, k_BTKD, v_BTKD))
    grouped = bool(q.shape[1] != k.shape[1])  # a bool in a compiled graph too, where sizes may be symbols
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    return out.transpose(1, 2)


def _direct_attention(q_BTHD: torch.Tensor, k_BTKD: torch.Tensor, v_BTKD: torch.Tensor) -> torch.Tensor:
    """The definition, with a score per pair of tokens in memory. The query heads of a key head are rows of one
    product."""
    tokens, kv_heads, size = k_BTKD.shape[1:]
    q_BKGTD = (q_BTHD * size**-0.5).unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4)
    k_BKDT, v_BKTD = k_BTKD.permute(0, 2, 3, 1), v_BTKD.transpose(1, 2)
    scores_BKGTT = (q_BKGTD.flatten(2, 3) @ k_BKDT).view(*q_BKGTD.shape[:4], tokens)
    future_TT = q_BTHD.new_full((tokens, tokens), -torch.inf).triu(1)
    weights_BKGTT = scores_BKGTT.add_(future_TT).softmax(-1)
    out_BKGTD = (weights_BKGTT.flatten(2, 3) @ v_BKTD).view(q_BKGTD.shape)
    return out_BKGTD.permute(0, 3, 1, 2, 4).flatten(2, 3)
