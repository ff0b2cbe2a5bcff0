"""Callbacks that write: lines, bars, event files, W&B runs, traces, checkpoints, exports; and those that only act."""

from __future__ import annotations

import errno
import gc
import io
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from hyper_parallel.components.checkpoint import CheckpointError, CheckpointManager
from hyper_parallel.components.checkpoint.storage import complete_steps
from hyper_parallel.components.data import TextDataLoader
from hyper_parallel.components.metrics import ConsoleLog, JsonLines, MetricsProcessor, ProgressBar, WandB
from hyper_parallel.components.profiler import Profiler
from hyper_parallel.components.validator import Validator
from hyper_parallel.config.target import Target
from hyper_parallel.platform import use_platform
from hyper_parallel.platform.cpu import CpuPlatform
from hyper_parallel.trainer import callbacks
from hyper_parallel.trainer.callbacks import (
    CheckpointCallback,
    EvaluateCallback,
    GarbageCollectionCallback,
    LoggingCallback,
    ProfilerCallback,
    SafetensorsExportCallback,
    TensorBoardCallback,
    TqdmCallback,
    WandbCallback,
)
from hyper_parallel.trainer.config import TrainerConfig
from hyper_parallel.trainer.errors import CallbackError
from tests.trainer.runs import deterministic, metrics, small_corpus, tiny_config, train
from tests.trainer.watchers import Notes, Raises, log_lines


def watched(folder: str | Path, *items: Any, steps: int = 6) -> TrainerConfig:
    config = tiny_config(folder, steps=steps)
    config.callbacks = items
    return config


def test_the_legacy_names() -> None:
    assert callbacks.EvalCallback is EvaluateCallback
    assert callbacks.ProgressCallback is TqdmCallback
    assert callbacks.GCCallback is GarbageCollectionCallback


def test_log_lines_at_intervals_of_their_own(dump_folder: str) -> None:
    config = watched(dump_folder, LoggingCallback.Config(log_steps=2))
    config.metrics = MetricsProcessor.Config(sinks=(ConsoleLog.Config(interval_steps=3), JsonLines.Config()))
    with log_lines() as told:
        lines = train(config)
    written = [line.split("  ")[0] for line in told if "tokens/s" in line]
    assert sorted(written) == [f"step {n}/6" for n in (1, 1, 2, 3, 4, 6, 6)]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]  # no second writer of metrics.jsonl


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("bar", ["of the run's metrics", "of a callback"])
def test_one_bar_by_either_way(dump_folder: str, monkeypatch: pytest.MonkeyPatch, bar: str) -> None:
    config = watched(dump_folder)
    if bar == "of a callback":
        config.callbacks = (TqdmCallback.Config(),)
    else:
        config.metrics = MetricsProcessor.Config(sinks=(JsonLines.Config(), ProgressBar.Config()))
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    lines = train(config)
    shown = re.sub(r"\d\d:\d\d:\d\d .*\n", "", terminal.getvalue())
    assert shown.count("\n") == 1 and "6/6" in shown and f"loss={lines[-1]['loss']:.4f}" in shown


def test_tensorboard_at_intervals_of_its_own_beside_that_of_the_metrics(dump_folder: str) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = watched(dump_folder, TensorBoardCallback.Config(log_steps=4))
    config.metrics = MetricsProcessor.Config()
    lines = train(config)
    for folder, steps in (("tb_traces", [1, 4, 6]), ("tensorboard", [1, 2, 3, 4, 5, 6])):
        events = EventAccumulator(str(Path(dump_folder) / folder)).Reload()
        scalars = events.Scalars("train/loss")
        assert [event.step for event in scalars] == steps
        assert scalars[-1].value == pytest.approx(lines[-1]["loss"], rel=1e-6)


