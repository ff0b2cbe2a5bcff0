"""One loss curve: in float64 every split of the same global batch follows the single process.

The rows hold documents of unequal length, so micro-batches and ranks have different numbers of valid labels; a wrong
denominator shows in the first step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hyper_parallel.trainer import HyperTrainer
from tests.distributed_world import run_world
from tests.trainer.runs import metrics, tiny_config, with_parallelism

STEPS = 8
TOLERANCE = 1e-9
Case = tuple[dict[str, Any], dict[str, Any]]
"""Fields of training, and degrees of parallelism."""

CASES: dict[int, dict[str, Case]] = {
    1: {
        "accumulate 1": ({"micro_batch_size": 8}, {}),
        "accumulate 2": ({"micro_batch_size": 4}, {}),
        "accumulate 4": ({"micro_batch_size": 2}, {}),
    },
    2: {
        "shard 2": ({"micro_batch_size": 4}, {"dp_shard": 2}),
        "shard 2, accumulate 2": ({"micro_batch_size": 2}, {"dp_shard": 2}),
        "replicate 2": ({"micro_batch_size": 4}, {"dp_replicate": 2}),
        "replicate 2, accumulate 4": ({"micro_batch_size": 1}, {"dp_replicate": 2}),
        "shard 2, never resharded": ({"micro_batch_size": 2}, {"dp_shard": 2, "reshard_after_forward": False}),
        "shard 2, offloaded": ({"micro_batch_size": 2}, {"dp_shard": 2, "cpu_offload": True}),
    },
    4: {
        "shard 4": ({"micro_batch_size": 2}, {"dp_shard": 4}),
        "replicate 2 x shard 2": ({"micro_batch_size": 2}, {"dp_replicate": 2, "dp_shard": 2}),
        "replicate 2 x shard 2, accumulate 2": ({"micro_batch_size": 1}, {"dp_replicate": 2, "dp_shard": 2}),
    },
}


def run_cases(folder: str, world_size: int, steps: int, extra: dict[str, Any]) -> None:
    """On each rank: trains every case of `world_size`; rank 0 leaves the metrics under `folder`."""
    for name, (training, degrees) in CASES[world_size].items():
        train_on_rank(Path(folder) / name, steps, training | extra, degrees)


def train_on_rank(dump_folder: Path, steps: int, training: dict[str, Any], degrees: dict[str, Any]) -> None:
    config = with_parallelism(tiny_config(dump_folder, steps=steps, **training), **degrees)
    assert not list(config.cross_faults(dist.get_world_size() if dist.is_initialized() else 1))
    with config.build() as trainer:
        trainer.train()


@pytest.fixture(scope="module")
def curves(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """metrics.jsonl by case, each world started once."""
    folder = tmp_path_factory.mktemp("parity")
    run_cases(str(folder), 1, STEPS, {})
    for world_size in (2, 4):
        run_world(world_size, run_cases, str(folder), world_size, STEPS, {}, timeout=280)
    return {name: metrics(folder / name) for cases in CASES.values() for name in cases}


@pytest.mark.parametrize("name", [name for cases in CASES.values() for name in cases])
def test_follows_the_single_process(curves: dict[str, list[dict[str, Any]]], name: str) -> None:
    single, other = curves["accumulate 1"], curves[name]
    assert [line["step"] for line in other] == list(range(1, STEPS + 1))
    for key in ("loss", "grad_norm", "aux_loss"):
        worst = max(abs(a[key] - b[key]) for a, b in zip(single, other, strict=True))
        assert worst <= TOLERANCE, f"{key} differs by {worst}"
    assert [line["tokens"] for line in other] == [256] * STEPS
    assert single[-1]["loss"] < single[0]["loss"] - 0.03  # the curves fall: they are not equal because nothing moves


def micro_batches_of(trainer: HyperTrainer) -> list[dict[str, Any]]:
    return next(trainer.dataloader)


def test_micro_batches_have_unequal_numbers_of_labels(dump_folder: str) -> None:
    """Without this the test above could not tell a mean of means from the mean."""
    with tiny_config(dump_folder, steps=1).build() as trainer:
        counts = {int((m["labels"] != -100).sum()) for m in micro_batches_of(trainer)}
    assert len(counts) > 1


@pytest.mark.parametrize("aggregation", ["token_weighted", "rank_average"])
def test_aggregation(dump_folder: str, aggregation: str) -> None:
    """The loss of a step against sums and counts of its micro-batches, one of them fully masked."""
    with tiny_config(dump_folder, steps=1, loss_aggregation=aggregation).build() as trainer:
        micro_batches = micro_batches_of(trainer)
        micro_batches[1]["labels"].fill_(-100)
        (model,) = trainer.model_parts
        with torch.no_grad():
            sums = [float(model(**trainer.get_batch(m), loss_fn=trainer.loss).loss_sum) for m in micro_batches]
        counts = [int((m["labels"] != -100).sum()) for m in micro_batches]
        loss = trainer.train_step(iter([micro_batches])).loss
    assert counts[1] == 0 and sums[1] == 0.0
    if aggregation == "token_weighted":
        assert loss == pytest.approx(sum(sums) / sum(counts), abs=1e-12)
    else:
        assert loss == pytest.approx(sum(s / n for s, n in zip(sums, counts, strict=True) if n) / 3, abs=1e-12)
