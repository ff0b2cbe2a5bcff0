"""The moments of a run: which, when, in what order, with what in the state, and what becomes of errors."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from hyper_parallel.components.checkpoint import CheckpointManager
from hyper_parallel.components.data import TextDataLoader
from hyper_parallel.components.metrics import ConsoleLog, JsonLines, MetricsProcessor, StepMetrics
from hyper_parallel.components.validator import Validator
from hyper_parallel.config import manager
from hyper_parallel.config.errors import ConfigError, RunError
from hyper_parallel.config.resolver import resolve_root, to_yaml
from hyper_parallel.config.target import Target
from hyper_parallel.trainer.callbacks import Callback, MemoryMonitorCallback, TrainerState
from hyper_parallel.trainer.config import TrainerConfig
from hyper_parallel.trainer.errors import CallbackError, TrainingError
from tests.trainer.runs import deterministic, metrics, small_corpus, tiny_config, train
from tests.trainer.watchers import Everything, Notes, Raises, log_lines

ROOT = Path(__file__).resolve().parents[2]


def eventful_config(folder: str | Path, *, steps: int = 4, **training: Any) -> TrainerConfig:
    """Four micro-batches a step, a checkpoint after every third step, validation after every second one."""
    config = tiny_config(folder, steps=steps, **training)
    config.checkpoint = CheckpointManager.Config(interval_steps=3)
    held_out = TextDataLoader.Config(path=small_corpus(), shuffle=False)
    config.validator = Validator.Config(enable=True, interval_steps=2, steps=1, dataloader=held_out)
    return config


def test_every_moment_in_its_place(dump_folder: str) -> None:
    config = eventful_config(dump_folder)
    config.callbacks = (Target.of(Notes),)
    with config.build() as trainer:
        trainer.train()
    step = ["on_step_begin", *["on_substep_end"] * 4, "on_pre_optimizer_step", "on_step_end", "on_log"]
    validated = [*step[:-2], "on_evaluate", "on_step_end", "on_log"]  # by EvaluateCallback, which comes first
    assert [(moment, step) for _, moment, step in trainer.notes] == [
        ("on_init_end", 0),
        ("on_train_begin", 0),
        ("on_epoch_begin", 0),
        *((moment, 1) for moment in step),
        *((moment, 2) for moment in validated),
        *((moment, 3) for moment in [*step, "on_save"]),
        *((moment, 4) for moment in [*validated, "on_save", "on_epoch_end", "on_train_end", "close"]),
    ]


def test_one_that_cannot_be_made_ends_the_run_with_its_name(dump_folder: str) -> None:
    config = tiny_config(dump_folder, steps=1)
    config.callbacks = (Target.of(Raises, moment="on_nothing", step=1),)
    with log_lines() as told, pytest.raises(CallbackError) as caught:
        config.build()
    assert str(caught.value) == (
        "step 0: Raises raised in __init__ on rank 0: TypeError: no moment; its traceback is in the log; mend it, or "
        "leave it out of callbacks"
    )
    assert "TypeError: no moment" in told[-1]


def test_an_added_metric_is_a_number() -> None:
    state = TrainerState(record=StepMetrics(**dict.fromkeys((f.name for f in fields(StepMetrics)), 0) | {"extra": {}}))
    for name, value in {"tensor": torch.tensor(1.5), "whole": 2, "none": None}.items():
        state.add_metric(name, value)
    assert repr(state.record.extra) == "{'tensor': 1.5, 'whole': 2, 'none': None}"
    with pytest.raises(ValueError, match="could not convert string to float: 'x'"):
        state.add_metric("text", "x")
    with pytest.raises(TypeError, match="must be a string or a real number, not 'list'"):
        state.add_metric("list", [1])


def test_a_run_that_is_taken_up_and_one_that_is_done(dump_folder: str) -> None:
    train(eventful_config(dump_folder, steps=3))
    config = eventful_config(dump_folder, steps=4)
    config.callbacks = (Target.of(Notes),)
    with config.build() as trainer:
        trainer.train()
    begin = [(moment, step) for _, moment, step in trainer.notes][:5]
    assert begin == [
        ("on_init_end", 0),
        ("on_load", 3),
        ("on_train_begin", 3),
        ("on_epoch_begin", 3),
        ("on_step_begin", 4),
    ]
    with config.build() as trainer:
        trainer.train()
    assert [(moment, step) for _, moment, step in trainer.notes] == [("on_init_end", 0), ("on_load", 4), ("close", 4)]


def test_epochs_begin_where_the_first_row_of_a_step_is_of_the_next_pass(
    dump_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Epochs(Notes):
        def see(self, moment: str, state: TrainerState) -> None:
            if moment in ("on_epoch_begin", "on_epoch_end", "on_step_begin"):
                self.notes.append((moment.removeprefix("on_"), str(state.epoch), state.global_step))

    config = tiny_config(dump_folder, steps=5)
    monkeypatch.setattr(TextDataLoader, "rows_per_epoch", 20)  # of 8 rows a step: 2.5 steps
    with config.build() as trainer:
        trainer.add_callback(Epochs(trainer))
        trainer.train()
    assert trainer.notes[:-1] == [
        ("epoch_begin", "0", 0),
        *[("step_begin", "0", step) for step in (1, 2, 3)],
        ("epoch_end", "0", 3),
        ("epoch_begin", "1", 3),
        *[("step_begin", "1", step) for step in (4, 5)],
        ("epoch_end", "1", 5),
    ]


def test_the_chain_is_ours_then_the_configuration_then_what_was_added(dump_folder: str) -> None:
    config = tiny_config(dump_folder, steps=1)
    config.callbacks = (Target.of(Notes, name="first"), Target.of(Notes, name="second"))
    with config.build() as trainer:
        assert [note[:2] for note in trainer.notes] == [("first", "on_init_end"), ("second", "on_init_end")]
        trainer.add_callback(Notes(trainer, "added"))
        assert trainer.notes[2:] == [("added", "on_init_end", 0)]
        assert [type(callback).__name__ for callback in trainer.callbacks] == [
            "EnvironMeterCallback",
            "LoggingCallback",
            "TqdmCallback",
            "EvaluateCallback",
            "GarbageCollectionCallback",
            *["Notes"] * 3,
        ]
        with pytest.raises(TypeError, match=r"<object .*> is no callback; give an object of a class that derives"):
            trainer.add_callback(object())
        trainer.train()
    moments = [
        moment for name, moment, _ in trainer.notes if name == "first" and moment not in ("on_init_end", "close")
    ]
    assert len(moments) == 2 + 8 + 2
    for moment in set(moments):
        names = [name for name, seen, _ in trainer.notes if seen == moment]
        assert names == ["first", "second", "added"] * moments.count(moment), moment
    assert [name for name, moment, _ in trainer.notes if moment == "close"] == ["added", "second", "first"]


class StateSeen(Everything):
    """Notes what the state holds."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self.states: dict[tuple[str, int], dict[str, Any]] = trainer.__dict__.setdefault("states", {})

    def see(self, moment: str, state: TrainerState) -> None:
        self.states[moment, state.global_step] = {**vars(state), "step_train_metrics": dict(state.step_train_metrics)}


