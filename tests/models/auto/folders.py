"""Folders of tiny models that transformers wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
FAMILIES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "qwen3": (transformers.Qwen3Config, _SIZES),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        {
            **_SIZES,
            "num_hidden_layers": 3,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
            "router_aux_loss_coef": 0.01,
            "output_router_logits": True,
        },
    ),
    "llama": (transformers.LlamaConfig, {**_SIZES, "tie_word_embeddings": True, "attention_bias": True}),
    "gpt2": (
        transformers.GPT2Config,
        {
            "n_positions": 64,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "attn_pdrop": 0.0,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "bos_token_id": None,
            "eos_token_id": None,
        },
    ),
}
"""Config class and sizes of each family; llama and gpt2 use the embedding as the output matrix."""


def tiny_model(family: str, *, vocab_size: int = 64, **changes: Any) -> nn.Module:
    """transformers' own model in float64, with weights large enough that every path matters."""
    config_class, sizes = FAMILIES[family]
    config = config_class(vocab_size=vocab_size, **{**sizes, **changes})
    config._experts_implementation = "eager"  # its grouped product refuses float64
    model = transformers.AutoModelForCausalLM.from_config(config).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model.train()


def save(model: nn.Module, folder: Path) -> str:
    """Writes `model` as transformers does."""
    model.save_pretrained(folder)
    return str(folder)


def balance(logits: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """transformers' auxiliary loss of a row in float64, which its own function rounds to float32."""
    tokens, probability = 0, 0
    for logits_NE in logits:
        probability_NE = logits_NE.softmax(-1)
        chosen_NK = probability_NE.topk(2).indices
        tokens = tokens + F.one_hot(chosen_NK, 4).sum((0, 1)).double()
        probability = probability + probability_NE.sum(0)
    seen = sum(len(each) for each in logits)
    return 0.01 * 4 * ((tokens / seen) * (probability / seen)).sum()
