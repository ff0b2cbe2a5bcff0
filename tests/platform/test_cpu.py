"""The CPU platform: real numbers where the host has them, None where it has not, and never an exception."""

from __future__ import annotations

import inspect
import json
import logging
import time
from pathlib import Path

import pytest
import torch

from hyper_parallel.platform import cpu
from hyper_parallel.platform.base import MemoryStats, Platform
from hyper_parallel.platform.cpu import CpuPlatform

MIB = 1024 * 1024


@pytest.fixture
def platform() -> CpuPlatform:
    return CpuPlatform()


@pytest.mark.parametrize("rank", [None, 0, 7])
def test_device_has_no_index(platform: CpuPlatform, rank: int | None) -> None:
    platform.set_device(rank)
    assert platform.device(rank) == torch.device("cpu")
    assert platform.device(rank).index is None


@pytest.mark.parametrize(
    ("requested", "backend", "warns"),
    [("auto", "gloo", False), ("gloo", "gloo", False), ("fake", "fake", False), ("nccl", "gloo", True),
     ("cpu:gloo,cuda:nccl", "gloo", True), ("hccl", "gloo", True)],
)  # fmt: skip
def test_comm_backend(
    platform: CpuPlatform, caplog: pytest.LogCaptureFixture, requested: str, backend: str, warns: bool
) -> None:
    assert platform.comm_backend(requested) == backend
    assert (requested in caplog.text) == warns


def test_every_method_without_required_arguments_runs_twice(platform: CpuPlatform) -> None:
    called = []
    for name, method in inspect.getmembers(platform, inspect.ismethod):
        required = [p for p in inspect.signature(method).parameters.values() if p.default is p.empty]
        if not name.startswith("_") and not required:
            method()
            method()
            called.append(name)
    assert {"synchronize", "empty_cache", "memory", "reset_peak_memory", "rng_state", "stream", "event"} <= set(called)


def test_memory_follows_the_process(platform: CpuPlatform) -> None:
    platform.reset_peak_memory()
    before = platform.memory()
    if before.max_allocated_bytes is None:
        pytest.skip("this system does not tell a process its memory")
    block = torch.ones(200 * MIB, dtype=torch.uint8)
    during = platform.memory().allocated_bytes
    del block
    assert during is not None and before.allocated_bytes is not None
    assert during - before.allocated_bytes > 150 * MIB
    peak = platform.memory_bytes()
    assert peak is not None and peak > during - 4 * MIB  # the kernel counts pages in batches
    assert (before.reserved_bytes, before.free_bytes, before.total_bytes, before.ooms) == (None, None, None, None)


def test_memory_is_none_where_there_is_no_proc(
    platform: CpuPlatform, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cpu, "_STATUS", tmp_path / "absent")
    monkeypatch.setattr(cpu, "_CLEAR_REFS", tmp_path / "absent" / "absent")
    platform.reset_peak_memory()
    assert platform.memory() == MemoryStats()
    assert platform.memory_bytes() is None


def test_base_platform_measures_nothing_and_runs() -> None:
    assert Platform().memory() == MemoryStats()
    assert Platform().peak_flops(torch.bfloat16) is None


def test_event_counts_milliseconds(platform: CpuPlatform) -> None:
    start, end = platform.event(), platform.event()
    start.record()
    time.sleep(0.02)
    with platform.stream() as stream:
        stream.wait_stream(platform.current_stream())
        end.record(stream)
    assert start.elapsed_time(end) >= 20  # sleep never returns early; a unit of seconds would give 0.02
    assert end.elapsed_time(start) == -start.elapsed_time(end)


def test_seed_and_random_state_repeat(platform: CpuPlatform) -> None:
    import random

    import numpy as np

    def draw() -> tuple[float, float, list[float]]:
        return random.random(), float(np.random.rand()), torch.rand(3).tolist()

    platform.seed_all(2**40 + 1)  # beyond what numpy takes
    first = draw()
    platform.seed_all(2**40 + 1)
    assert draw() == first

    state = platform.rng_state()
    assert state.keys() == {"cpu"}
    expected = torch.rand(3)
    platform.set_rng_state(state)
    assert torch.equal(torch.rand(3), expected)


def test_foreign_random_state_is_named(platform: CpuPlatform, caplog: pytest.LogCaptureFixture) -> None:
    state = platform.rng_state()
    expected = torch.rand(3)
    with caplog.at_level(logging.WARNING):
        platform.set_rng_state({**state, "npu": torch.zeros(16, dtype=torch.uint8)})
    assert torch.equal(torch.rand(3), expected)
    assert "npu was not restored on cpu" in caplog.text


def test_deterministic_can_be_undone(platform: CpuPlatform) -> None:
    try:
        platform.set_deterministic(True)
        platform.set_deterministic(True)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        platform.set_deterministic(False)
    assert not torch.are_deterministic_algorithms_enabled()


def test_autocast_computes_in_its_dtype(platform: CpuPlatform) -> None:
    a = torch.ones(2, 2)
    with platform.autocast(torch.bfloat16):
        assert (a @ a).dtype == torch.bfloat16


def test_profiler_writes_one_trace_a_window(platform: CpuPlatform, tmp_path: Path) -> None:
    profiler = platform.profiler(tmp_path, wait_steps=1, warmup_steps=1, active_steps=2)
    profiler.start()
    for _ in range(6):
        torch.ones(4, 4) @ torch.ones(4, 4)
        profiler.step()
    profiler.stop()
    (trace,) = tmp_path.iterdir()
    assert trace.name.startswith("rank0.") and trace.name.endswith(".pt.trace.json")
    events = [event.get("name") for event in json.loads(trace.read_text())["traceEvents"]]
    assert events.count("aten::mm") == 2  # the two active steps


def test_plain_answers(platform: CpuPlatform) -> None:
    assert platform.bf16_supported() and platform.supports_float64 and not platform.pin_memory
    assert platform.peak_flops(torch.float32) is None
    assert platform.compile_backend("inductor") == "inductor"
    assert platform.name
