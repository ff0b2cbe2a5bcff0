"""Models that a user's function makes: it must be told of the ranks, hand that on, and embed every token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hyper_parallel.config.errors import ConfigError
from hyper_parallel.config.sections import CommConfig
from hyper_parallel.config.target import Target
from hyper_parallel.distributed.process_group import leave_fake
from hyper_parallel.protocols.model_spec import ModelSpec
from hyper_parallel.protocols.plan_override import PlanOverride
from hyper_parallel.trainer.config import TrainerConfig
from hyper_parallel.trainer.text_trainer import TextTrainer
from tests.trainer import text_parts
from tests.trainer.runs import tiny_config

ALONE = "but tests.trainer.text_parts.a_model_alone, which makes the model, takes no distributed_setup; let it take "
ALONE += "distributed_setup, and hand that on to HyperAutoModelForCausalLM"


def own_config(dump_folder: Path, make: Any, *, vocab_size: int = 4096, **training: Any) -> TrainerConfig:
    spec = ModelSpec.of_target(Target.of(make, vocab_size=vocab_size))
    return tiny_config(dump_folder, steps=1, model_spec=spec, **training)


def faults(config: TrainerConfig, world_size: int) -> list[str]:
    return [str(fault) for fault in config.cross_faults(world_size)]


def test_a_function_that_is_told_of_no_ranks_makes_a_model_for_one(tmp_path: Path) -> None:
    config = own_config(tmp_path, text_parts.a_model_alone)
    assert faults(config, 1) == []
    assert faults(config, 2) == [f"model_spec: 2 ranks share the work, {ALONE}, or start one process"]
    config.plan_overrides = (PlanOverride(match="no.such.module", params={}),)
    assert faults(config, 1) == [f"plan_overrides: given, {ALONE}, or leave them out"]
    mixed = own_config(tmp_path, text_parts.a_model_alone, mixed_precision_param="float32")
    assert faults(mixed, 1) == [f"model_spec: mixed precision or parallelism.cpu_offload is asked for, {ALONE}"]
    told = own_config(tmp_path, text_parts.a_model_of_its_own, mixed_precision_param="float32")
    assert faults(told, 2) == []


def test_a_model_whose_gradients_nobody_would_sum_is_refused(tmp_path: Path) -> None:
    config = own_config(tmp_path, text_parts.a_model_of_its_own)
    config.comm, config.parallelism.dp_shard = CommConfig(mode="fake"), 2
    try:
        with pytest.raises(ConfigError) as caught:
            config.build()
    finally:
        leave_fake()
    assert str(caught.value) == (
        "model_spec: tests.trainer.text_parts.a_model_of_its_own made a model in which FSDP does not hold "
        "model.embed_tokens.weight, nor 27 others of its parameters; hand its distributed_setup and training on to "
        "HyperAutoModelForCausalLM"
    )


@pytest.mark.parametrize("trainer", [TrainerConfig.build, TextTrainer])
def test_more_token_ids_than_a_model_embeds_that_is_known_when_it_stands(tmp_path: Path, trainer: Any) -> None:
    config = own_config(tmp_path, text_parts.a_model_alone, vocab_size=100)
    if trainer is TextTrainer:
        config.dataset = Target.of(text_parts.CountingDataset, rows=8)
        config.collate_fn = Target.of(text_parts.LastTokenCollator)
        config.dataloader = Target.of(text_parts.as_it_is)
    with pytest.raises(
        ConfigError, match=r"^tokenizer: it has 4096 entries, but the model's vocab_size is 100; choose"
    ):
        trainer(config)
