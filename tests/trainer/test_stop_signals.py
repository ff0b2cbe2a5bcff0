"""Runs that are told to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hyper_parallel.components.checkpoint.storage import complete_steps
from hyper_parallel.trainer import stop_signals
from tests.distributed_world import run_world
from tests.trainer.runs import deterministic, metrics, saved_every_second_step, train
from tests.trainer.test_resume import wait_for_lines

STEPS = 60
LAUNCHERS = {
    1: [sys.executable, "-m"],
    2: [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m"],
}


def command(folder: Path, ranks: int, recipe: str = "saved_every_second_step") -> list[str]:
    flags = ["--training.steps", str(STEPS), "--checkpoint.interval_steps", "1000", "--dump_folder", str(folder)]
    return [*LAUNCHERS[ranks], "hyper_parallel.train", "--recipe", f"tests.trainer.runs.{recipe}", *flags]


def left_alone(folder: Path) -> None:
    """What the command trains, in this process or as one rank of a world."""
    config = saved_every_second_step()
    config.dump_folder, config.training.steps, config.checkpoint.interval_steps = str(folder), STEPS, 1000
    train(config)


@contextmanager
def started(words: list[str]) -> Iterator[subprocess.Popen[str]]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ranks_of(launcher: subprocess.Popen[str]) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()]


@pytest.mark.parametrize(("ranks", "number"), [(1, signal.SIGTERM), (2, signal.SIGINT)])
def test_the_first_signal_saves_a_whole_step_and_the_same_command_goes_on(
    ranks: int, number: signal.Signals, tmp_path: Path
) -> None:
    """On two ranks the signal is sent to one of them alone."""
    with started(command(tmp_path / "stopped", ranks)) as process:
        wait_for_lines(tmp_path / "stopped" / "metrics.jsonl", 3, process)
        target = process.pid if ranks == 1 else ranks_of(process)[-1]
        os.kill(target, number)
        _, said = process.communicate(timeout=100)
    assert process.returncode == 0, said
    assert said.count(f"{number.name}: stopping after a whole step; a second signal ends the run at once") == 1
    (stopped,) = complete_steps(tmp_path / "stopped" / "checkpoint")
    assert 3 <= stopped < STEPS
    assert f"stopped after step {stopped} of {STEPS}" in said
    assert [line["step"] for line in metrics(tmp_path / "stopped")] == list(range(1, stopped + 1))
    subprocess.run(command(tmp_path / "stopped", ranks), check=True, timeout=100, capture_output=True)
    if ranks == 1:
        left_alone(tmp_path / "alone")
    else:
        run_world(ranks, left_alone, tmp_path / "alone")
    assert deterministic(metrics(tmp_path / "stopped")) == deterministic(metrics(tmp_path / "alone"))


def test_a_second_signal_ends_the_run_at_once(tmp_path: Path) -> None:
    with started(command(tmp_path, 1, "waits_for_data")) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "no batch will come" in line:
                break
        process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):  # it would wait for the end of the step
            process.wait(timeout=4 * stop_signals.ONE_SIGNAL_SECONDS)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == -signal.SIGTERM


def test_two_signals_at_the_same_time_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 10.2, 10.3])
    monkeypatch.setattr(stop_signals.time, "monotonic", lambda: next(clock))
    ended: list[tuple[int, int]] = []
    monkeypatch.setattr(stop_signals.os, "kill", lambda pid, number: ended.append((pid, number)))
    before = signal.getsignal(signal.SIGTERM)
    with stop_signals.StopSignals() as signals:
        assert not signals.due(1)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert ended == []
        assert signals.due(2)
        signal.raise_signal(signal.SIGTERM)
        assert ended == [(os.getpid(), signal.SIGTERM)]
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is before
