"""The attention of a run in the place of what a module of the user's computes on each head."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch

from hyper_parallel.config.errors import ConfigError, RunError
from hyper_parallel.models.common.attention import HeadAttention
from hyper_parallel.models.common.context_parallel.boundaries import spread_head_attention
from hyper_parallel.models.common.context_parallel.spread_attention import OwnTokensError, SpreadAttention
from hyper_parallel.protocols.injected_compute import inner_wrapper, named_arguments
from hyper_parallel.protocols.override_factories import takes_any

_TAKEN = frozenset({"rope", "documents", "scale", "scaling"})
_WITHOUT_EFFECT = frozenset({"position_ids", "use_cache", "output_router_logits"})
"""What models of transformers hand on to every attention, and no causal attention without a cache needs."""
_NOTHING = {"dropout": 0.0, "dropout_p": 0.0, "is_causal": True, "enable_gqa": True}
"""Values that ask for no more than causal attention does."""


@inner_wrapper
def sdpa_qkv(target_module: Any, mesh: Any, tp_mesh: Any, cp_mesh: Any, ep_mesh: Any) -> Callable[..., torch.Tensor]:
    """Causal attention within documents, over the tokens of all ranks of cp by the run's cp_method.

    Args:
        target_module: called with rotated queries [B, T, H, D], rotated keys and values [B, T, K, D], and a `documents`
            as the models here hand to every attention; gives [B, T, H, D]. It may take a `rope`, and a `scale` or
            `scaling` of the scores.

    Raises:
        ConfigError: its forward takes no `documents`.
    """
    names = arguments_of(target_module)
    attend = attention_of(target_module, cp_mesh)

    def compute(*args: Any, **kwargs: Any) -> torch.Tensor:
        given = dict(zip(names, args, strict=False)) | kwargs
        if "documents" not in given:
            raise TypeError(f"{type(target_module).__name__} is called without documents, which say what sees what")
        others = {name: x for name, x in given.items() if name not in (*names[:3], *_TAKEN)}
        if asked := asked_for(others):
            raise RunError(
                f"{type(target_module).__name__} is called with {', '.join(asked)}, which sdpa_qkv does not do; leave "
                "it out, or write an inner_wrapper of your own"
            )
        scale = given.get("scale") if given.get("scaling") is None else given["scaling"]
        return attend(scaled(args[0], scale), *args[1:3], given.get("rope"), given["documents"])

    return compute


def asked_for(arguments: Mapping[str, Any]) -> list[str]:
    """Names of those `arguments` of an attention that ask for more than causal attention within documents."""
    return [
        name
        for name, x in arguments.items()
        if x is not None and name not in _WITHOUT_EFFECT and not (name in _NOTHING and x == _NOTHING[name])
    ]


def scaled(query: torch.Tensor, scale: float | None) -> torch.Tensor:
    """`query` [..., D] for scores that are to be multiplied by `scale`, and are by 1 / sqrt(D), which is also None."""
    size = query.shape[-1]
    return query if scale is None or scale == size**-0.5 else query * (scale * size**0.5)


def arguments_of(target_module: Any) -> list[str]:
    """Those of its forward.

    Raises:
        ConfigError: `documents` is not among them.
    """
    signature = inspect.signature(target_module.forward)
    if "documents" not in signature.parameters and not takes_any(signature):
        fact = f"forward of {type(target_module).__name__} takes no documents, which say what sees what"
        remedy = "take documents, and hand on what the model gives its attention"
        raise ConfigError.one("plan_overrides", fact, remedy)
    return list(named_arguments(signature))


def attention_of(target_module: Any, cp_mesh: Any) -> Callable[..., torch.Tensor]:
    """A HeadAttention in its place: ``(q_BTHD, k_BTKD, v_BTKD, rope, documents)`` -> [B, T, H, D].

    What it returns raises OwnTokensError where ranks of `cp_mesh` have parts of rows, and `documents` does not say so.
    """
    target_module.eager_methods = HeadAttention.eager_methods
    target_module.attend_eagerly = MethodType(HeadAttention.attend_eagerly, target_module)

    def attend(q_BTHD: torch.Tensor, k_BTKD: torch.Tensor, v_BTKD: torch.Tensor, rope: Any, documents: Any) -> Any:
        if isinstance(documents, SpreadAttention):
            return spread_head_attention(target_module, documents.group, q_BTHD, k_BTKD, v_BTKD, rope, documents)
        if cp_mesh is not None:
            fact, remedy = f"is called with documents {documents!r}", "hand on those that the model gives its attention"
            raise OwnTokensError(type(target_module).__name__, fact, remedy)
        return HeadAttention.forward(target_module, q_BTHD, k_BTKD, v_BTKD, rope, documents)

    return attend
