"""Recompute, memory budget and swap under every parallelism: what is kept changes, the loss curve does not."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hyper_parallel.config.sections import ActivationCheckpointConfig
from hyper_parallel.trainer.config import TrainerConfig
from tests.distributed_world import run_world
from tests.trainer.runs import deterministic, metrics, tiny_config
from tests.trainer.test_tensor_parallel import LP, SP, TOLERANCE, VALIDATE, Case, train, worst

STEPS = 4


@dataclass(frozen=True)
class MemoryCase(Case):
    """A case with a section `activation_checkpoint` of its own."""

    memory: dict[str, Any] = field(default_factory=dict)

    def config(self, folder: str | Path, steps: int) -> TrainerConfig:
        config = super().config(folder, steps)
        config.activation_checkpoint = ActivationCheckpointConfig(**self.memory)
        return config

    @property
    def reference(self) -> MemoryCase:
        return MemoryCase(dense=self.dense, sizes=self.sizes)


FULL, SELECTIVE, SWAP = {"mode": "full"}, {"mode": "selective"}, {"swap": True}
BUDGET = {"mode": "memory_budget", "memory_budget": 0.3}
OTHER_LAYERS, OFFLOAD, REPLICAS = {"every_n_layers": 2}, {"cpu_offload": True}, {"dp_replicate": 2, "dp_shard": 1}
COMPILED: dict[str, Any] = {"compile": True, "dense": True, "sizes": {"num_hidden_layers": 2}}
EP = {"ep": 2, "dp_shard": 2}
TP, CP, PP = {"tp": 2, "dp_shard": 1}, {"cp": 2, "dp_shard": 1}, {"pp": 2, "dp_shard": 1}

CASES: dict[int, dict[str, MemoryCase]] = {
    2: {
        "ep 2, offload, selective, swap": MemoryCase(EP | OFFLOAD, 2, memory=SELECTIVE | SWAP),
        "ep 2, offload, budget, swap": MemoryCase(EP | OFFLOAD, 2, memory=BUDGET | SWAP, **COMPILED | {"dense": False}),
        "replicate 2, selective, swap, other layers": MemoryCase(REPLICAS, 4, memory=SELECTIVE | SWAP | OTHER_LAYERS),
        "replicate 2, budget, swap": MemoryCase(REPLICAS, 4, memory=BUDGET | SWAP, **COMPILED),
        "tp 2, sp, lp, selective, swap": MemoryCase(TP | SP | LP, 4, memory=SELECTIVE | SWAP),
        "tp 2, sp, lp, validate, selective": MemoryCase(TP | SP | LP | VALIDATE, memory=SELECTIVE),
        "tp 2, sp, lp, budget, swap": MemoryCase(TP | SP | LP, memory=BUDGET | SWAP, **COMPILED),
        "ring, selective, swap": MemoryCase(CP, memory=SELECTIVE | SWAP),
        "ulysses, full, swap": MemoryCase(CP | {"cp_method": "ulysses"}, memory=FULL | SWAP),
        "ulysses, selective": MemoryCase(CP | {"cp_method": "ulysses"}, memory=SELECTIVE),
        "all-gather, budget, swap": MemoryCase(CP | {"cp_method": "allgather"}, memory=BUDGET | SWAP, **COMPILED),
        "1f1b, selective, swap": MemoryCase(PP, 2, memory=SELECTIVE | SWAP),
        "zbv, swap": MemoryCase(PP | {"pp_schedule": "zbv"}, 2, sizes={"num_hidden_layers": 4}, memory=SWAP),
        "1f1b, budget, swap": MemoryCase(PP, 2, memory=BUDGET | SWAP, **COMPILED),
    },
}


def run_cases(folder: str, world_size: int) -> None:
    for name, case in CASES[world_size].items():
        train(case.config(Path(folder) / name, STEPS))
    for name, memory in BITWISE.items():
        train(bitwise_config(Path(folder) / f"sharded {name}", memory))


BITWISE = {
    "none": {},
    "full": FULL,
    "full, other layers": FULL | OTHER_LAYERS,
    "full, swap": FULL | SWAP,
    "selective": SELECTIVE,
    "selective, swap": SELECTIVE | SWAP,
    "swap": SWAP,
}


def bitwise_config(folder: Path, memory: dict[str, Any]) -> TrainerConfig:
    config = tiny_config(folder, steps=4, dtype="float32")
    config.activation_checkpoint = ActivationCheckpointConfig(**memory)
    return config


def single_name(case: MemoryCase) -> str:
    return f"single {case.dense} {case.sizes}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("activation_memory")
    run_world(2, run_cases, str(folder), 2, timeout=580)
    for name, memory in BITWISE.items():
        train(bitwise_config(folder / f"alone {name}", memory))
    for case in CASES[2].values():
        if not (single := folder / single_name(case)).exists():
            train(case.reference.config(single, STEPS))
    return folder


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES[2])
def test_follows_the_single_process(folder: Path, name: str) -> None:
    single = metrics(folder / single_name(CASES[2][name]))
    for key, difference in worst(single, metrics(folder / name)).items():
        assert difference <= TOLERANCE, f"{key} differs by {difference}"


@pytest.mark.slow
@pytest.mark.parametrize("place", ["alone", "sharded"])
@pytest.mark.parametrize("name", [name for name in BITWISE if name != "none"])
def test_no_bit_changes(folder: Path, place: str, name: str) -> None:
    lines = deterministic(metrics(folder / f"{place} {name}"))
    assert len(lines) == 4 and lines == deterministic(metrics(folder / f"{place} none"))
