"""Stages, layers and demands of pipelines, by arithmetic."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from torch.distributed.pipelining._utils import generate_rank_to_stage_mapping
from torch.distributed.pipelining.schedules import get_schedule_class

from hyper_parallel.config.errors import ConfigError
from hyper_parallel.config.sections import ParallelismConfig
from hyper_parallel.distributed.pipeline_plan import (
    SCHEDULES,
    layer_faults,
    layers_of_stages,
    micro_batch_faults,
    schedule_faults,
    stages_of_rank,
    stages_per_rank,
)
from hyper_parallel.distributed.topology import resolve_degrees


def test_stages_lie_where_torch_expects_them() -> None:
    for name, schedule in SCHEDULES.items():
        parallelism = ParallelismConfig(pp=4, pp_schedule=name)  # type: ignore[arg-type]
        style = "v" if schedule.v_shaped else "loop"
        expected = generate_rank_to_stage_mapping(4, 4 * stages_per_rank(parallelism), style)
        assert {rank: stages_of_rank(parallelism, rank) for rank in range(4)} == expected
        assert get_schedule_class(schedule.torch_name).__name__ == f"Schedule{schedule.torch_name}"


@pytest.mark.parametrize(
    ("pp", "layers", "choices", "counts"),
    [
        (2, 4, {}, [2, 2]),
        (2, 5, {}, [3, 2]),
        (4, 4, {}, [1, 1, 1, 1]),
        (4, 94, {}, [23, 24, 24, 23]),
        (4, 36, {"pp_embedding_layers": 0, "pp_head_layers": 3.3}, [10, 10, 10, 6]),
        (2, 8, {"pp_schedule": "interleaved_1f1b", "pp_virtual_stages": 3}, [1, 2, 2, 1, 1, 1]),
    ],
)
def test_layers_are_shared_out_evenly_with_embedding_and_head(
    pp: int, layers: int, choices: dict[str, Any], counts: list[int]
) -> None:
    parts = layers_of_stages(ParallelismConfig(pp=pp, **choices), layers)
    assert [len(part) for part in parts] == counts
    assert [layer for part in parts for layer in part] == list(range(layers))


def faults(micro_batches: int, **parallelism: Any) -> list[str]:
    """Of a run with that many micro-batches of 2 rows on 3 data-parallel ranks."""
    config = ParallelismConfig(**parallelism)
    batch = {"global_batch_size": 6 * micro_batches, "micro_batch_size": 2, "dp_size": 3}
    return [str(fault) for fault in (*schedule_faults(config), *micro_batch_faults(config, **batch))]


def test_fewer_layers_than_stages() -> None:
    parallelism = ParallelismConfig(pp=4, pp_schedule="zbv")
    assert [str(fault) for fault in layer_faults(parallelism, 7)] == [
        "parallelism.pp: pp 4 x 2 stage(s) a rank = 8 stages, but the model has 7 layers; each stage needs one: set "
        "fewer ranks or pp_virtual_stages"
    ]
    assert not list(layer_faults(parallelism, 8))


def test_fewer_micro_batches_than_stages() -> None:
    (fault,) = faults(3, pp=4)
    assert fault == (
        "parallelism.pp_schedule: 1f1b needs as many micro-batches as stages, pp 4 x 1 = 4, but "
        "training.global_batch_size 18 / (micro_batch_size 2 x data-parallel size 3) = 3 micro-batch(es); raise "
        "training.global_batch_size to 24, lower micro_batch_size, or set pp_schedule gpipe"
    )
    assert not faults(4, pp=4)
    assert faults(7, pp=4, pp_schedule="dualpipev") and not faults(8, pp=4, pp_schedule="dualpipev")
    assert not faults(1, pp=4, pp_schedule="gpipe") and not faults(1, pp=4, pp_schedule="zbv")


def test_uneven_rounds() -> None:
    (fault,) = faults(9, pp=4, pp_schedule="interleaved_1f1b")
    assert fault.startswith("parallelism.pp_schedule: interleaved_1f1b sends micro-batches in 2 equal rounds over pp 4")
    assert not faults(10, pp=4, pp_schedule="interleaved_1f1b")


@pytest.mark.parametrize(
    ("schedule", "stages", "expected"),
    [("1f1b", 2, "1 stage(s)"), ("interleaved_1f1b", 1, "2 or more stage(s)"), ("zbv", 3, "2 stage(s)")],
)
def test_wrong_number_of_stages(schedule: str, stages: int, expected: str) -> None:
    (fault,) = faults(8, pp=2, pp_schedule=schedule, pp_virtual_stages=stages)
    assert fault.startswith(f"parallelism.pp_virtual_stages: {stages}, but pp_schedule {schedule} has {expected}")


def test_parameters_must_stay_gathered_where_the_backward_is_split() -> None:
    (fault,) = faults(8, pp=2, pp_schedule="zbv", reshard_after_forward=True)
    assert fault.startswith(
        "parallelism.reshard_after_forward: True, but pp_schedule zbv computes gradients of weights"
    )
    assert not faults(8, pp=2, pp_schedule="1f1b", reshard_after_forward=True)


def test_choices_of_a_pipeline_without_one() -> None:
    config = ParallelismConfig(pp_schedule="zbv", pp_virtual_stages=2, pp_head_layers=3)
    assert [fault.path for fault in config.faults()] == ["pp_schedule", "pp_virtual_stages", "pp_head_layers"]
    config.pp = 2
    assert not list(config.faults())


@pytest.mark.parametrize(
    ("choices", "world_size", "message"),
    [
        ({"pp": 2}, 3, "parallelism.pp: dp_replicate 1 x pp 2 = 2 does not divide the world size 3"),
        (
            {"pp": 2, "dp_replicate": 3},
            8,
            "parallelism.dp_replicate: dp_replicate 3 x pp 2 = 6 does not divide the world size 8",
        ),
        (
            {"pp": 2, "dp_shard": 2},
            8,
            "parallelism.dp_shard: dp_replicate 1 x dp_shard 2 x pp 2 = 4 ranks, but the world size is 8",
        ),
    ],
)
def test_wrong_world_sizes_name_every_factor(choices: dict[str, Any], world_size: int, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve_degrees(ParallelismConfig(**choices), world_size)
    assert str(error.value).startswith(message)


def test_what_is_left_by_the_pipeline_is_sharded() -> None:
    assert resolve_degrees(ParallelismConfig(pp=2, dp_replicate=2), 16)._asdict() == {
        "dp_replicate": 2,
        "dp_shard": 4,
        "cp": 1,
        "tp": 1,
        "pp": 2,
    }


def test_arithmetic_loads_no_torch() -> None:
    code = "import sys, hyper_parallel.distributed.pipeline_plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
