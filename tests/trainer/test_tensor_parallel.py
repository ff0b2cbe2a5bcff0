"""One loss curve under tensor parallelism: in float64 every case follows the single process over 50 steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hyper_parallel.components.data import TextDataLoader
from hyper_parallel.components.loss import ChunkedCELoss, CrossEntropyLoss
from hyper_parallel.config.sections import ActivationCheckpointConfig, CompileConfig
from hyper_parallel.models import qwen3, qwen3_moe
from hyper_parallel.trainer.config import TrainerConfig
from tests.distributed_world import run_world
from tests.trainer.runs import TINY, metrics, small_corpus, tiny_config, with_parallelism

STEPS, SAVED, RESUMED = 50, 10, 20
TOLERANCE = 1e-9
DENSE = {
    name: value for name, value in TINY.items() if "expert" not in name and "mlp" not in name and "moe" not in name
}
DENSE.pop("router_aux_loss_coef")


@dataclass(frozen=True)
class Case:
    """A run, and what the single process that it is compared with does in the same way."""

    parallelism: dict[str, Any] = field(default_factory=dict)
    rows: int = 8
    """In a micro-batch."""
    dense: bool = False
    sizes: dict[str, Any] = field(default_factory=dict)
    packing: str = "concat"
    whole_logits: bool = False
    recompute: bool = False
    compile: bool = False

    def config(self, folder: str | Path, steps: int) -> TrainerConfig:
        config = with_parallelism(tiny_config(folder, steps=steps, micro_batch_size=self.rows), **self.parallelism)
        family, sizes = (qwen3, DENSE) if self.dense else (qwen3_moe, TINY)
        config.model_spec = family.create_model_spec("debug", **sizes | self.sizes)
        config.dataloader = TextDataLoader.Config(path=small_corpus(), packing=self.packing)
        config.loss = CrossEntropyLoss.Config() if self.whole_logits else ChunkedCELoss.Config(chunk_tokens=48)
        config.activation_checkpoint = ActivationCheckpointConfig(mode="full" if self.recompute else "none")
        config.compile = CompileConfig(enable=self.compile, backend="aot_eager")
        return config

    @property
    def reference(self) -> Case:
        return Case(dense=self.dense, sizes=self.sizes, packing=self.packing)


SP, LP, VALIDATE = {"sequence_parallel": True}, {"loss_parallel": True}, {"mode": "validate"}
TIED, BIASED, WIDE = {"tie_word_embeddings": True}, {"attention_bias": True}, {"num_key_value_heads": 4}
TP = {"tp": 2, "dp_shard": 1}

CASES: dict[int, dict[str, Case]] = {
    1: {
        "recompute, compile, accumulate 2": Case(rows=4, recompute=True, compile=True),
    },
    2: {
        "moe": Case(TP),
        "moe, validate": Case(TP | VALIDATE),
        "moe, sp, lp, tied, recompute, accumulate 2": Case(TP | SP | LP, 4, sizes=TIED, recompute=True),
        "moe, sp, lp, tied, validate, recompute, accumulate 2": Case(
            TP | SP | LP | VALIDATE, 4, sizes=TIED, recompute=True
        ),
        "moe, lp, pad": Case(TP | LP, packing="pad"),
        "dense, sp, tied": Case(TP | SP, dense=True, sizes=TIED),
        "dense, sp, lp, whole logits, biases": Case(TP | SP | LP, dense=True, sizes=BIASED, whole_logits=True),
        "dense, sp, lp, biases, validate": Case(TP | SP | LP | VALIDATE, dense=True, sizes=BIASED),
        "dense, compile, recompute, lp, sp": Case(TP | SP | LP, 4, dense=True, recompute=True, compile=True),
    },
    4: {
        "moe, shard 2, sp, lp": Case({"tp": 2, "dp_shard": 2} | SP | LP, 4),
        "moe, replicate 2, offload, compile, recompute, sp, lp, accumulate 2": Case(
            {"tp": 2, "dp_replicate": 2, "dp_shard": 1, "cpu_offload": True} | SP | LP, 2, recompute=True, compile=True
        ),
        "moe, tied, shard 2, offload, compile, recompute, sp, lp, accumulate 2": Case(
            {"tp": 2, "dp_shard": 2, "cpu_offload": True} | SP | LP, 2, sizes=TIED, recompute=True, compile=True
        ),
        "dense, replicate 2, validate, offload, recompute, sp, lp, accumulate 2": Case(
            {"tp": 2, "dp_replicate": 2, "dp_shard": 1, "cpu_offload": True} | SP | LP | VALIDATE,
            2,
            dense=True,
            recompute=True,
        ),
        "dense, shard 2, validate, pad": Case({"tp": 2, "dp_shard": 2} | VALIDATE, 4, dense=True, packing="pad"),
        "moe, tp 4, sp, lp": Case({"tp": 4, "dp_shard": 1} | SP | LP, sizes=WIDE),
        "replicate 2 x shard 2, recompute": Case({"dp_replicate": 2, "dp_shard": 2}, 2, recompute=True),
    },
}
ALL = [(world_size, name) for world_size, cases in CASES.items() for name in cases]


def train(config: TrainerConfig) -> dict[str, torch.Tensor]:
    """Trains, and returns the whole weights."""
    assert not list(config.cross_faults(dist.get_world_size() if dist.is_initialized() else 1))
    with config.build() as trainer:
        trainer.train()
        return {
            name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
            for name, p in trainer.model_parts[0].named_parameters()
        }


def run_cases(folder: str, world_size: int) -> None:
    for name, case in CASES[world_size].items():
        train(case.config(Path(folder) / name, STEPS))


@pytest.fixture(scope="module")
def curves(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, list[dict[str, Any]]]]:
    """metrics.jsonl by case, for a world size; each world is started once."""
    folder, done = tmp_path_factory.mktemp("tensor_parallel"), {}

    def curves_of(world_size: int) -> dict[str, list[dict[str, Any]]]:
        if world_size not in done:
            run_world(world_size, run_cases, str(folder), world_size, timeout=290)
            done[world_size] = {name: metrics(folder / name) for name in CASES[world_size]}
        return done[world_size]

    return curves_of


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], list[dict[str, Any]]]:
    folder, done = tmp_path_factory.mktemp("references"), {}

    def reference_of(case: Case) -> list[dict[str, Any]]:
        key = repr(case.reference)
        if key not in done:
            train(case.reference.config(folder / str(len(done)), STEPS))
            done[key] = metrics(folder / str(len(done)))
        return done[key]

    return reference_of


def worst(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> dict[str, float]:
    assert [line["step"] for line in first] == [line["step"] for line in second]
    keys = [key for key in ("loss", "grad_norm", "aux_loss", "validation_loss") if any(key in line for line in first)]
    return {
        key: max(abs(a[key] - b[key]) for a, b in zip(first, second, strict=True) if key in a or key in b)
        for key in keys
    }


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("world_size", "name"), ALL)
def test_follows_the_single_process(curves: Any, references: Any, world_size: int, name: str) -> None:
    reference, curve = references(CASES[world_size][name]), curves(world_size)[name]
    for key, difference in worst(reference, curve).items():
        assert difference <= TOLERANCE, f"{key} differs by {difference}"
    assert [line["tokens"] for line in curve] == [256] * STEPS
    assert ("aux_loss" in curve[0]) == (not CASES[world_size][name].dense)
    assert curve[-1]["loss"] < curve[0]["loss"] - 1.0  # the curves fall: they are not equal because nothing moves


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_validate_agrees_with_production(curves: Any) -> None:
    checked = 0
    for name, case in CASES[2].items():
        if case.parallelism.get("mode") == "validate":
            production = next(
                other
                for other, plain in CASES[2].items()
                if plain.parallelism == {k: v for k, v in case.parallelism.items() if k != "mode"}
                and (plain.dense, plain.sizes, plain.rows) == (case.dense, case.sizes, case.rows)
            )
            assert max(worst(curves(2)[name], curves(2)[production]).values()) <= 1e-12, name
            checked += 1
    assert checked == 3