def test_what_belongs_to_the_moment(dump_folder: str) -> None:
    config = eventful_config(dump_folder)
    config.callbacks = (Target.of(StateSeen),)
    with config.build() as trainer:
        trainer.train()
        state = trainer.state
    lines, states = metrics(dump_folder), trainer.states
    assert state.state_dict() == {"step": 4, "tokens": 4 * 256}
    assert {seen["max_steps"] for seen in states.values()} == {4}
    for step, line in enumerate(lines, start=1):
        before, substep = states["on_step_begin", step], states["on_substep_end", step]
        assert before["tokens"] == 256 * (step - 1) and before["model_output"] is None
        assert substep["model_output"].tokens_per_expert.sum() == 2 * 2 * 2 * 32  # layers x top_k x rows x tokens
        assert states["on_pre_optimizer_step", step]["model_output"] is None
        assert states["on_pre_optimizer_step", step]["grad_norm"] == line["grad_norm"]
        logged = states["on_log", step]
        assert logged["record"].as_dict() == line
        assert logged["step_train_metrics"] | logged["step_env_metrics"] | {"step": step} == line
        assert list(logged["step_train_metrics"])[:4] == ["loss", "grad_norm", "lr", "aux_loss"]
        # Step 4 knows what the save after step 3 took.
        saving = ("checkpoint_bytes", "checkpoint_seconds", "checkpoint_stall_seconds") if step == 4 else ()
        assert list(logged["step_env_metrics"]) == [
            *("tokens", "step_seconds", "tokens_per_second", "data_seconds", "memory_bytes"), *saving
        ]  # fmt: skip
    marker = json.loads(Path(dump_folder, "checkpoint/step-3/complete.json").read_text())
    assert lines[3]["checkpoint_bytes"] == sum(file["bytes"] for file in marker["files"].values())
    assert [line["step"] for line in lines if "validation_loss" in line] == [2, 4]
    assert states["on_evaluate", 2]["validation_loss"] == lines[1]["validation_loss"]
    assert [seen["checkpoint_folder"].name for (moment, _), seen in states.items() if moment == "on_save"] == [
        "step-3",
        "step-4",
    ]


