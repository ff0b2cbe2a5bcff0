"""Boundaries that a run writes itself, on two ranks of axis tp."""

from __future__ import annotations

from pathlib import Path

import pytest

from hyper_parallel.protocols.plan_override import PlanOverride
from hyper_parallel.protocols.sharding import PlacementMismatchError
from hyper_parallel.trainer.config import TrainerConfig
from tests.distributed_world import run_world
from tests.trainer.runs import metrics, tiny_config, train, with_parallelism
from tests.trainer.test_tensor_parallel import worst


def overridden(folder: Path, mode: str, *overrides: PlanOverride) -> TrainerConfig:
    config = with_parallelism(tiny_config(folder, steps=3), tp=2, mode=mode)
    config.plan_overrides = overrides
    return config


def run_cases(root: str) -> str:
    same = PlanOverride(match="layers.1.mlp.up_proj", params={"weight": "shard(0)"}, out_src=("shard(2)",))
    train(overridden(Path(root) / "production", "production", same))
    train(overridden(Path(root) / "validate", "validate", same))
    wrong = PlanOverride(match="layers.*.self_attn.o_proj", out_src=("replicate",))
    with pytest.raises(PlacementMismatchError) as caught:
        train(overridden(Path(root) / "wrong", "validate", wrong))
    return str(caught.value)


def test_validate_compares_what_an_override_declares(tmp_path: Path) -> None:
    alone = train(tiny_config(tmp_path / "alone", steps=3))
    told = run_world(2, run_cases, str(tmp_path), timeout=100)
    for mode in ("production", "validate"):
        differences = worst(alone, metrics(tmp_path / mode))
        assert max(differences.values()) <= 1e-9, differences
    assert "plan of module 'layers.0.self_attn.o_proj': output 0 is declared Replicate()" in told[0]
    assert "but it is Partial(sum)" in told[0]
