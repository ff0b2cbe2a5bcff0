"""Callbacks that look into a step: expert loads, gradients, memory."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hyper_parallel.config.errors import ConfigError
from hyper_parallel.config.target import Target
from hyper_parallel.distributed.grad_norm import clip_grad_norm
from hyper_parallel.models import qwen3
from hyper_parallel.platform import use_platform
from hyper_parallel.platform.base import MemoryStats
from hyper_parallel.platform.cpu import CpuPlatform
from hyper_parallel.trainer.callbacks import (
    Callback,
    GradientHealthCallback,
    MemoryMonitorCallback,
    MoEMonitorCallback,
    TrainerState,
)
from hyper_parallel.trainer.config import TrainerConfig
from hyper_parallel.trainer.errors import TrainingError
from tests.distributed_world import run_world
from tests.trainer.runs import TINY, deterministic, metrics, tiny_config, train, with_parallelism

MOE_NAMES = ("moe_max_load", "moe_mean_max_load", "moe_min_load", "moe_idle_experts")
POISONED = "layers.1.mlp.down_proj.weight"


class CountsRoutes(Callback):
    """Counts the routers' choices by itself: for each step, one array of tokens by expert for each layer."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self.steps: list[list[np.ndarray[Any, Any]]] = []
        routers = [m for part in trainer.model_parts for m in part.modules() if type(m).__name__ == "Router"]
        for layer, router in enumerate(routers):
            router.register_forward_hook(lambda module, args, routing, layer=layer: self.count(layer, routing))
        self.layers = len(routers)

    def on_step_begin(self, state: TrainerState) -> None:
        self.steps.append([np.zeros(TINY["num_experts"]) for _ in range(self.layers)])

    def count(self, layer: int, routing: Any) -> None:
        for expert in routing.experts_BTK.flatten().tolist():
            self.steps[-1][layer][expert] += 1


def moe_config(folder: str | Path, *, log_steps: int = 1) -> TrainerConfig:
    config = tiny_config(folder, steps=4)
    config.callbacks = (MoEMonitorCallback.Config(log_steps=log_steps),)
    return config


def test_expert_loads_are_those_of_the_routers(dump_folder: str) -> None:
    with moe_config(dump_folder).build() as trainer:
        # In the first layer with experts nobody is sent to the last one.
        trainer.model_parts[0].layers[0].mlp.router.register_forward_hook(
            lambda module, args, routing: routing._replace(experts_BTK=routing.experts_BTK % 3)
        )
        counts = CountsRoutes(trainer)
        trainer.add_callback(counts)
        trainer.train()
    lines = metrics(dump_folder)
    assert counts.layers == 2 and all(sum(map(sum, step)) == 2 * 2 * 256 for step in counts.steps)
    for line, step in zip(lines, counts.steps, strict=True):
        loads = [layer / (256 * 2 / 4) for layer in step]  # tokens x top_k / experts is the mean
        assert line["moe_max_load"] == pytest.approx(max(map(max, loads)), abs=1e-12)
        assert line["moe_mean_max_load"] == pytest.approx(sum(map(max, loads)) / 2, abs=1e-12)
        assert line["moe_min_load"] == pytest.approx(min(map(min, loads)), abs=1e-12)
        assert line["moe_idle_experts"] == sum(int((layer == 0).sum()) for layer in step)
    assert lines[0]["moe_idle_experts"] == 1 and lines[0]["moe_max_load"] > lines[0]["moe_mean_max_load"] > 1


def test_expert_loads_at_the_due_steps_only(dump_folder: str) -> None:
    lines = train(moe_config(dump_folder, log_steps=2))
    assert [line["step"] for line in lines if "moe_max_load" in line] == [2, 4]


def test_a_model_without_experts_is_refused(dump_folder: str) -> None:
    config = moe_config(dump_folder)
    config.model_spec = qwen3.create_model_spec("debug", num_hidden_layers=1, hidden_size=32)
    with pytest.raises(ConfigError) as error:
        config.build()
    (line,) = str(error.value).splitlines()
    assert line.startswith("callbacks.0._target_: MoEMonitorCallback: Qwen3") and "has no experts; leave it out" in line


class Poisons(Callback):
    """Puts a value into one gradient of the second step, on one rank."""

    def __init__(self, trainer: Any, value: float = math.nan, rank: int = 0) -> None:
        super().__init__(trainer)
        self.value = value if rank == (dist.get_rank() if dist.is_initialized() else 0) else None

    def on_substep_end(self, state: TrainerState) -> None:
        grad: Any = self.trainer.model_parts[0].get_parameter(POISONED).grad
        if dist.is_initialized():  # before the last micro-batch they are not yet reduced to shards
            grad = grad.to_local() if hasattr(grad, "to_local") else None
        if state.global_step == 2 and self.value is not None and grad is not None:
            grad[0, 0] = self.value


def healthy_config(folder: str | Path, **settings: Any) -> TrainerConfig:
    config = tiny_config(folder, steps=4)
    config.callbacks = (GradientHealthCallback.Config(**settings),)
    return config


def weights_of(trainer: Any) -> list[torch.Tensor]:
    return [
        (p.to_local() if hasattr(p, "to_local") else p).detach().clone() for p in trainer.model_parts[0].parameters()
    ]


