"""Plain torch modules of a user's in our own decoders: one loss curve, whatever is spread over ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hyper_parallel.config.sections import ParallelismConfig, TrainingConfig
from hyper_parallel.config.target import Target
from hyper_parallel.distributed.construction import construct_on_meta
from hyper_parallel.models import qwen3_moe
from hyper_parallel.models.common.attention import Attention
from hyper_parallel.models.common.context_parallel.plan import with_context_parallel
from hyper_parallel.models.common.context_parallel.spread_attention import OwnTokensError
from hyper_parallel.models.common.moe import Experts
from hyper_parallel.models.qwen3_moe.model import Qwen3MoeModel
from hyper_parallel.protocols.module_replacement import module_replacement
from hyper_parallel.protocols.plan_override import PlanOverride
from tests.distributed_world import run_world
from tests.trainer.runs import TINY, metrics
from tests.trainer.test_tensor_parallel import TOLERANCE, TP, VALIDATE, Case, train, worst

STEPS = 4


class PlainExperts(nn.Module):
    """Times `factor`."""

    def __init__(self, old: Any, factor: float) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj, self.factor = old.gate_up_proj, old.down_proj, factor

    def forward(self, x_BTC: Any, weights_BTK: Any, experts_BTK: Any, rows_E: Any) -> torch.Tensor:
        this: Any = self
        return self.factor * Experts.forward(this, x_BTC, weights_BTK, experts_BTK, rows_E)


class PlainAttention(nn.Module):
    """One that attends, or not."""

    def __init__(self, old: nn.Module, attends: bool) -> None:
        super().__init__()
        self.head_dim, self.attends = old.head_dim, attends
        for name, module in old.named_children():
            self.add_module(name, module)

    def forward(self, x_BTC: Any, rope: Any, documents: Any) -> torch.Tensor:
        this: Any = self
        return Attention.forward(this, x_BTC, rope, documents) if self.attends else this.o_proj(this.q_proj(x_BTC))


@module_replacement
def plain_experts(module: Any, module_fqn: str, context: Any, factor: float = 1.0) -> nn.Module:
    return PlainExperts(module, factor)


@module_replacement
def plain_attention(module: Any, module_fqn: str, context: Any, attends: bool = True) -> nn.Module:
    return PlainAttention(module, attends)


def rules(factor: float = 1.0, attends: bool = True) -> tuple[PlanOverride, ...]:
    return tuple(
        PlanOverride(match=match, module_type=f"{kind.__module__}.{kind.__name__}", replace_module=made)
        for match, kind, made in (
            ("layers.*.mlp.experts", Experts, Target.of(plain_experts, factor=factor)),
            ("layers.*.self_attn", Attention, Target.of(plain_attention, attends=attends)),
        )
    )


CASES = {
    "tp": (Case(TP), rules()),
    "tp, validate": (Case(TP | VALIDATE), rules()),
    "cp": (Case({"cp": 2, "dp_shard": 1}), rules()),
    "ep, compile": (Case({"dp_shard": 2, "ep": 2}, 4, compile=True), rules()),
    "ep, wrong": (Case({"dp_shard": 2, "ep": 2}, 4), rules(factor=1 + 1e-4)),
}


def run_cases(folder: str) -> None:
    for name, (case, overrides) in CASES.items():
        config = case.config(Path(folder) / name, STEPS)
        config.plan_overrides = overrides
        train(config)


@pytest.fixture(scope="module")
def differences(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    """Of each case from one process without replacements."""
    folder = tmp_path_factory.mktemp("replaced")
    run_world(2, run_cases, str(folder), timeout=300)
    train(Case().config(folder / "one", STEPS))
    return {name: worst(metrics(folder / "one"), metrics(folder / name)) for name in CASES}


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", CASES)
def test_follows_the_model_as_it_was(differences: Any, name: str) -> None:
    assert differences[name].keys() == {"loss", "grad_norm", "aux_loss"}
    is_equal = max(differences[name].values()) <= TOLERANCE
    assert is_equal == ("wrong" not in name), differences[name]


def test_an_attention_that_does_not_call_its_heads() -> None:
    def forward(attends: bool, cp: int) -> Any:
        config = qwen3_moe.create_model_spec("debug", **TINY).model
        assert isinstance(config, Qwen3MoeModel.Config)
        parallelism = ParallelismConfig(cp=cp)
        config.set_sharding_config(parallelism)
        config.sharding = with_context_parallel(config.sharding, parallelism)
        model = construct_on_meta(config, torch.float32)
        model.apply_overrides(rules(attends=attends), parallelism, TrainingConfig())
        model.to_empty(device="cpu").init_weights(seed=1)
        return model(torch.arange(8)[None], cu_seqlens=[0, 3, 8]).logits

    assert forward(attends=True, cp=2) is not None and forward(attends=False, cp=1) is not None
    with pytest.raises(OwnTokensError, match=r"layers.0.self_attn.heads was not called, so each rank of cp sees its o"):
        forward(attends=False, cp=2)
