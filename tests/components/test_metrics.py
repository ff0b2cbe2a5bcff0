from __future__ import annotations

import io
import json
import logging
import math
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from hyper_parallel.components.metrics import (
    ConsoleLog,
    JsonLines,
    MetricsProcessor,
    ProgressBar,
    StepMetrics,
    TensorBoard,
    WandB,
)
from hyper_parallel.config.errors import RunError

COLUMNS = [
    "step",
    "loss",
    "grad_norm",
    "lr",
    "tokens",
    "step_seconds",
    "tokens_per_second",
    "data_seconds",
    "memory_bytes",
]


def record(step: int, *, seconds: float = 0.5, tokens: int = 100, **other: Any) -> StepMetrics:
    numbers = {"loss": 1 / 3, "grad_norm": 0.1 + 0.2, "lr": 1e-3, "data_seconds": 0.01} | other
    return StepMetrics(step=step, tokens=tokens, step_seconds=seconds, tokens_per_second=tokens / seconds, **numbers)


def processor(folder: Path, *sinks: Any, steps: int = 100, **runtime: Any) -> MetricsProcessor:
    return MetricsProcessor.Config(sinks=sinks).build(dump_folder=str(folder), training_steps=steps, **runtime)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_line_has_every_number_in_full_precision(tmp_path: Path) -> None:
    metrics = processor(tmp_path, JsonLines.Config())
    metrics.log(record(1, memory_bytes=123, extra={"aux_loss": 0.1}))
    (line,) = lines(tmp_path)  # before close: each line is on disk when its step ends
    assert list(line) == [*COLUMNS, "aux_loss"]
    assert (line["loss"], line["grad_norm"], line["tokens_per_second"]) == (1 / 3, 0.1 + 0.2, 200.0)
    assert type(line["step"]) is int and type(line["tokens"]) is int


def test_numbers_that_are_not_finite_or_not_known_are_null(tmp_path: Path) -> None:
    metrics = processor(tmp_path, JsonLines.Config())
    metrics.log(record(1, loss=math.nan, grad_norm=math.inf))
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text
    line = json.loads(text)
    assert line["loss"] is line["grad_norm"] is line["memory_bytes"] is None


@pytest.mark.parametrize(
    "tail", ["", '{"step": 5, "lo', '{"step": 5, "loss": 1.0}', "\x00\x00\n", "[]\n", '{"step": "5"}\n']
)
def test_after_a_resume_each_step_stands_once(tmp_path: Path, tail: str) -> None:
    metrics = processor(tmp_path, JsonLines.Config())
    metrics.on_resume(0)
    for step in range(1, 5):
        metrics.log(record(step, loss=1.0))
    metrics.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(tail)

    resumed = processor(tmp_path, JsonLines.Config())
    resumed.on_resume(2)
    for step in range(3, 7):
        resumed.log(record(step, loss=2.0))
    resumed.close()
    assert [(line["step"], line["loss"]) for line in lines(tmp_path)] == [
        (1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0), (6, 2.0),
    ]  # fmt: skip


@pytest.mark.parametrize("torn", ['{"step": 2', '{"step": 2}'])
def test_a_torn_line_before_the_resumed_step_goes(tmp_path: Path, torn: str) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n' + torn)
    metrics = processor(tmp_path, JsonLines.Config())
    metrics.on_resume(5)
    metrics.log(record(6))
    assert [line["step"] for line in lines(tmp_path)] == [1, 6]


