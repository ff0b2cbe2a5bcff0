"""Phases that no other test reaches."""

from __future__ import annotations

import pytest

from hyper_parallel.config.errors import ConfigError
from hyper_parallel.platform import use_platform
from hyper_parallel.platform.cpu import CpuPlatform
from hyper_parallel.trainer import phases
from tests.trainer.runs import tiny_config


class Limited(CpuPlatform):
    """A device with float32 alone."""

    supports_float64 = False
    name = "limited"

    def bf16_supported(self) -> bool:
        return False


def test_types_that_the_device_does_not_compute_in_are_refused_together() -> None:
    config = tiny_config("unused", steps=1, dtype="float64", mixed_precision_param="bfloat16")
    with use_platform(Limited()), pytest.raises(ConfigError) as error:
        phases.set_up_process(config)
    assert str(error.value).splitlines() == [
        "training.dtype: limited has no float64; choose another type",
        "training.mixed_precision_param: limited has no bfloat16; choose another type",
    ]


def test_each_phase_draws_from_a_generator_of_its_own(dump_folder: str) -> None:
    """Building a part twice, or in another order, changes no number of the others."""
    first = tiny_config(dump_folder, steps=1)
    with first.build() as trainer:
        weights = {name: p.detach().clone() for name, p in trainer.model_parts[0].named_parameters()}
        rows = next(trainer.dataloader)[0]["input_ids"]
        model = phases.construct_model(first, phases.prepare_model_config(first))
        phases.materialize(first, phases.parallelize(first, model, trainer.parallel_dims))
        again = phases.build_dataloader(first, trainer.parallel_dims, trainer.tokenizer)
        assert all((p == weights[name]).all() for name, p in model.named_parameters())
        assert (next(again)[0]["input_ids"] == rows).all()
        again.close()
