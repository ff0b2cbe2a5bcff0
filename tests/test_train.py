"""The front door: exit codes, what it prints and where, and that nothing is left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from hyper_parallel import train
from hyper_parallel.config import manager, resolver
from hyper_parallel.config.errors import ConfigError
from hyper_parallel.trainer.errors import TrainingError
from hyper_parallel.trainer.hyper_trainer import HyperTrainer

ROOT = Path(__file__).resolve().parent.parent


def run(*argv: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, "-m", "hyper_parallel.train", *argv],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_no_argument_explains_the_doors(tmp_path):
    done = run(cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "command line: nothing says what to train; give exactly one of "
        "python -m hyper_parallel.train --model_spec qwen3_moe:debug or "
        "python -m hyper_parallel.train --recipe recipes.qwen3_moe.debug or "
        "python -m hyper_parallel.train --config-file run.yaml\n"
    )


def test_every_fault_is_one_line_and_nothing_is_created(tmp_path):
    argv = ("--model_spec", "qwen3_moe", "--optimizer.lrr=1", "--training.train_iters", "10x", "stray")
    done = run(*argv, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        "optimizer.lrr: is no setting; did you mean 'optimizer.lr'?",
        "stray: the word after --training.train_iters belongs to no flag; write --name value or --name=value",
    ]
    assert os.listdir(tmp_path) == []


def test_batch_sizes_that_do_not_divide_name_both_fields(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = ["--training.global_batch_size", "10", "--training.micro_batch_size", "4"]
    assert train.main(["--model_spec", "qwen3_moe", *sizes]) == 2
    message = capsys.readouterr().err
    assert "training.global_batch_size: 10 is not a multiple of training.micro_batch_size 4" in message
    assert os.listdir(tmp_path) == []


def test_other_ranks_of_a_node_leave_with_the_same_code_in_silence(tmp_path):
    done = run(cwd=tmp_path, LOCAL_RANK="1", RANK="1")
    assert (done.returncode, done.stderr) == (2, "")


def test_help(tmp_path):
    done = run("--model_spec", "qwen3_moe", "--help", cwd=tmp_path)
    assert done.returncode == 0 and done.stderr == ""
    for flag in ("--recipe", "--training.steps", "--optimizer.lr", "--model_spec.model.num_hidden_layers"):
        assert f" {flag} " in done.stdout
    assert os.listdir(tmp_path) == []


@pytest.fixture
def trainer(monkeypatch):
    """HyperTrainer without its parts; `events` lists what was called on it."""
    events: list[str] = []

    def init(self, config):
        events.append("build")
        # What is saved stands before anything is built.
        assert (Path(config.dump_folder) / "config.yaml").exists()

    monkeypatch.setattr(HyperTrainer, "__init__", init)
    monkeypatch.setattr(HyperTrainer, "train", lambda self: events.append("train"))
    monkeypatch.setattr(HyperTrainer, "close", lambda self, failed=False: events.append(f"close {failed=}"))
    return events


def failing(error: Exception):
    def fail(self, *_):
        raise error

    return fail


def start(folder: Path, *argv: str) -> int:
    return train.main(["--model_spec", "qwen3_moe", "--dump_folder", str(folder), *argv])


def test_saves_builds_trains_closes(trainer, tmp_path):
    assert start(tmp_path / "run", "--training.max_steps", "3", "--model.num_hidden_layers", "2") == 0
    assert trainer == ["build", "train", "close failed=False"]
    saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert saved == json.loads((tmp_path / "run" / "config.json").read_text())
    assert saved["model"] == {
        "_target_": "hyper_parallel.models.qwen3_moe.create_model_spec",
        "flavor": "debug",
        "num_hidden_layers": 2,
    }
    assert saved["training"]["steps"] == 3
    assert all("_target_" in group for group in saved.values() if isinstance(group, dict))


@pytest.mark.parametrize("door", [("--model_spec", "qwen3_moe"), ("--recipe", "recipes.qwen3_moe.debug")])
def test_the_saved_file_reads_back_to_an_equal_tree(door, tmp_path):
    argv = [*door, "--dump_folder", str(tmp_path), "--optimizer.betas", "0.5", "0.6", "--model.num_hidden_layers", "2"]
    tree = manager.load(HyperTrainer.Config, argv, world_size=1)
    manager.save(tree)
    saved = yaml.safe_load((tmp_path / "config.yaml").read_text())
    other = resolver.resolve_root(saved)
    assert other == tree and other.model_spec.model.num_hidden_layers == 2


def test_an_error_of_training_is_one_line_and_code_1(trainer, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(HyperTrainer, "train", failing(TrainingError("step 3: loss is nan")))
    assert start(tmp_path) == 1
    assert capsys.readouterr().err == "error: step 3: loss is nan\n"
    assert trainer == ["build", "close failed=True"]


def test_any_other_error_keeps_its_traceback(trainer, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(HyperTrainer, "train", failing(KeyError("lost")))
    assert start(tmp_path) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback") and shown.endswith("KeyError: 'lost'\n")
    assert trainer == ["build", "close failed=True"]


@pytest.mark.parametrize(("rank", "printed"), [("0", "dataloader.path: 'x' is empty; fill it\n"), ("1", "")])
def test_a_fault_that_only_building_sees_is_printed_once_a_node(rank, printed, trainer, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setattr(manager, "LAST_WORD_SECONDS", 0)
    monkeypatch.setattr(
        HyperTrainer, "__init__", failing(ConfigError.one("dataloader.path", "'x' is empty", "fill it"))
    )
    assert start(tmp_path) == 2
    assert capsys.readouterr().err == printed


def test_a_folder_that_cannot_be_written(trainer, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert start(tmp_path / "file") == 2
    assert "file' cannot be written: File exists; give a folder that you may write to" in capsys.readouterr().err
    assert trainer == []
