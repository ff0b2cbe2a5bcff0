"""What recompute, a memory budget and swap save of activation memory, and what they cost: a step of eight blocks."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import Gate, Report
from hyper_parallel.config.sections import ActivationCheckpointConfig, CompileConfig
from hyper_parallel.distributed.activation_checkpoint import apply_activation_checkpoint
from hyper_parallel.distributed.activation_swap import SPAN
from hyper_parallel.distributed.compile import apply_compile
from hyper_parallel.models.qwen3 import create_model_spec
from hyper_parallel.protocols.model import BaseModel

ROUNDS = 5
TOKENS = 1024
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 128,
}
BUDGET = 0.3
COMPILED = "compiled"

MODES: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"mode": "full"},
    "full, every second block": {"mode": "full", "every_n_layers": 2},
    "selective": {"mode": "selective"},
    "swap": {"swap": True},
    "full, swap": {"mode": "full", "swap": True},
    COMPILED: {},
    f"{COMPILED}, memory_budget {BUDGET}": {"mode": "memory_budget", "memory_budget": BUDGET},
}
BOUNDS = {
    "full": (0.3, 1.6),
    "full, every second block": (0.7, 1.4),
    "selective": (0.8, 1.4),
    "swap": (0.3, 1.6),
    "full, swap": (0.25, 1.7),
    f"{COMPILED}, memory_budget {BUDGET}": (0.7, 1.6),
}
"""Of peak memory and of time, as a share of the same without."""


def measure(folder: Path, *, quick: bool) -> Report:
    """All modes in turns in this process. Peaks are those of torch's allocator, host copies apart."""
    torch.set_num_threads(2)
    models = {name: _model(name) for name in MODES}
    peaks = {name: _peak_bytes(model, folder) for name, model in models.items()}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(1 if quick else ROUNDS):
        for name, model in models.items():
            begin = time.perf_counter()
            _step(model)
            seconds[name].append(time.perf_counter() - begin)
    what = f"{SIZES['num_hidden_layers']} layers, hidden {SIZES['hidden_size']}, {TOKENS:,} tokens"
    gates = []
    for name, (bytes_bound, seconds_bound) in BOUNDS.items():
        base = COMPILED if name.startswith(COMPILED) else "none"
        gates += [
            Gate(
                what=f"peak activation memory, {name} / {base}, {what}",
                unit="bytes",
                ours=[peaks[name]],
                theirs=[peaks[base]],
                relation="<=",
                bound=bytes_bound,
            ),
            Gate(
                what=f"forward and backward, {name} / {base}",
                unit="seconds",
                ours=seconds[name],
                theirs=seconds[base],
                relation="<=",
                bound=seconds_bound,
            ),
        ]
    note = (
        "what swap moves to host memory is left out of its peak, as if there were a device: here it is the same memory"
    )
    return Report("activation_memory", gates, [note])


def _model(name: str) -> BaseModel:
    model = create_model_spec(**SIZES).model.build()
    model.init_weights(seed=1)
    config = ActivationCheckpointConfig(**MODES[name])
    apply_compile(model, CompileConfig(enable=name.startswith(COMPILED)), config.memory_budget)
    apply_activation_checkpoint(model, config)
    return model


def _step(model: BaseModel) -> None:
    ids = torch.arange(TOKENS)[None] % SIZES["vocab_size"]
    model(ids, labels_BT=ids, loss_fn=_square).loss_sum.backward()


def _square(hidden_BTC: torch.Tensor, head: object, labels_BT: torch.Tensor) -> torch.Tensor:
    """A loss that costs nothing: the blocks are what is measured."""
    return hidden_BTC.square().sum()


def _peak_bytes(model: BaseModel, folder: Path) -> int:
    """Most that a step has in memory at once above weights and gradients, by every allocation in its profile."""
    for _ in range(2):
        _step(model)  # compiles, and makes the gradients, which later steps add to
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        _step(model)
    folder.mkdir(parents=True, exist_ok=True)
    trace = folder / "activation_memory.json"
    profile.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    trace.unlink()
    to_host = [(event["ts"], event["ts"] + event["dur"]) for event in events if event.get("name") == SPAN]
    changes = [(event["ts"], event["args"]) for event in events if event.get("name") == "[memory]"]
    changes.sort(key=lambda change: change[0])
    live: dict[int, int] = {}
    now = peak = 0
    for moment, change in changes:
        if change["Bytes"] < 0:
            now -= live.pop(change["Addr"], 0)
        elif not any(begin <= moment <= end for begin, end in to_host):
            live[change["Addr"]] = change["Bytes"]
            now += change["Bytes"]
            peak = max(peak, now)
    return peak
