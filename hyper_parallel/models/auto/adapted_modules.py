"""What is changed in the modules of transformers: those that hold several matrices side by side, and the attention."""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import nn

from hyper_parallel.models.auto.conv1d import conv1d
from hyper_parallel.models.auto.layout import is_attention, is_conv1d, is_stacked_experts
from hyper_parallel.models.common.attention import HeadAttention
from hyper_parallel.models.common.replaced_modules import run_experts_eagerly


def adapt_modules(model: nn.Module) -> None:
    """Changes `model`, a PreTrainedModel on meta that is understood, in place.

    Matrices side by side get a dim of their own, so that each can be split over ranks: the numbers stay in their order.
    Every attention gets `heads`, which its `hyper_parallel` implementation calls.
    """
    for name, module in list(model.named_modules()):
        if is_conv1d(module):
            module.forward = MethodType(conv1d, module)  # type: ignore[method-assign] # of this module alone
            if name.endswith(".c_attn"):  # as many as its attention makes of the output
                attention: Any = model.get_submodule(name.rpartition(".")[0])
                for vector_or_matrix in ("weight", "bias"):
                    _unflatten(module, vector_or_matrix, -1, (-1, attention.split_size))
        elif is_stacked_experts(module):
            _unflatten(module, "gate_up_proj", 1, (2, -1))
            run_experts_eagerly(module)
        elif is_attention(module):
            module.heads = HeadAttention.Config().build()


def _unflatten(module: nn.Module, name: str, dim: int, sizes: tuple[int, int]) -> None:
    whole = module.get_parameter(name)
    module.register_parameter(name, nn.Parameter(whole.detach().unflatten(dim, sizes)))
