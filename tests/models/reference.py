"""transformers' own models as a reference in true float64.

transformers rounds norms and router probabilities to float32 whatever the model's dtype, which hides anything smaller
than 1e-7. `widened` makes the same code compute them in float64; angles of the rotary positions stay float32, as in
both implementations.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import nn

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
MOE_SIZES: dict[str, Any] = {
    **SIZES,
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.01,
    "output_router_logits": True,
}


def transformers_model(family: str, dtype: torch.dtype, **changes: Any) -> nn.Module:
    """A small causal LM of transformers with weights large enough that every path matters."""
    import transformers

    config_class = {"qwen3": transformers.Qwen3Config, "qwen3_moe": transformers.Qwen3MoeConfig}[family]
    sizes = {**(MOE_SIZES if family == "qwen3_moe" else SIZES), **changes}
    config = config_class(**sizes)
    # float64 is refused by its grouped product; its loop over experts takes any dtype.
    config._experts_implementation = "eager"
    config._attn_implementation = "sdpa"
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            parameter.copy_(1 + 0.2 * noise if parameter.dim() == 1 else 0.3 * noise)
    return model.eval()


@contextlib.contextmanager
def widened(model: nn.Module) -> Iterator[None]:
    """Within it, `float32` in the modelling code of `model` means float64, but for the rotary angles."""
    modelling = importlib.import_module(type(model.model).__module__)
    rotary_forward = model.model.rotary_emb.forward

    def narrow(*args: Any, **kwargs: Any) -> Any:
        modelling.torch = torch
        try:
            return rotary_forward(*args, **kwargs)
        finally:
            modelling.torch = _WIDE

    modelling.torch = _WIDE
    model.model.rotary_emb.forward = narrow
    try:
        yield
    finally:
        modelling.torch = torch
        del model.model.rotary_emb.forward


class _WideTorch(ModuleType):
    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


_WIDE = _WideTorch("torch")