def test_mfu_is_of_the_environment(dump_folder: str) -> None:
    with tiny_config(dump_folder, steps=1).build() as trainer:
        trainer.metrics._flops_share = 1e-6
        trainer.train()
        line, state = metrics(dump_folder)[0], trainer.state
    assert line["mfu"] == line["tokens_per_second"] * 1e-6
    assert state.step_env_metrics["mfu"] == line["mfu"] and "mfu" not in state.step_train_metrics


class Adds(Callback):
    """Adds a number to every second step."""

    def __init__(self, trainer: Any, name: str = "half") -> None:
        super().__init__(trainer)
        self.name = name

    def on_step_end(self, state: TrainerState) -> None:
        if state.global_step % 2 == 0:
            state.add_metric(self.name, state.step_train_metrics["loss"] / 2)


def test_an_added_number_reaches_every_sink(dump_folder: str) -> None:
    config = tiny_config(dump_folder, steps=2)
    config.metrics = MetricsProcessor.Config(sinks=(ConsoleLog.Config(interval_steps=1), JsonLines.Config()))
    config.callbacks = (Target.of(Adds),)
    with log_lines() as told:
        first, second = train(config)
    assert "half" not in first and second["half"] == second["loss"] / 2
    assert list(second)[-2:] == ["aux_loss", "half"]
    written = [line for line in told if line.startswith("step ")]
    assert [f"half {second['loss'] / 2:.4g}" in line for line in written] == [False, True]


def test_an_added_number_cannot_take_the_place_of_another(dump_folder: str) -> None:
    config = tiny_config(dump_folder, steps=2)
    config.callbacks = (Target.of(Adds, name="lr"),)
    with config.build() as trainer, pytest.raises(CallbackError) as error:
        trainer.train()
    assert str(error.value).startswith(
        "step 2: Adds raised in on_step_end on rank 0: ValueError: 'lr' is a number that every step has; give the added"
    )
    assert [line["step"] for line in metrics(dump_folder)] == [1]


@pytest.mark.parametrize("moment", ["on_train_begin", "on_step_begin", "on_substep_end", "on_log", "on_train_end"])
def test_what_a_callback_raises_names_it_and_ends_the_run(dump_folder: str, moment: str) -> None:
    step = {"on_train_begin": 0, "on_train_end": 3}.get(moment, 2)
    config = tiny_config(dump_folder, steps=3)
    config.callbacks = (
        Target.of(Notes, name="before"),
        Target.of(Raises, moment=moment, step=step),
        Target.of(Notes, name="behind"),
    )
    with log_lines() as told, pytest.raises(CallbackError) as error, config.build() as trainer:
        trainer.train()
    assert str(error.value) == (
        f"step {step}: Raises raised in {moment} on rank 0: ValueError: broken watcher; its traceback is in the log; "
        "mend it, or leave it out of callbacks"
    )
    assert isinstance(error.value.__cause__, ValueError)
    assert len([line for line in told if "Traceback" in line and "in see\n" in line]) == 1
    # Those behind it hear no more of the run, but all of them are closed, the last one first.
    assert trainer.notes[-3:] == [("before", moment, step), ("behind", "close", step), ("before", "close", step)]
    assert ("behind", moment, step) not in trainer.notes


class OwnError(RunError):
    """An error of a user's callback that needs no explanation."""


@pytest.mark.parametrize("error", [ConfigError.one("a", "is odd", "mend it"), SystemExit(0)])
def test_no_other_error_passes_without_the_callbacks_name(dump_folder: str, error: BaseException) -> None:
    """Either would end this rank in silence where another one speaks for all."""

    class Leaves(Callback):
        def on_step_end(self, state: TrainerState) -> None:
            raise error

    with tiny_config(dump_folder, steps=2).build() as trainer:
        trainer.add_callback(Leaves(trainer))
        cause = re.escape(f"{type(error).__name__}: {error}")
        with pytest.raises(CallbackError, match=f"^step 1: Leaves raised in on_step_end on rank 0: {cause}; "):
            trainer.train()


@pytest.mark.parametrize("error", [OwnError, TrainingError])
def test_errors_that_speak_for_themselves_pass_as_they_are(dump_folder: str, error: type[Exception]) -> None:
    config = tiny_config(dump_folder, steps=2)
    with config.build() as trainer:
        trainer.add_callback(Raises(trainer, "on_step_end", 1, error=error))
        with pytest.raises(error) as raised:
            trainer.train()
    assert type(raised.value) is error


class ClosesBadly(Notes):
    """Raises when it is closed."""

    def close(self) -> None:
        super().close()
        raise OSError("disk gone")