def test_wandb(dump_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inits: list[dict[str, Any]] = []
    logged: list[dict[str, Any]] = []
    finished: list[bool] = []
    run = types.SimpleNamespace(
        define_metric=lambda name, step_metric: None, log=logged.append, finish=lambda: finished.append(True)
    )
    module = types.SimpleNamespace(init=lambda **settings: inits.append(settings) or run)
    monkeypatch.setitem(sys.modules, "wandb", module)
    settings = {"project": "p", "entity": "e", "run_name": "r", "mode": "offline"}
    lines = train(watched(dump_folder, WandbCallback.Config(log_steps=5, **settings)))
    (init,) = inits
    assert (init["project"], init["entity"], init["name"], init["mode"]) == ("p", "e", "r", "offline")
    assert [(entry["step"], entry["train/loss"]) for entry in logged] == [
        (line["step"], line["loss"]) for line in lines if line["step"] in (1, 5, 6)
    ]
    assert finished == [True]


def test_settings_of_a_sink_are_checked_under_the_callbacks_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hyper_parallel.components.metrics.wandb.find_spec", lambda name: None)
    assert [str(fault) for fault in WandbCallback.Config(log_steps=0).faults()] == [
        "log_steps: 0 is below 1; give 1 or more",
        "project: the W&B sink needs the package wandb; pip install wandb, or leave it out",
    ]


def test_two_writers_of_one_place_are_refused() -> None:
    config = watched("unused", WandbCallback.Config(), TensorBoardCallback.Config(folder="tensorboard"))
    config.metrics = MetricsProcessor.Config()
    config.metrics.sinks += (JsonLines.Config(), JsonLines.Config(filename="other.jsonl"), WandB.Config())
    assert [str(fault) for fault in config.cross_faults(1)] == [
        "metrics.sinks.4: it writes to metrics.jsonl, as metrics.sinks.2 does; give it another place, or leave one out",
        "callbacks.0: it writes to wandb_run_id, as metrics.sinks.6 does; give it another place, or leave one out",
        "callbacks.1: it writes to tensorboard, as metrics.sinks.3 does; give it another place, or leave one out",
    ]


def test_traces_of_a_callback(dump_folder: str) -> None:
    train(watched(dump_folder, ProfilerCallback.Config(active_steps=2)))
    (trace,) = (Path(dump_folder) / "profiler_traces").rglob("*.json*")
    assert "aten::scaled_dot_product_attention" in trace.read_text()
    assert not (Path(dump_folder) / "profile").exists()


def test_one_profiler_alone_and_ranks_that_are_there() -> None:
    config = watched("unused", ProfilerCallback.Config(ranks=(0, 7)), ProfilerCallback.Config(enable=False))
    assert [str(fault) for fault in config.cross_faults(2)] == [
        "callbacks.0.ranks: 7 are not among the ranks 0 to 1; remove them"
    ]
    config.callbacks = (ProfilerCallback.Config(),)
    config.profiler = Profiler.Config(enable=True)
    assert [str(fault) for fault in config.cross_faults(1)] == [
        "callbacks.0.enable: True, and so is profiler.enable, but a process can run one profiler alone; "
        "set one of them False"
    ]


def test_checkpoints_of_a_callback_alone(tmp_path: Path) -> None:
    train(watched(tmp_path, CheckpointCallback.Config(save_steps=2), steps=5))
    assert complete_steps(tmp_path / "checkpoint") == [2, 4, 5]


def test_no_step_is_saved_twice(tmp_path: Path) -> None:
    config = watched(tmp_path, CheckpointCallback.Config(save_steps=2), Target.of(Notes))
    config.checkpoint = CheckpointManager.Config(interval_steps=3)
    with config.build() as trainer:
        trainer.train()
    assert complete_steps(tmp_path / "checkpoint") == [2, 3, 4, 6]
    assert [step for _, moment, step in trainer.notes if moment == "on_save"] == [2, 3, 4, 6]


def test_a_step_that_a_callback_saved_is_exported_too(tmp_path: Path) -> None:
    config = watched(tmp_path, CheckpointCallback.Config(save_steps=2), steps=4)
    config.checkpoint = CheckpointManager.Config(export_hf="last")
    with config.build() as trainer:
        trainer.train()
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == ["step-2", "step-4", "step-4-hf"]


def test_what_is_saved_last_behind_the_training_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hyper_parallel.components.checkpoint.step_writer import StepWriter

    def full(self: StepWriter, **arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(StepWriter, "finish", full)
    config = watched(tmp_path / "callback", CheckpointCallback.Config(save_steps=10), steps=2)
    config.checkpoint = CheckpointManager.Config(enable=False, async_mode="thread")
    seed = watched(tmp_path / "seed")
    seed.checkpoint = CheckpointManager.Config(create_seed=True, async_mode="thread")
    for one in (config, seed):
        with pytest.raises(CheckpointError, match="No space left on device"), one.build() as trainer:
            trainer.train()


def test_a_run_that_dies_right_after_such_a_save_resumes_in_the_same_bits(tmp_path: Path) -> None:
    config = watched(tmp_path / "stopped", CheckpointCallback.Config(save_steps=4))
    config.checkpoint = CheckpointManager.Config()
    with pytest.raises(CallbackError), config.build() as trainer:
        trainer.add_callback(Raises(trainer, "on_save", 4))
        trainer.train()
    assert [line["step"] for line in metrics(tmp_path / "stopped")] == [1, 2, 3, 4]
    assert complete_steps(tmp_path / "stopped" / "checkpoint") == [4]
    assert deterministic(train(config)) == deterministic(train(watched(tmp_path / "straight")))


def test_exports_are_the_weights_of_their_step(tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    config = watched(tmp_path, SafetensorsExportCallback.Config(save_steps=4))
    with config.build() as trainer:
        trainer.train()
        (model,) = trainer.model_parts
        embedding = model.embed_tokens.weight.detach().clone()
        ids = torch.arange(16)[None]
        with torch.no_grad():
            logits = model(ids).logits
    folders = sorted((tmp_path / "safetensors").iterdir())
    assert [folder.name for folder in folders] == ["step-4-hf", "step-6-hf"]
    exported = [load_file(next(folder.glob("*.safetensors")))["model.embed_tokens.weight"] for folder in folders]
    assert torch.equal(exported[1], embedding) and not torch.equal(exported[0], embedding)
    theirs = AutoModelForCausalLM.from_pretrained(folders[1], dtype=torch.float32)
    with torch.no_grad():
        assert float((theirs(ids).logits - logits).abs().max()) < 1e-5


def validated(folder: str | Path, *items: Any) -> TrainerConfig:
    config = watched(folder, *items)
    held_out = TextDataLoader.Config(path=small_corpus(), shuffle=False)
    config.validator = Validator.Config(enable=True, interval_steps=4, steps=1, dataloader=held_out)
    return config


def test_validation_at_intervals_of_its_own_and_once_a_step(dump_folder: str) -> None:
    config = validated(dump_folder, EvaluateCallback.Config(eval_steps=2), EvaluateCallback.Config(), Target.of(Notes))
    with config.build() as trainer:
        trainer.train()
    assert [line["step"] for line in metrics(dump_folder) if "validation_loss" in line] == [2, 4, 6]
    assert [step for _, moment, step in trainer.notes if moment == "on_evaluate"] == [2, 4, 6]


def test_validation_without_a_validator_is_refused() -> None:
    config = watched("unused", EvaluateCallback.Config(), EvaluateCallback.Config(eval_steps=2))
    assert [str(fault) for fault in config.cross_faults(1)] == [
        "callbacks.1.eval_steps: 2, but validator.enable is False, so there is no held-out data; "
        "set validator.enable True"
    ]


class Emptied(CpuPlatform):
    """Counts how often the cache is emptied."""

    def __init__(self) -> None:
        self.steps = 0

    def empty_cache(self) -> None:
        self.steps += 1


@pytest.mark.parametrize("fails", [False, True])
def test_garbage_collection_of_one_beside_the_default(
    dump_folder: str, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    steps: list[int] = []
    config = watched(dump_folder, GarbageCollectionCallback.Config(gc_steps=3, empty_cache_steps=2))
    config.training.gc_steps, config.training.empty_cache_steps = 2, 3
    platform = Emptied()
    with use_platform(platform), config.build() as trainer:
        monkeypatch.setattr(gc, "collect", lambda *_: steps.append(trainer.state.global_step))
        if fails:
            trainer.add_callback(Raises(trainer, "on_train_end", 6))
            with pytest.raises(CallbackError):
                trainer.train()
        else:
            trainer.train()
        monkeypatch.undo()
    assert steps == [0, 0, 2, 3, 4, 6, 6] and platform.steps == 2 + 3
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_python_collects_again_after_a_run_that_failed(dump_folder: str) -> None:
    config = watched(dump_folder)
    config.training.gc_steps = 2
    with pytest.raises(CallbackError), config.build() as trainer:
        trainer.add_callback(Raises(trainer, "on_step_end", 3))
        assert gc.isenabled()
        trainer.train()
    assert gc.isenabled() and gc.get_freeze_count() == 0
