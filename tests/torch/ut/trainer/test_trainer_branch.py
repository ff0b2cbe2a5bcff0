"""The same model/data/train file through LLMTrainer, and converted and given to HyperTrainer: one and the same run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hyper_parallel.trainer import HyperTrainer, HyperTrainerConfig, LLMTrainer, parse_args
from hyper_parallel.trainer.legacy import _legacy_to_trainer_config
from tests.trainer.runs import DETERMINISTIC_KEYS, deterministic, metrics

FOLDER = Path(__file__).parents[4] / "recipes" / "yaml" / "legacy"
STEPS = 20


@pytest.fixture(params=sorted(file.name for file in FOLDER.glob("*.yaml")))
def trainers(request, tmp_path, monkeypatch) -> tuple[LLMTrainer, HyperTrainer]:
    """(LLMTrainer, HyperTrainer), built and not yet trained."""

    def build(make: Callable[[HyperTrainerConfig], Any], name: str) -> Any:
        flags = {
            "max_steps": STEPS,
            "checkpoint.save_steps": 0,
            "eval.eval_steps": 0,
            "checkpoint.output_dir": tmp_path / name,
        }
        words = [f"--train.{name}={value}" for name, value in flags.items()]
        monkeypatch.setattr(sys, "argv", ["script.py", str(FOLDER / request.param), *words])
        return make(parse_args(HyperTrainerConfig))

    def build_hyper_trainer(args: HyperTrainerConfig) -> HyperTrainer:
        return HyperTrainer(_legacy_to_trainer_config(args))

    return build(LLMTrainer, "llm"), build(build_hyper_trainer, "hyper")


def test_the_parts_are_the_same(trainers):
    shapes, groups, schedules, weights = [], [], [], []
    for trainer in trainers:
        [model], [optimizer] = trainer.model_parts, trainer.optimizers.optimizers
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        shapes.append({name: (tuple(p.shape), p.dtype) for name, p in model.named_parameters()})
        groups.append(
            [{**group, "params": [names[id(p)] for p in group["params"]]} for group in optimizer.param_groups]
        )
        scheduler = trainer.lr_schedulers
        schedules.append((scheduler.config.to_dict(), scheduler.training_steps, scheduler.get_last_lr()))
        weights.append(dict(model.named_parameters()))
    assert len(shapes[0]) > 20 and shapes[0] == shapes[1]
    assert groups[0] == groups[1]
    # Norms are not decayed, everything else is.
    assert [group["weight_decay"] for group in groups[0]] == [0.01, 0.0]
    assert all("norm" in name for name in groups[0][1]["params"])
    assert not any("norm" in name for name in groups[0][0]["params"])
    assert groups[0][0]["betas"] == (0.9, 0.999)
    assert schedules[0] == schedules[1]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_twenty_steps_are_bitwise_the_same(trainers):
    llm, hyper = trainers
    llm.train()
    with hyper:
        hyper.train()
    lines = [deterministic(metrics(trainer.config.dump_folder)) for trainer in trainers]
    assert len(lines[0]) == STEPS and {"loss", "grad_norm", "aux_loss"} <= {*lines[0][0]} <= {*DETERMINISTIC_KEYS}
    assert lines[0] == lines[1]
    assert lines[0][-1]["loss"] < lines[0][0]["loss"]
    for (name, one), (_, other) in zip(
        llm.model_parts[0].named_parameters(), hyper.model_parts[0].named_parameters(), strict=True
    ):
        assert torch.equal(one, other), name
