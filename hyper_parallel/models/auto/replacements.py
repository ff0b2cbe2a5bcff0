"""Our modules in the places of some of transformers', under the same names and with the same numbers."""

from __future__ import annotations

import torch
from torch import nn

from hyper_parallel.models.auto.conv1d import Conv1D
from hyper_parallel.models.auto.experts import StackedExperts
from hyper_parallel.models.auto.layout import is_attention, is_conv1d, is_stacked_experts
from hyper_parallel.models.common.attention import HeadAttention


def replace_modules(model: nn.Module) -> None:
    """Of `model`, a PreTrainedModel on meta that is understood: experts and Conv1Ds become ours, and every attention
    gets `heads`, which its `hyper_parallel` implementation calls."""
    for name, module in list(model.named_modules()):
        if is_conv1d(module):
            # One whose output its attention takes apart is as many maps as it makes pieces.
            attention = model.get_submodule(name.rpartition(".")[0])
            whole = module.weight.shape[1]
            maps = whole // attention.split_size if name.endswith(".c_attn") else 1
            model.set_submodule(name, Conv1D.Config(maps=maps).build(theirs=module))
        elif is_stacked_experts(module):
            experts, hidden, inner = module.down_proj.shape
            config = StackedExperts.Config(hidden_size=hidden, intermediate_size=inner, num_experts=experts)
            with torch.device("meta"):
                model.set_submodule(name, config.build().to(module.down_proj.dtype))
        elif is_attention(module):
            module.heads = HeadAttention.Config().build()
