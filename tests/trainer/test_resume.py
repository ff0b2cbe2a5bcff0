"""A run that is stopped and started again ends in the same bits as one that is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from hyper_parallel.components.checkpoint import CheckpointManager
from hyper_parallel.components.data import TextDataLoader
from hyper_parallel.config.target import Target
from hyper_parallel.trainer import HyperTrainer
from hyper_parallel.trainer.config import TrainerConfig
from tests.distributed_world import run_world
from tests.trainer.runs import (
    deterministic,
    metrics,
    saved_every_second_step,
    small_corpus,
    tiny_config,
    train,
    with_parallelism,
)

STEPS, SAVED, STOPPED = 12, 6, 9


class Stopped(Exception):
    """Stands for a kill in the middle of a step."""


def config_of(folder: Path, *, seq_len: int = 32, num_workers: int = 0) -> TrainerConfig:
    config = tiny_config(folder, steps=STEPS, seq_len=seq_len, dtype="float32")
    config.checkpoint = CheckpointManager.Config(interval_steps=SAVED)
    config.dataloader = TextDataLoader.Config(path=small_corpus(), num_workers=num_workers)
    return config


def weights(trainer: HyperTrainer) -> dict[str, torch.Tensor]:
    (part,) = trainer.model_parts
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in part.named_parameters()
    }


def run(config: TrainerConfig, stop_in_step: int | None = None) -> dict[str, torch.Tensor]:
    """Trains, or fails in the middle of step `stop_in_step`; returns the weights."""
    with config.build() as trainer:
        take_step = trainer.train_step

        def train_step(batches: Any) -> Any:
            if trainer.state.step + 1 == stop_in_step:
                next(batches)  # the batch is drawn, and lost
                raise Stopped
            return take_step(batches)

        trainer.train_step = train_step  # type: ignore[method-assign]
        try:
            trainer.train()
        except Stopped:
            assert stop_in_step is not None
        return weights(trainer)


def straight_and_resumed(folder: Path, degrees: dict[str, int], **choices: int) -> dict[str, Any]:
    """Metrics and weights of both runs."""
    straight = with_parallelism(config_of(folder / "straight", **choices), **degrees)
    stopped = with_parallelism(config_of(folder / "stopped", **choices), **degrees)
    result: dict[str, Any] = {"straight": run(straight)}
    run(stopped, stop_in_step=STOPPED)
    result["lines before"] = [line["step"] for line in metrics(folder / "stopped")]
    result["resumed"] = run(stopped)
    return result


def assert_bitwise_equal(folder: Path, result: dict[str, Any]) -> None:
    straight, resumed = metrics(folder / "straight"), metrics(folder / "stopped")
    assert result["lines before"] == list(range(1, STOPPED))
    assert [line["step"] for line in resumed] == list(range(1, STEPS + 1))
    assert deterministic(resumed) == deterministic(straight)
    assert result["straight"].keys() == result["resumed"].keys()
    different = [k for k, value in result["straight"].items() if not torch.equal(value, result["resumed"][k])]
    assert different == []


@pytest.mark.parametrize("num_workers", [0, 2])
def test_bitwise_equal(tmp_path: Path, num_workers: int) -> None:
    assert_bitwise_equal(tmp_path, straight_and_resumed(tmp_path, {}, num_workers=num_workers))


def test_bitwise_equal_where_the_scheduler_cycles_betas(tmp_path: Path) -> None:
    straight, stopped = config_of(tmp_path / "straight"), config_of(tmp_path / "stopped")
    for config in (straight, stopped):
        config.lr_scheduler = Target.of(torch.optim.lr_scheduler.OneCycleLR, max_lr=3e-3, total_steps=STEPS)
    result: dict[str, Any] = {"straight": run(straight)}
    run(stopped, stop_in_step=STOPPED)
    result["lines before"] = [line["step"] for line in metrics(tmp_path / "stopped")]
    assert_bitwise_equal(tmp_path, result | {"resumed": run(stopped)})


def test_bitwise_equal_across_an_epoch_edge(tmp_path: Path) -> None:
    config = config_of(tmp_path / "counted", seq_len=100)
    with config.build() as trainer:
        rows_per_epoch = trainer.dataloader.rows_per_epoch
    edge = rows_per_epoch / config.training.global_batch_size
    assert SAVED < edge < STEPS, f"the epoch ends after step {edge}, which must lie in the resumed part"
    assert_bitwise_equal(tmp_path, straight_and_resumed(tmp_path, {}, seq_len=100))


def resume_on_rank(folder: str) -> dict[str, Any]:
    return straight_and_resumed(Path(folder), {"dp_shard": 2})


def test_bitwise_equal_on_two_ranks(tmp_path: Path) -> None:
    for result in run_world(2, resume_on_rank, str(tmp_path), timeout=240):
        assert_bitwise_equal(tmp_path, result)


def test_a_finished_run_is_not_trained_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = run(config_of(tmp_path))
    before = (tmp_path / "metrics.jsonl").read_bytes()
    second = run(config_of(tmp_path))
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_killed_by_the_system_and_started_with_the_same_command(tmp_path: Path) -> None:
    """kill -9 at whatever instant it hits; the curve is that of a run that was left alone."""
    command = [sys.executable, "-m", "hyper_parallel.train", "--recipe", "tests.trainer.runs.saved_every_second_step"]
    command += ["--dump_folder", str(tmp_path / "killed")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    wait_for_lines(tmp_path / "killed" / "metrics.jsonl", 3, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    subprocess.run(command, env=environment, check=True, timeout=120, capture_output=True)
    alone = saved_every_second_step()
    alone.dump_folder = str(tmp_path / "alone")
    assert deterministic(metrics(tmp_path / "killed")) == deterministic(train(alone))


def wait_for_lines(path: Path, lines: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 100
    while not path.exists() or path.read_bytes().count(b"\n") < lines:
        assert process.poll() is None and time.monotonic() < deadline, f"no {lines} lines in {path}"
        time.sleep(0.01)
