"""What a user's plan_overrides name: attentions, experts and computations, and wrong ones."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from hyper_parallel.protocols.injected_compute import inner_wrapper, local_compute
from hyper_parallel.protocols.module_replacement import module_replacement
from hyper_parallel.protocols.redistribute import Move, redistribute


class Core(nn.Module):
    """Causal attention of whole rows, called (q, k, v) with [B, T, heads, D]."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Any) -> torch.Tensor:
        assert documents is None, "it knows of no documents"
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


class HFCore(nn.Module):
    """The same, called as transformers calls an attention function."""

    def forward(
        self, module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2), None


class CoredAttention(nn.Module):
    """Qwen3Attention with its attention of heads in a module of its own."""

    def __init__(self, old: Any, core: nn.Module) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = old.q_proj, old.k_proj, old.v_proj, old.o_proj
        self.q_norm, self.k_norm, self.core = old.q_norm, old.k_norm, core
        self.head_dim = old.head_dim

    def forward(self, hidden_states: Any, position_embeddings: Any, attention_mask: Any, **kwargs: Any) -> Any:
        q, k, v = (m(hidden_states).unflatten(-1, (-1, self.head_dim)) for m in (self.q_proj, self.k_proj, self.v_proj))
        q, k = apply_rotary_pos_emb(self.q_norm(q), self.k_norm(k), *position_embeddings, unsqueeze_dim=2)
        if isinstance(self.core, HFCore):
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            out, _ = self.core(self, q, k, v, attention_mask, scaling=self.head_dim**-0.5, **kwargs)
        else:
            out = self.core(q, k, v, documents=kwargs["documents"])
        return self.o_proj(out.flatten(2)), None


@module_replacement
def cored(module: Any, module_fqn: str, context: Any, hf: bool = False, keeps_heads: bool = False) -> nn.Module:
    new = CoredAttention(module, HFCore() if hf else Core())
    if keeps_heads:
        new.heads = module.heads
    return new.train(module.training)


class DenseExperts(nn.Module):
    """Every expert of every token, times `factor`."""

    def __init__(self, old: Any, factor: float) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj, self.factor = old.gate_up_proj, old.down_proj, factor

    def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> torch.Tensor:
        out = torch.zeros_like(hidden_states)
        for e, ((gate, up), down) in enumerate(zip(self.gate_up_proj, self.down_proj, strict=True)):
            weight = (top_k_weights * (top_k_index == e)).sum(-1, keepdim=True)
            out = out + weight * (F.silu(hidden_states @ gate.T) * (hidden_states @ up.T) @ down.T)
        return self.factor * out


@module_replacement
def dense(module: Any, module_fqn: str, context: Any, factor: float = 1.0) -> nn.Module:
    return DenseExperts(module, factor).train(module.training)


class DenseBlock(nn.Module):
    """A router before DenseExperts."""

    def __init__(self, old: Any) -> None:
        super().__init__()
        self.gate, self.experts = old.gate, DenseExperts(old.experts, 1.0)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states.flatten(0, -2)
        _, weights, index = self.gate(x)
        out: torch.Tensor = self.experts(x, index, weights)
        return out.view_as(hidden_states)


@module_replacement
def block_of_dense(module: Any, module_fqn: str, context: Any) -> nn.Module:
    return DenseBlock(module).train(module.training)


@module_replacement
def renamed(module: Any, module_fqn: str, context: Any) -> nn.Module:
    """The same module, of a class whose forward is another function."""
    kind = type(module)

    def forward(self: Any, *args: Any) -> Any:
        return kind.forward(self, *args)

    forward.__signature__ = inspect.signature(kind.forward)  # type: ignore[attr-defined]
    new: nn.Module = copy.copy(module)
    new.__class__ = type("Renamed", (kind,), {"forward": forward})
    return new


@local_compute
def chunked(mesh: Any, tp_mesh: Any, cp_mesh: Any, ep_mesh: Any, chunks: int = 2, factor: float = 1.0) -> Any:
    """A feed-forward layer that computes a part of the tokens at a time."""

    def compute(module: Any, *args: Any) -> torch.Tensor:
        (x,) = args
        parts = [module.down_proj(F.silu(module.gate_proj(c)) * module.up_proj(c)) for c in x.chunk(chunks, 1)]
        return factor * torch.cat(parts, 1)

    return compute


@inner_wrapper
def masked(target_module: Any, mesh: Any, tp_mesh: Any, cp_mesh: Any, ep_mesh: Any, sees_all: bool = True) -> Any:
    """Keys and values of all ranks, and a mask by positions."""

    def gather(x: torch.Tensor) -> torch.Tensor:
        return redistribute(x, Move(Shard(1), Replicate(), Partial(), Shard(1)), cp_mesh.get_group())

    def compute(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: Any) -> torch.Tensor:
        documents = others[-1]
        own_T = documents.parts.positions(documents.rank, q.device)
        seen_T = documents.parts.joined_positions(q.device) if sees_all else own_T
        k, v = (gather(x) if sees_all else x for x in (k, v))
        mask_TT = seen_T <= own_T[:, None]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, mask_TT, enable_gqa=True).transpose(1, 2)

    return compute


@local_compute
def own_rows(mesh: Any, tp_mesh: Any, cp_mesh: Any, ep_mesh: Any) -> Any:
    """A rank's part of the features, by its rows of a matrix that it has all of."""
    return lambda module, input: F.linear(input, module.weight.chunk(tp_mesh.size())[tp_mesh.get_local_rank()])
