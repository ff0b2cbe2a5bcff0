"""Ranks that raise, die or hang, under torchrun: all ranks end, the first cause is told once, and a restart heals."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hyper_parallel.components.loss import CrossEntropyLoss
from tests.distributed_world import run_world
from tests.trainer.runs import deterministic, metrics, train
from tests.trainer.test_killed import assert_equal, weights

TRAIN, SCRIPT = (("-m", module) for module in ("hyper_parallel.train", "tests.trainer.failing_ranks"))


def start(folder: Path, ranks: int, *command: str, failure: str = "") -> list[list[str]]:
    """What each rank has said on stderr, but for log lines, which begin with a time of day.

    Fails if the ranks have not ended after 100 seconds, or if torchrun calls it a success."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    logs = ["--log-dir", str(folder / "logs"), "--redirects", "3"]
    done = subprocess.run(
        [*launcher, *logs, *command, "--dump_folder", str(folder / "run")],
        env=os.environ | {"OMP_NUM_THREADS": "1", "FAILURE": failure},
        capture_output=True,
        timeout=100,
    )
    assert done.returncode == 1, done.stderr  # torchrun's own code, whatever that of the rank
    said = []
    for rank in range(ranks):
        (file,) = (folder / "logs").glob(f"*/attempt_0/{rank}/stderr.log")
        said.append([line for line in file.read_text().splitlines() if not re.match(r"\d\d:\d\d:\d\d ", line)])
    return said


RECIPE = ("--recipe", "tests.trainer.failing_ranks.recipe")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failure", "ranks", "door", "line"),
    [
        ("run_error", 2, SCRIPT, "error: the last rank has had enough"),
        (
            "killed",
            4,
            TRAIN,
            r"error: step 3: another rank has ended without a word, killed or out of memory "
            r"\(Connection closed by peer \S+\); see what the launcher says of it; the run goes on from its last "
            "checkpoint when started again",
        ),
        (
            "hangs",
            2,
            SCRIPT,
            r"error: step 3: a collective waited longer than comm.timeout_seconds: another rank hangs, or takes longer "
            r"\(Timed out waiting 8000ms for \w+ operation to complete\); look where it is \(py-spy dump\), or raise "
            "comm.timeout_seconds",
        ),
    ],
)
def test_a_rank_that_fails(tmp_path: Path, failure: str, ranks: int, door: tuple[str, ...], line: str) -> None:
    waits = ("--comm.timeout_seconds", "8") if failure == "hangs" else ()
    said = start(tmp_path, ranks, *door, *RECIPE, *waits, failure=failure)
    (told,) = [line for lines in said for line in lines]
    assert re.fullmatch(line, told), told


@pytest.mark.slow
def test_a_bug_of_one_rank_is_shown_with_its_traceback(tmp_path: Path) -> None:
    first, last = start(tmp_path, 2, *SCRIPT, *RECIPE, failure="bug")
    assert first == []
    assert last[0].startswith("Traceback") and last[-1] == "KeyError: 'a bug of the last rank'"


@pytest.mark.slow
def test_the_rank_that_says_why_is_not_ended_before_it_has(tmp_path: Path) -> None:
    """Rank 1 is refused seconds before rank 0, which speaks, and the launcher ends all ranks with the first."""
    said = start(tmp_path, 2, *SCRIPT, "--recipe", "tests.trainer.failing_ranks.late_on_rank_0")
    assert said == [
        ["recipe: tests.trainer.failing_ranks.late_on_rank_0 returned NoneType; return a TrainerConfig from it"],
        [],
    ]


def restarted(folder: Path, failure: str, mode: str) -> str:
    """What torchrun and all ranks have said of a run of five steps that may be started twice."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=1"]
    recipe = ("--recipe", "tests.trainer.failing_ranks.saved_before", "--checkpoint.async_mode", mode)
    done = subprocess.run(
        [*launcher, *TRAIN, *recipe, "--dump_folder", str(folder)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "FAILURE": failure, "AFTER": str(folder / "checkpoint" / "step-2")},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def left_alone(folder: Path) -> None:
    """On each rank: the same run, in which nothing fails."""
    from tests.trainer.failing_ranks import saved_before  # reads the number of ranks

    config = saved_before()
    config.dump_folder, config.loss = str(folder), CrossEntropyLoss.Config()
    train(config)


@pytest.mark.slow
def test_under_max_restarts_a_run_heals_by_itself(tmp_path: Path) -> None:
    """A rank that raises and one that is killed in step 3, with a checkpoint of step 2 that the next attempt takes."""
    straight = tmp_path / "straight"
    run_world(2, left_alone, straight)
    for failure, mode in (("run_error", "none"), ("killed", "thread")):
        folder = tmp_path / failure
        assert f"checkpoint: resumed from {folder}/checkpoint/step-2 in" in restarted(folder, failure, mode)
        assert deterministic(metrics(folder)) == deterministic(metrics(straight))
        assert_equal(weights(straight, 5), weights(folder, 5))