class KeepsWeights(Callback):
    """Remembers the weights before each step."""

    def on_step_begin(self, state: TrainerState) -> None:
        self.weights = weights_of(self.trainer)


def train_until_refused(config: TrainerConfig, **poison: Any) -> str:
    """The error of the run, once it is checked that no weight was changed in its step."""
    with config.build() as trainer:
        keeper = KeepsWeights(trainer)
        trainer.add_callback(keeper)
        if poison:
            trainer.add_callback(Poisons(trainer, **poison))
        with pytest.raises(TrainingError) as error:
            trainer.train()
        assert all(torch.equal(a, b) for a, b in zip(keeper.weights, weights_of(trainer), strict=True))
    return str(error.value)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_named(dump_folder: str, value: float) -> None:
    assert train_until_refused(healthy_config(dump_folder), value=value) == (
        f"step 2: the gradient norm is {value}, so no weight was changed; gradients with elements that are not finite: "
        f"{POISONED} (1 on rank 0); lower optimizer.lr, or find the module with debug.check_nan_inf"
    )
    assert [line["step"] for line in metrics(dump_folder)] == [1]


def test_a_norm_above_the_limit_is_refused(dump_folder: str) -> None:
    lines = train(healthy_config(dump_folder))
    norms = [line["grad_norm"] for line in lines]
    limit = sorted(norms)[-2]  # all but the largest pass
    message = train_until_refused(healthy_config(dump_folder, max_norm=limit))
    assert message.startswith(
        f"step {norms.index(max(norms)) + 1}: the gradient norm is {max(norms):.6g}, above the {limit:.6g} of "
    )


def test_finite_gradients_whose_squares_are_not() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.full((2,), 3e38)
    trainer = type("Trainer", (), {"model_parts": [torch.nn.ParameterList([parameter])]})()
    state = TrainerState(global_step=5, grad_norm=float(clip_grad_norm([parameter], None)))
    with pytest.raises(TrainingError, match=r"norm is inf, .* every gradient is finite, but the sum of their squares"):
        GradientHealthCallback.Config().build(trainer=trainer).on_pre_optimizer_step(state)


def on_rank(folder: str) -> dict[str, Any]:
    train_on_two = with_parallelism(moe_config(Path(folder) / "moe"), dp_shard=2)
    with train_on_two.build() as trainer:
        trainer.train()
    sick = with_parallelism(healthy_config(Path(folder) / "sick"), dp_shard=2)
    return {"error": train_until_refused(sick, rank=1)}


def test_on_two_ranks(tmp_path: Path) -> None:
    first, second = run_world(2, on_rank, str(tmp_path))
    assert first == second
    assert f"elements that are not finite: {POISONED} (1 on rank 1); lower optimizer.lr" in first["error"]
    one, two = train(moe_config(tmp_path / "one")), metrics(tmp_path / "moe")
    assert [[line[name] for name in MOE_NAMES] for line in two] == [[line[name] for name in MOE_NAMES] for line in one]


class Measured(CpuPlatform):
    """Memory that grows by a byte with each look, and a peak of a hundred more since the last reset."""

    looks = 0
    resets = 0

    def memory(self) -> MemoryStats:
        self.looks += 1
        return MemoryStats(allocated_bytes=self.looks, max_allocated_bytes=100 + self.looks, ooms=0)

    def reset_peak_memory(self) -> None:
        self.resets += 1


class Unmeasured(CpuPlatform):
    """A host that does not tell."""

    name = "blind"

    def memory(self) -> MemoryStats:
        return MemoryStats()


@pytest.mark.parametrize("reset", [False, True])
def test_memory_at_the_due_steps(dump_folder: str, reset: bool) -> None:
    config = tiny_config(dump_folder, steps=5)
    config.callbacks = (MemoryMonitorCallback.Config(log_steps=2, reset_peak_each_step=reset),)
    platform = Measured()
    with use_platform(platform):
        lines = train(config)
    assert platform.resets == (5 if reset else 0)
    seen = [{k: v for k, v in line.items() if k.startswith("memory_") and k != "memory_bytes"} for line in lines]
    assert [step for step, numbers in enumerate(seen, start=1) if numbers] == [2, 4]
    # Looks: one at the build, one a step by the trainer, one by the callback where it is due.
    assert seen[1] == {"memory_allocated_bytes": 4, "memory_max_allocated_bytes": 104, "memory_ooms": 0}
    assert seen[3]["memory_allocated_bytes"] == 7


def test_memory_that_cannot_be_measured_is_refused(dump_folder: str) -> None:
    config = tiny_config(dump_folder, steps=1)
    config.callbacks = (MemoryMonitorCallback.Config(),)
    with use_platform(Unmeasured()), pytest.raises(ConfigError) as error:
        config.build()
    assert str(error.value) == (
        "callbacks.0._target_: MemoryMonitorCallback: blind cannot measure memory; leave it out"
    )


def test_monitors_change_no_number(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "watched", steps=5)
    config.callbacks = (
        MoEMonitorCallback.Config(),
        GradientHealthCallback.Config(max_norm=1e6),
        MemoryMonitorCallback.Config(log_steps=1, reset_peak_each_step=True),
        Target.of(CountsRoutes),
    )
    assert deterministic(train(config)) == deterministic(train(tiny_config(tmp_path / "plain", steps=5)))
