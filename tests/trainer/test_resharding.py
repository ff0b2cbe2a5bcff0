"""A run that is stopped under one parallelism goes on under every other one, on the curve of an undisturbed one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hyper_parallel.components.checkpoint import CheckpointManager
from hyper_parallel.models import qwen3_moe
from hyper_parallel.trainer.config import TrainerConfig
from tests.distributed_world import run_world
from tests.trainer.runs import TINY, metrics, tiny_config, train, with_parallelism

STEPS, SAVED = 4, 2
TOLERANCE = 1e-9
VOCAB = 4097
"""Does not divide by 2."""


class Layout(NamedTuple):
    """Ranks, and how they share the work."""

    world_size: int
    degrees: dict[str, Any]


LAYOUTS = {
    "one": Layout(1, {}),
    "dp 2": Layout(2, {"dp_shard": 2}),
    "tp 2": Layout(2, {"dp_shard": 1, "tp": 2, "sequence_parallel": True, "loss_parallel": True}),
    "ep 2": Layout(2, {"dp_shard": 2, "ep": 2}),
    "pp 2": Layout(2, {"dp_shard": 1, "pp": 2}),
    "dp 2 x tp 2": Layout(4, {"dp_shard": 2, "tp": 2}),
    "dp 2 x ep 2": Layout(4, {"dp_shard": 4, "ep": 2}),
}
WORLDS = sorted({layout.world_size for layout in LAYOUTS.values()})


def config_of(folder: Path, layout: Layout) -> TrainerConfig:
    config = with_parallelism(tiny_config(folder, steps=STEPS), **layout.degrees)
    config.model_spec = qwen3_moe.create_model_spec("debug", **TINY, vocab_size=VOCAB, tie_word_embeddings=True)
    config.checkpoint = CheckpointManager.Config(interval_steps=SAVED)
    return config


def of_world(world_size: int) -> dict[str, Layout]:
    return {name: layout for name, layout in LAYOUTS.items() if layout.world_size == world_size}


def stop(folder: str, world_size: int) -> None:
    for name, layout in of_world(world_size).items():
        with config_of(Path(folder) / name, layout).build() as trainer:
            trainer.training_steps = SAVED
            trainer.train()


def go_on(folder: str, world_size: int) -> None:
    for name, layout in of_world(world_size).items():
        for before in LAYOUTS:
            train(config_of(Path(folder) / f"{before} -> {name}", layout))


@pytest.mark.timeout(900)
def test_every_layout_goes_on_where_every_other_one_stopped(tmp_path: Path) -> None:
    stopped, resumed = tmp_path / "stopped", tmp_path / "resumed"

    def everywhere(function: Any, folder: Path) -> None:
        for world_size in WORLDS:
            if world_size == 1:
                function(str(folder), 1)
            else:
                run_world(world_size, function, str(folder), world_size, timeout=400)

    everywhere(stop, stopped)
    for before in LAYOUTS:
        for after in LAYOUTS:
            shutil.copytree(stopped / before, resumed / f"{before} -> {after}")
    everywhere(go_on, resumed)
    expected = train(config_of(tmp_path / "straight", LAYOUTS["one"]))
    worst = {}
    for run in sorted(resumed.iterdir()):
        lines = metrics(run)
        assert [line["step"] for line in lines] == list(range(1, STEPS + 1)), run.name
        worst[run.name] = max(
            abs(line[key] - other[key])
            for line, other in zip(lines, expected, strict=True)
            for key in ("loss", "grad_norm")
        )
    assert len(worst) == len(LAYOUTS) ** 2
    assert {name: value for name, value in worst.items() if not value <= TOLERANCE} == {}
