"""Context parallelism in the trainer: one loss curve with every split of the rows, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from hyper_parallel.components.validator import Validator
from hyper_parallel.config.sections import ActivationCheckpointConfig
from hyper_parallel.models.qwen3 import create_model_spec as qwen3
from tests.distributed_world import run_world
from tests.trainer.runs import metrics, tiny_config, with_parallelism

STEPS = 20
TOLERANCE = 1e-9
DENSE = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
DENSE |= {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 4096, "tie_word_embeddings": True}
Case = dict[str, Any]
"""Fields of parallelism; beside them `packing`, `model`, `recompute`, and fields of training under `training`."""

CASES: dict[int, dict[str, Case]] = {
    2: {
        **{f"cp 2, {method}": {"cp": 2, "cp_method": method} for method in ("ring", "ulysses", "allgather")},
        "cp 2, recompute": {"cp": 2, "recompute": True},
        "cp 2, pad": {"cp": 2, "packing": "pad"},
        "cp 2, dense": {"cp": 2, "model": "dense", "cp_method": "ulysses"},
        "cp 2, rows of 29": {"cp": 2, "training": {"seq_len": 29}},
        "cp 2, rank average": {"cp": 2, "training": {"loss_aggregation": "rank_average", "micro_batch_size": 2}},
    },
    4: {
        "cp 4, ring": {"cp": 4},
        "cp 4, ulysses": {"cp": 4, "cp_method": "ulysses"},
        "cp 4, rows of 29": {"cp": 4, "cp_method": "allgather", "training": {"seq_len": 29}},
        "cp 2 x tp 2": {"cp": 2, "tp": 2},
        "cp 2 x tp 2, sequence and loss parallel": {
            "cp": 2, "tp": 2, "sequence_parallel": True, "loss_parallel": True, "cp_method": "ulysses",
        },
        "cp 2 x tp 2, validate": {"cp": 2, "tp": 2, "sequence_parallel": True, "mode": "validate"},
        "cp 2 x shard 2, accumulate 2": {"cp": 2, "dp_shard": 2, "training": {"micro_batch_size": 2}},
        "cp 2 x replicate 2": {"cp": 2, "dp_replicate": 2, "cp_method": "allgather"},
        "cp 2 x shard 2, dense, pad": {"cp": 2, "dp_shard": 2, "model": "dense", "packing": "pad"},
    },
}  # fmt: skip


def config_of(folder: Path, case: Case, steps: int) -> Any:
    case = dict(case)
    training = {"micro_batch_size": 4} | case.pop("training", {})
    config = tiny_config(folder, steps=steps, **training)
    if case.pop("model", "moe") == "dense":
        config.model_spec = qwen3("debug", **DENSE)
    config.dataloader.packing = case.pop("packing", "concat")
    if case.pop("recompute", False):
        config.activation_checkpoint = ActivationCheckpointConfig(mode="full")
    config.validator = Validator.Config(enable=True, interval_steps=steps, steps=2)
    config.validator.dataloader.path = config.dataloader.path
    return with_parallelism(config, **case)


def train(folder: Path, case: Case, steps: int) -> None:
    config = config_of(folder, case, steps)
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    assert not list(config.cross_faults(world_size))
    with config.build() as trainer:
        trainer.train()


def run_cases(folder: str, world_size: int, steps: int) -> None:
    for name, case in CASES[world_size].items():
        train(Path(folder) / name, case, steps)


def reference_of(case: Case) -> Case:
    """The same run in one process."""
    return {key: case[key] for key in ("packing", "model", "training") if key in case}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Metrics of every case, each world started once, and of one process for each kind of rows and model."""
    folder = tmp_path_factory.mktemp("context_parallel")
    for world_size, cases in CASES.items():
        run_world(world_size, run_cases, str(folder), world_size, STEPS, timeout=280)
        for case in cases.values():
            single = folder / str(reference_of(case))
            if not single.exists():
                train(single, reference_of(case), STEPS)
    return folder


@pytest.mark.parametrize(
    ("name", "case"),
    [pair for cases in CASES.values() for pair in cases.items()],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_follows_the_single_process(folder: Path, name: str, case: Case) -> None:
    single, other = metrics(folder / str(reference_of(case))), metrics(folder / name)
    assert len(single) == len(other) == STEPS
    keys = [key for key in ("loss", "grad_norm", "aux_loss") if key in single[0]]
    for key in keys:
        worst = max(abs(a[key] - b[key]) for a, b in zip(single, other, strict=True))
        assert worst <= TOLERANCE, f"{key} differs by {worst}"
    assert [line["tokens"] for line in other] == [line["tokens"] for line in single]
    assert abs(single[-1]["validation_loss"] - other[-1]["validation_loss"]) <= TOLERANCE
    assert single[-1]["loss"] < single[0]["loss"] - 1.0
