"""One run at a time in a dump folder."""

from __future__ import annotations

import errno
import fcntl
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hyper_parallel import train as front_door
from hyper_parallel.config.errors import ConfigError
from hyper_parallel.trainer import dump_folder
from tests.trainer.runs import saved_every_second_step, tiny_config, train

HOLDS = """
import os, sys, time
from hyper_parallel.trainer import dump_folder
dump_folder.hold(sys.argv[1])
if os.fork() == 0:  # a data worker, which outlives a run that is killed
    time.sleep(600)
print("held", os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds `tmp_path`, and has a child."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("held")
    yield process
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture(autouse=True)
def nothing_held(tmp_path: Path) -> Iterator[None]:
    yield
    dump_folder.release(tmp_path)


def test_a_second_run_is_refused_before_it_writes(
    holder: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dump_folder, "WAIT_SECONDS", 0.3)
    (tmp_path / "config.yaml").write_text("of the run that goes on")
    recipe = ["--recipe", "tests.trainer.runs.saved_every_second_step", "--dump_folder", str(tmp_path)]
    assert front_door.main(recipe) == 2
    said = f"dump_folder: {tmp_path} is being written by another run ({os.uname().nodename}, pid {holder.pid}); "
    assert capsys.readouterr().err == f"{said}wait until it ends or stop it, or give another folder\n"
    assert sorted(os.listdir(tmp_path)) == ["config.yaml", "run.lock"]
    assert (tmp_path / "config.yaml").read_text() == "of the run that goes on"
    with pytest.raises(ConfigError, match="is being written by another run"):  # a script's own way
        train(tiny_config(tmp_path, steps=1))
    with pytest.raises(SystemExit):  # which asks for nothing
        front_door.main([*recipe, "--help"])


def test_a_run_that_was_killed_is_followed_at_once_though_its_children_live(
    holder: subprocess.Popen[str], tmp_path: Path
) -> None:
    holder.kill()
    start = time.monotonic()
    dump_folder.hold(tmp_path)
    assert time.monotonic() - start < dump_folder.WAIT_SECONDS / 2
    os.killpg(holder.pid, 0)  # the child is there
    assert (tmp_path / "run.lock").read_text() == f"{os.uname().nodename}, pid {os.getpid()}\n"


def _tries(folder: Path, answers: Any) -> None:
    dump_folder._held.clear()  # what a new process knows
    dump_folder.WAIT_SECONDS = 0.2
    try:
        dump_folder.hold(folder)
    except ConfigError:
        answers.put("refused")
    else:
        answers.put("held")


def tried_elsewhere(folder: Path) -> str:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=_tries, args=(folder, answers))
    process.start()
    answer = answers.get(timeout=60)
    process.join()
    return answer


def test_a_process_may_build_several_runs_there_and_lets_go_with_the_last(tmp_path: Path) -> None:
    config = saved_every_second_step().derive(dump_folder=str(tmp_path))
    with config.build() as first:
        with config.build():
            assert tried_elsewhere(tmp_path) == "refused"
        first.training_steps = 2
        first.train()
    assert tried_elsewhere(tmp_path) == "held"


def test_a_file_system_without_locks_gives_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    with caplog.at_level(logging.WARNING):
        dump_folder.hold(tmp_path)
    assert f"{tmp_path} cannot be locked ([Errno 37] No locks available): see that no" in caplog.text


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as error:
        dump_folder.hold(tmp_path / "file" / "run")
    remedy = "give a folder that you may write to"
    assert str(error.value) == f"dump_folder: '{tmp_path}/file/run' cannot be written: Not a directory; {remedy}"
