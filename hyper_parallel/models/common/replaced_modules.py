"""What parallelism asks of modules of the user's that stand in the place of ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from hyper_parallel.models.common.attention import HeadAttention
from hyper_parallel.models.common.context_parallel.spread_attention import OwnTokensError
from hyper_parallel.models.common.moe import Experts
from hyper_parallel.protocols.model import BaseModel
from hyper_parallel.protocols.sharding import ShardingPlan, plan_of


def fit_experts(model: BaseModel, plan: ShardingPlan) -> None:
    """Gives experts that `plan` spreads over ranks what the exchange of tokens asks of them, whoever wrote them."""
    for name, module in model.named_modules():
        entry = plan_of(name, plan)
        if entry is not None and entry.spreads_experts and not hasattr(module, "run_eagerly"):
            run_experts_eagerly(module)


def run_experts_eagerly(module: Any) -> None:
    """Keeps what stacked experts compute of tokens from other ranks outside of compiled graphs, as ours do."""
    module.eager_methods = Experts.eager_methods
    module.run_eagerly = MethodType(Experts.run_eagerly, module)


def kept_heads(model: BaseModel, plan: ShardingPlan, cp: int) -> set[str]:
    """Names of the HeadAttentions that attentions of the user's have kept, and nothing injected may leave out. Where
    ranks of cp have parts of rows they must be called: only there a rank sees the tokens of others."""
    if cp == 1:
        return set()
    injected = {name: entry.compute.kind for name, entry in plan.items() if entry.compute is not None}

    def does_without(heads: str) -> bool:
        attention = heads.rpartition(".")[0]
        return any(
            heads.startswith(f"{name}.") or (kind == "inner_wrapper" and name.startswith(f"{attention}."))
            for name, kind in injected.items()
        )

    return {
        name
        for region in model.replaced_modules
        for name, module in model.get_submodule(region).named_modules(prefix=region)
        if isinstance(module, HeadAttention) and not (name in injected or does_without(name))
    }


@contextmanager
def calls_of(model: BaseModel, heads: set[str]) -> Iterator[None]:
    """
    Raises:
        OwnTokensError: what `model` has computed meanwhile has left out one of `heads`.
    """
    watched = {name: module for name, module in model.named_modules() if name in heads} if heads else {}
    for module in watched.values():
        module.was_called = False
    yield
    for name, module in watched.items():
        if not module.was_called:
            raise OwnTokensError(name, "was not called", "call it in the attention that you have written")
