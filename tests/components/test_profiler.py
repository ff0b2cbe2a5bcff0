from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from hyper_parallel.components.profiler import Profiler


def run(config: Profiler.Config, folder: Path, steps: int) -> list[Path]:
    with config.build(dump_folder=str(folder)) as profiler:
        for step in range(1, steps + 1):
            # The length of the vector names the step in the trace.
            torch.ones(1000 + step).cumsum(0)
            profiler.step()
    return sorted((folder / "profile").glob("*.json")) if folder.exists() else []


def steps_in(trace: Path) -> list[int]:
    events = json.loads(trace.read_text())["traceEvents"]
    return [e["args"]["Input Dims"][0][0] - 1000 for e in events if e.get("name") == "aten::cumsum"]


def test_the_trace_holds_exactly_the_active_steps(tmp_path: Path) -> None:
    config = Profiler.Config(enable=True, wait_steps=2, warmup_steps=1, active_steps=3, record_shapes=True)
    (trace,) = run(config, tmp_path, 10)
    assert steps_in(trace) == [4, 5, 6]
    assert "rank0" in trace.name


def test_each_repetition_is_a_trace(tmp_path: Path) -> None:
    config = Profiler.Config(enable=True, wait_steps=1, warmup_steps=1, active_steps=1, repeat=2, record_shapes=True)
    assert sorted(step for trace in run(config, tmp_path, 10) for step in steps_in(trace)) == [3, 6]


def test_nothing_is_written_when_disabled_or_on_other_ranks(tmp_path: Path) -> None:
    assert run(Profiler.Config(), tmp_path / "a", 20) == []
    assert run(Profiler.Config(enable=True, wait_steps=1, ranks=(1,)), tmp_path / "b", 20) == []
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()


def test_a_run_that_ends_before_its_window_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        run(Profiler.Config(enable=True, wait_steps=10, warmup_steps=1, active_steps=3), tmp_path, 5)
    assert (
        "ended after 5 steps, before its window of steps 12 to 14 was full; lower profiler.wait_steps 10" in caplog.text
    )


def test_impossible_settings() -> None:
    config = Profiler.Config(wait_steps=-1, warmup_steps=-2, active_steps=0, repeat=-1, ranks=(0, -1))
    assert [fault.path for fault in config.faults()] == [
        "wait_steps",
        "warmup_steps",
        "repeat",
        "active_steps",
        "ranks",
    ]
    assert list(Profiler.Config().faults()) == []
