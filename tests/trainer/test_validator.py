"""Validation: the number, and that training does not notice it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hyper_parallel.components.data import TextDataLoader
from hyper_parallel.components.validator import Validator
from hyper_parallel.config.errors import RunError
from hyper_parallel.config.target import Target
from hyper_parallel.trainer.config import TrainerConfig
from tests.distributed_world import run_world
from tests.trainer.runs import deterministic, metrics, small_corpus, tiny_config, train, with_parallelism


def validated_config(folder: str | Path, *, interval_steps: int = 2, steps: int = 3, **training: Any) -> TrainerConfig:
    config = tiny_config(folder, steps=5, **training)
    held_out = TextDataLoader.Config(path=small_corpus(), shuffle=False)
    config.validator = Validator.Config(enable=True, interval_steps=interval_steps, steps=steps, dataloader=held_out)
    return config


def test_equals_cross_entropy_over_the_same_rows(dump_folder: str) -> None:
    with validated_config(dump_folder).build() as trainer:
        (model,) = trainer.model_parts
        loader = TextDataLoader.Config(path=small_corpus(), shuffle=False).build(
            tokenizer=trainer.tokenizer,
            seq_len=32,
            micro_batch_size=8,
            global_batch_size=8,
            dp_rank=0,
            dp_size=1,
            seed=1,
        )
        total, tokens = 0.0, 0
        for _ in range(3):
            (batch,) = next(loader)
            with torch.no_grad():
                logits = model(batch["input_ids"], cu_seqlens=batch["cu_seqlens"]).logits
            total += float(F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum"))
            tokens += int((batch["labels"] != -100).sum())
        loader.close()
        assert trainer.validator.validate() == pytest.approx(total / tokens, abs=1e-12)
        assert trainer.validator.validate() == pytest.approx(total / tokens, abs=1e-12)  # the same rows every time


def test_leaves_train_mode_random_state_and_data_position(dump_folder: str) -> None:
    with validated_config(dump_folder).build() as trainer:
        (model,) = trainer.model_parts
        next(trainer.dataloader)
        model.layers[0].eval()  # a part that somebody froze stays as it is
        before = {name: module.training for name, module in model.named_modules()}
        rng_state, position = torch.get_rng_state(), trainer.dataloader.state_dict()
        trainer.validator.validate()
        assert {name: module.training for name, module in model.named_modules()} == before
        assert torch.equal(torch.get_rng_state(), rng_state)
        assert trainer.dataloader.state_dict() == position
        assert all(p.grad is None for p in model.parameters())


class SmoothedInTraining(nn.Module):
    """Twice the loss where it is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Dropout().eval()

    def forward(self, *, model_output: Any, labels: torch.Tensor) -> torch.Tensor:
        del labels
        return model_output.loss * (2 if self.training else 1)


def test_a_loss_that_is_a_module_is_measured_in_eval_mode(dump_folder: str) -> None:
    with validated_config(dump_folder).build() as trainer:
        expected = trainer.validator.validate()
    config = validated_config(dump_folder)
    config.loss = Target.of(SmoothedInTraining)
    with config.build() as trainer:
        assert trainer.validator.validate() == pytest.approx(expected, abs=1e-12)
        assert trainer.loss.module.training and not trainer.loss.module.frozen.training


def test_training_is_bitwise_the_same_with_and_without(tmp_path: Path) -> None:
    with_validation = train(validated_config(tmp_path / "with"))
    without = train(tiny_config(tmp_path / "without", steps=5))
    assert deterministic(with_validation) == deterministic(without)
    assert [line["step"] for line in with_validation if "validation_loss" in line] == [2, 4, 5]


def validate_on_rank(folder: str) -> None:
    with with_parallelism(validated_config(folder), dp_shard=2).build() as trainer:
        trainer.train()


def test_two_ranks_measure_what_one_does(tmp_path: Path) -> None:
    run_world(2, validate_on_rank, str(tmp_path / "two"))
    one = train(validated_config(tmp_path / "one"))
    two = metrics(tmp_path / "two")
    assert [line["step"] for line in two if "validation_loss" in line] == [2, 4, 5]
    for a, b in zip(one, two, strict=True):
        for key in ("loss", "grad_norm", *(["validation_loss"] if "validation_loss" in a else [])):
            assert b[key] == pytest.approx(a[key], abs=1e-9)


def test_training_data_is_not_taken_for_held_out_data(dump_folder: str) -> None:
    config = validated_config(dump_folder)
    config.validator.dataloader = TextDataLoader.Config(split="validation")  # type: ignore[attr-defined]
    (fault,) = config.cross_faults(1)
    assert fault.path == "validator.dataloader.path" and small_corpus() in fault.fact
    config.dataloader = TextDataLoader.Config(split="validation")
    (fault,) = config.cross_faults(1)
    assert str(fault) == (
        "validator.dataloader.split: validation is also what dataloader.split trains on; "
        "set one of them to the other split"
    )


def test_what_is_not_enabled_cannot_be_asked_for(dump_folder: str) -> None:
    with (
        tiny_config(dump_folder, steps=1).build() as trainer,
        pytest.raises(RunError, match=r"^validator\.enable is False, so there is no held-out data to measure; set it"),
    ):
        trainer.evaluate()
