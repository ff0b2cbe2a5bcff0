"""The attention that transformers' models call here: ours, causal, within documents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hyper_parallel.config.errors import ConfigError
from hyper_parallel.models.common.context_parallel.inner_wrapper import arguments_of, asked_for, attention_of, scaled
from hyper_parallel.protocols.injected_compute import inner_wrapper

NAME = "hyper_parallel"
"""Under which transformers finds it: a model's `_attn_implementation`."""

_BY_POSITION = 5
"""Arguments of `attended` behind `heads` that are given by position."""
_BY_NAME = frozenset({"documents", "scaling", "dropout"})


def register() -> None:
    """Makes the attention known to transformers, with no mask: which tokens see which is told by `documents`."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, _no_mask)


def attention(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """`attended` by the HeadAttention that a layer's attention has as `heads`."""
    return attended(module.heads, module, *args, **kwargs)


def attended(
    heads: Callable[..., torch.Tensor],
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    documents: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention of each document on itself, as transformers calls it.

    Args:
        heads: called as HeadAttention is.
        module: the layer's attention.
        query: [B, H, T, D].
        key, value: [B, K, T, D], with K dividing H.
        attention_mask: None, as `register` has it.
        documents: `Rows.documents` of the batch.
        scaling: of the scores; None: 1 / sqrt(D).

    Returns:
        [B, T, H, D], and no weights.

    Raises:
        ValueError: the model asks for what this attention does not do.
    """
    if asked := asked_for(others | {"dropout": dropout, "attention_mask": attention_mask}):
        raise ValueError(
            f"{type(module).__name__} asks its attention for {', '.join(asked)}, which is not implemented here: "
            "choose another model"
        )
    return heads(*(x.transpose(1, 2) for x in (scaled(query, scaling), key, value)), None, documents), None


@inner_wrapper
def sdpa_hf(
    target_module: Any, mesh: Any, tp_mesh: Any, cp_mesh: Any, ep_mesh: Any
) -> Callable[..., tuple[torch.Tensor, None]]:
    """`attended` in the place of a module that is called in the same way, over the tokens of all ranks of cp.

    Args:
        target_module: its forward takes module, query, key, value and attention_mask first, under any names.

    Raises:
        ConfigError: its forward takes others, or no `documents`.
    """
    names = arguments_of(target_module)
    if len(names) < _BY_POSITION or not _BY_NAME.isdisjoint(names[:_BY_POSITION]):
        fact = (
            f"forward of {type(target_module).__name__} takes {', '.join(names)}, and sdpa_hf stands for one that is "
        )
        fact += "called with module, query, key, value, attention_mask"
        raise ConfigError.one("plan_overrides", fact, "name another inner_target, or write sdpa_qkv")
    attend = attention_of(target_module, cp_mesh)

    def compute(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        by_name = dict(zip(names[_BY_POSITION:], args[_BY_POSITION:], strict=True))
        return attended(attend, *args[:_BY_POSITION], **by_name, **kwargs)

    return compute


def _no_mask(*args: Any, **kwargs: Any) -> None:
    return None