def test_what_close_raises_ends_a_good_run_and_never_hides_why_another_failed(dump_folder: str) -> None:
    config = tiny_config(dump_folder, steps=1)
    config.callbacks = (Target.of(Notes, name="before"), Target.of(ClosesBadly), Target.of(Notes, name="behind"))
    with pytest.raises(CallbackError, match="ClosesBadly raised in close on rank 0: OSError: disk gone"):
        train(config)
    with log_lines() as told, pytest.raises(CallbackError, match="Raises raised in on_log on rank 0"):  # noqa: SIM117
        with config.build() as trainer:
            trainer.add_callback(Raises(trainer, "on_log", 1))
            trainer.train()
    assert [name for name, moment, _ in trainer.notes if moment == "close"] == ["behind", "", "before"]
    assert any(line.startswith("step 1: ClosesBadly raised in close on rank 0: OSError: disk gone") for line in told)


@pytest.mark.parametrize(("ranks", "flags"), [("1", ("--callbacks.0.rank", "1")), ("[01]", ())])
def test_one_rank_that_raises_ends_the_other_and_one_speaks_for_both(
    tmp_path: Path, ranks: str, flags: tuple[str, ...]
) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "hyper_parallel.train")
    recipe = ("--recipe", "tests.trainer.watchers.third_step_raises", "--dump_folder", str(tmp_path))
    done = subprocess.run(
        [sys.executable, *launcher, *recipe, *flags],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert re.fullmatch(
        f"error: step 3: Raises raised in on_step_end on rank {ranks}: ValueError: broken watcher; its traceback is in "
        "the log; mend it, or leave it out of callbacks",
        error,
    )
    assert len(re.findall(r"^ValueError: broken$", done.stderr, re.MULTILINE)) == 1
    assert [line["step"] for line in metrics(tmp_path)][:2] == [1, 2]


def test_what_is_no_callback_and_what_cannot_be_built_are_told_together(dump_folder: str) -> None:
    config = tiny_config(dump_folder, steps=1)
    config.callbacks = (Target.of(Notes), Target.of(Fraction), Target.of(refused))
    with pytest.raises(ConfigError) as error:
        config.build()
    assert str(error.value).splitlines() == [
        "callbacks.1: it makes a Fraction, which is no callback; derive it from "
        "hyper_parallel.trainer.callbacks.Callback",
        "callbacks.2.size: 3 is odd; give 2",
    ]


def refused(trainer: Any) -> Callback:
    raise ConfigError.one("size", "3 is odd", "give 2")


def needy(trainer: Any, size: int) -> Callback:
    return Callback(trainer)


def test_arguments_are_checked_before_anything_is_built(dump_folder: str) -> None:
    config = tiny_config(dump_folder, steps=1)
    config.callbacks = (Target.of(needy, size=2), Target.of(needy), MemoryMonitorCallback.Config(log_steps=0))
    assert [str(fault) for fault in manager.check(config, 1)] == [
        "callbacks.1.size: tests.trainer.test_callbacks.needy needs it; write --callbacks.1.size VALUE"
    ]
    config.callbacks[1].size = 3  # type: ignore[attr-defined]
    assert [str(fault) for fault in manager.check(config, 1)] == ["callbacks.2.log_steps: 0 is below 1; give 1 or more"]


def test_in_yaml_and_back(dump_folder: str) -> None:
    here = "tests.trainer.watchers"
    raw = {
        "callbacks": [
            {"_target_": f"{here}.Notes", "name": "noted"},
            {"_target_": "hyper_parallel.trainer.callbacks.MemoryMonitorCallback.Config", "log_steps": 7},
        ]
    }
    tree = resolve_root(raw)
    assert tree.callbacks[0] == Target.of(Notes, name="noted")
    assert tree.callbacks[1] == MemoryMonitorCallback.Config(log_steps=7)
    import yaml

    assert resolve_root({"callbacks": yaml.safe_load(to_yaml(tree))["callbacks"]}).callbacks == tree.callbacks


def test_the_documented_example(tmp_path: Path) -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "callbacks.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {"__name__": __name__}
    exec(snippet, names)
    config = tiny_config(tmp_path, steps=3)
    config.callbacks = names["with_smoothed_loss"]().callbacks
    first, second, third = train(config)
    average = 0.5 * (0.5 * first["loss"] + 0.5 * second["loss"]) + 0.5 * third["loss"]
    assert third["smoothed_loss"] == pytest.approx(average, abs=1e-12)


def test_watching_changes_no_number(tmp_path: Path) -> None:
    plain = train(tiny_config(tmp_path / "plain", steps=5))
    config = eventful_config(tmp_path / "watched", steps=5)
    config.callbacks = (Target.of(Notes), Target.of(StateSeen), Target.of(Adds))
    assert deterministic(train(config)) == deterministic(plain)
