"""What parallelism.mode production saves over validate: a step of four blocks at tp 2, in the same run."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.report import Gate, Report
from hyper_parallel.config.sections import ParallelismConfig
from hyper_parallel.distributed.parallel_dims import ParallelDims
from hyper_parallel.models.qwen3 import create_model_spec
from hyper_parallel.protocols.boundary import Mode
from hyper_parallel.protocols.model import BaseModel
from tests.distributed_world import run_world

TIMES = 1.3
ROUNDS, STEPS = 5, 10
TOKENS = 64
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 128,
}


def measure(folder: Path, *, quick: bool) -> Report:
    """Both modes in turns on two ranks of one thread each: DTensor's dispatch is the difference."""
    seconds, _ = run_world(2, _rounds, 1 if quick else ROUNDS, timeout=600)
    gate = Gate(
        what=f"forward and backward in validate mode / production, tp 2, 4 layers, hidden 512, {TOKENS} tokens",
        unit="seconds",
        ours=seconds["validate"],
        theirs=seconds["production"],
        relation=">=",
        bound=TIMES,
    )
    return Report("tensor_parallel_modes", [gate])


def _rounds(rounds: int) -> dict[Mode, list[float]]:
    models: dict[Mode, BaseModel] = {mode: _model(mode) for mode in ("validate", "production")}
    for model in models.values():
        _seconds(model)
    taken: dict[Mode, list[float]] = {mode: [] for mode in models}
    for _ in range(rounds):
        for mode, model in models.items():
            taken[mode].append(_seconds(model))
    return taken


def _model(mode: Mode) -> BaseModel:
    parallelism = ParallelismConfig(tp=2, mode=mode)
    dims = ParallelDims.from_config(parallelism, dist.get_world_size())
    dims.build_mesh("cpu")
    config = create_model_spec(**SIZES).model
    config.set_sharding_config(parallelism)
    model = config.build()
    model.parallelize(dims, mode)
    model.init_weights(seed=1)
    return model


def _seconds(model: BaseModel) -> float:
    """Of one step, the mean of `STEPS`."""
    ids = torch.arange(TOKENS)[None]
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(STEPS):
        model(ids, labels_BT=ids, loss_fn=_square).loss_sum.backward()
        model.zero_grad()
    return (time.perf_counter() - begin) / STEPS


def _square(hidden_BTC: torch.Tensor, head: object, labels_BT: torch.Tensor) -> torch.Tensor:
    """A loss that costs nothing: the blocks are what is measured."""
    return hidden_BTC.square().sum()