def test_a_fresh_run_starts_the_file_anew_even_untold(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    metrics = processor(tmp_path, JsonLines.Config())
    metrics.log(record(1))
    assert [line["step"] for line in lines(tmp_path)] == [1]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "outputs"
    metrics = MetricsProcessor.Config().build(dump_folder=str(folder), training_steps=3, is_writer=False)
    metrics.on_resume(0)
    metrics.log(record(1))
    metrics.close()
    assert not folder.exists()


def test_building_the_writers_creates_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "outputs"
    MetricsProcessor.Config().build(dump_folder=str(folder), training_steps=3)
    assert not folder.exists()


def test_rates_are_of_the_steps_since_the_last_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    metrics = processor(tmp_path, ConsoleLog.Config(interval_steps=2), steps=7)
    with caplog.at_level(logging.INFO):
        metrics.log(record(1, seconds=50.0))
        assert [r.getMessage().split("  ")[4] for r in caplog.records] == ["2 tokens/s"]
        for step in range(2, 8):
            metrics.log(record(step, loss=step / 8))
    messages = [r.getMessage() for r in caplog.records]
    assert [m.split("  ")[0] for m in messages] == ["step 1/7", "step 2/7", "step 4/7", "step 6/7", "step 7/7"]
    assert all("  200 tokens/s" in m for m in messages[1:])
    assert "loss 0.7500  grad_norm 0.3000  lr 1.000e-03" in messages[3]


def test_a_window_weighs_steps_by_their_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    metrics = processor(tmp_path, ConsoleLog.Config(interval_steps=3), flops_per_token=3.0, peak_flops=1000.0)
    metrics.on_resume(0)
    with caplog.at_level(logging.INFO):
        metrics.log(record(1))
        metrics.log(record(2, seconds=1.0, tokens=100))
        metrics.log(record(3, seconds=3.0, tokens=100, memory_bytes=3 * 2**29, extra={"aux_loss": 0.25}))
    assert "  50 tokens/s  MFU 15.0%  memory 1.50 GiB  aux_loss 0.25" in caplog.records[-1].getMessage()


def test_mfu_is_written_only_where_the_peak_is_known(tmp_path: Path) -> None:
    known = processor(tmp_path / "known", JsonLines.Config(), flops_per_token=3.0, peak_flops=1000.0)
    known.log(record(1))
    assert lines(tmp_path / "known")[0]["mfu"] == pytest.approx(0.6)
    unknown = processor(tmp_path / "unknown", JsonLines.Config(), flops_per_token=3.0)
    unknown.log(record(1))
    assert "mfu" not in lines(tmp_path / "unknown")[0]


def test_extra_numbers_cannot_take_the_name_of_others(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="names of step metrics: loss"):
        processor(tmp_path, JsonLines.Config()).log(record(1, extra={"loss": 1.0}))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_one_bar_on_a_terminal_with_log_lines_above_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    handler = logging.StreamHandler(terminal)
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [handler])
    monkeypatch.setattr(root, "level", logging.INFO)
    metrics = processor(tmp_path, ProgressBar.Config(interval_steps=2), steps=6, flops_per_token=3, peak_flops=1000)
    metrics.on_resume(2)
    metrics.log(record(3, seconds=50.0))
    logging.getLogger("elsewhere").info("a line")
    for step in range(4, 7):
        metrics.log(record(step, loss=step / 8))
    metrics.close()
    shown = terminal.getvalue()
    assert shown.count("\n") == 2  # the line, and the end of the one bar
    assert "\ra line\n" in shown.replace(" ", "").replace("aline", "a line")
    assert "2/6" in shown and "6/6" in shown
    last = shown.rstrip().split("\r")[-1]
    assert "loss=0.7500" in last and "tokens/s=200" in last and "MFU=60.0%" in last
    assert root.handlers == [handler]


def test_no_bar_where_there_is_no_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    metrics = processor(tmp_path, ProgressBar.Config(), steps=2)
    metrics.log(record(1))
    metrics.log(record(2))
    metrics.close()
    assert written.getvalue() == ""


def test_tensorboard_shows_every_number_and_hides_what_a_resume_voided(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resumed, steps, loss in ((0, range(1, 5), 1.0), (2, range(3, 6), 2.0)):
        metrics = processor(tmp_path, TensorBoard.Config())
        metrics.on_resume(resumed)
        for step in steps:
            metrics.log(record(step, loss=loss))
        metrics.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(events.Tags()["scalars"]) == {f"train/{name}" for name in COLUMNS} - {"train/step", "train/memory_bytes"}
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 1), (2, 1), (3, 2), (4, 2), (5, 2)]


def test_wandb_is_refused_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hyper_parallel.components.metrics.wandb.find_spec", lambda name: None)
    (fault,) = WandB.Config().faults()
    assert str(fault) == "project: the W&B sink needs the package wandb; pip install wandb, or leave it out"


def test_wandb_goes_on_in_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inits, logged = [], []

    class Run:
        def define_metric(self, name: str, step_metric: str) -> None:
            assert (name, step_metric) == ("train/*", "step")

        def log(self, numbers: dict[str, Any]) -> None:
            logged.append(numbers)

        def finish(self) -> None: ...

    module = types.SimpleNamespace(init=lambda **settings: inits.append(settings) or Run())
    monkeypatch.setitem(sys.modules, "wandb", module)
    for resumed in (0, 1, 0):
        metrics = processor(tmp_path, WandB.Config(project="p", mode="offline"))
        metrics.on_resume(resumed)
        metrics.log(record(resumed + 1))
        metrics.close()
    assert inits[0]["id"] == inits[1]["id"] != inits[2]["id"]
    assert (inits[0]["project"], inits[0]["mode"], inits[0]["resume"]) == ("p", "offline", "allow")
    assert logged[1]["step"] == 2 and logged[1]["train/loss"] == 1 / 3


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    metrics = processor(tmp_path, JsonLines.Config())
    with pytest.raises(RunError, match=r"metrics\.jsonl cannot be written: Is a directory; remove it, or "):
        metrics.on_resume(0)


@pytest.mark.parametrize("name", ["", "config.yaml", "./config.json", "checkpoint/"])
def test_a_name_that_is_none_or_that_of_another_file_is_refused(name: str) -> None:
    (fault,) = JsonLines.Config(filename=name).faults()
    assert str(fault) == f"filename: {name!r} is no name for lines of JSON; give one that ends in .jsonl"


@pytest.mark.parametrize("config", [ConsoleLog.Config(interval_steps=0), ProgressBar.Config(interval_steps=0)])
def test_impossible_settings(config: Any) -> None:
    assert [str(fault) for fault in config.faults()] == ["interval_steps: 0 is below 1; give 1 or more"]
