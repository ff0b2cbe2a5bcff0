"""One loss curve under expert parallelism: in float64 every case follows the single process."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hyper_parallel.components.checkpoint import CheckpointManager
from hyper_parallel.components.data import TextDataLoader
from hyper_parallel.components.validator import Validator
from hyper_parallel.config.sections import ParallelismConfig
from hyper_parallel.distributed.parallel_dims import ParallelDims
from hyper_parallel.models import load_hf, qwen3
from hyper_parallel.protocols.model import ModelOutput
from hyper_parallel.trainer.callbacks import ExpertDispatchCallback, MoEMonitorCallback
from hyper_parallel.trainer.config import TrainerConfig
from tests.distributed_world import run_world
from tests.trainer.runs import metrics, small_corpus, tiny_config, with_parallelism
from tests.trainer.test_tensor_parallel import DENSE, LP, SP, TOLERANCE, VALIDATE, WIDE, Case, worst

STEPS, SHORT = 12, 6


@dataclass(frozen=True)
class SpreadCase(Case):
    """A case of four key heads and eight experts, with validations and the loads of the experts."""

    sizes: dict[str, Any] = field(default_factory=lambda: WIDE | {"num_experts": 8})
    steps: int = SHORT
    """Of a run of STEPS, so that all compare with one curve."""

    def config(self, folder: str | Path, steps: int) -> TrainerConfig:
        config = super().config(folder, steps)
        config.callbacks = (MoEMonitorCallback.Config(log_steps=2),)
        held_out = TextDataLoader.Config(path=small_corpus(), shuffle=False)
        config.validator = Validator.Config(enable=True, interval_steps=4, steps=1, dataloader=held_out)
        return config


EP, EP_TP = {"ep": 2, "dp_shard": 2}, {"ep": 2, "dp_shard": 2, "tp": 2}

CASES: dict[int, dict[str, SpreadCase]] = {
    2: {
        "ep 2": SpreadCase(EP, 4, steps=STEPS),
        "cp 2": SpreadCase({"ep": 2, "cp": 2, "dp_shard": 1, "cp_method": "ulysses"}, 4, recompute=True),
        "compile, recompute, accumulate 2": SpreadCase(EP, 2, compile=True, recompute=True, steps=2),
    },
    4: {
        "shard 4, recompute, accumulate 2": SpreadCase({"ep": 2, "dp_shard": 4}, 1, recompute=True),
        "ep 4, offload": SpreadCase({"ep": 4, "dp_shard": 4, "cpu_offload": True}, 2),
        "replicate 2": SpreadCase(EP | {"dp_replicate": 2}, 2),
        "tp 2": SpreadCase(EP_TP, 4),
        "tp 2, sp, lp, accumulate 2": SpreadCase(EP_TP | SP | LP, 2),
        "tp 2, sp, lp, accumulate 2, validate": SpreadCase(EP_TP | SP | LP | VALIDATE, 2),
        "ring of 2, shard 2, ep 4": SpreadCase({"ep": 4, "cp": 2, "dp_shard": 2}, 4),
        "ring of 2, tp 2": SpreadCase({"ep": 2, "cp": 2, "tp": 2, "dp_shard": 1} | SP, 8),
    },
}
ALL = [(world_size, name) for world_size, cases in CASES.items() for name in cases]
SINGLE = SpreadCase()
LAYOUTS = {"ep 2 x shard 4": CASES[4]["shard 4, recompute, accumulate 2"], "tp 2 x ep 2": CASES[4]["tp 2"]} | {
    "shard 4": SpreadCase({"dp_shard": 4}, 2),
    "replicate 2 x ep 2": CASES[4]["replicate 2"],
}
"""Each goes on from the one before it, the first from a single process, which goes on from the last."""


def train(config: TrainerConfig, steps: int) -> None:
    assert not list(config.cross_faults(dist.get_world_size() if dist.is_initialized() else 1))
    with config.build() as trainer:
        trainer.training_steps = steps
        trainer.train()


def saving(case: SpreadCase, folder: Path) -> TrainerConfig:
    config = case.config(folder, STEPS)
    config.checkpoint = CheckpointManager.Config(interval_steps=2, keep_latest_k=1)
    return config


def run_cases(folder: str, world_size: int) -> dict[str, Any]:
    """Every case of `world_size`, then what else takes a world of that size."""
    for name, case in CASES[world_size].items():
        train(case.config(Path(folder) / name, STEPS), case.steps)
    if world_size == 2:
        return {"loaded": export_and_load(Path(folder)), "loads": []}
    for steps, case in enumerate(LAYOUTS.values(), start=2):
        train(saving(case, Path(folder) / "resumed"), 2 * steps)
    return {"loads": measured_loads()}


def export_and_load(folder: Path) -> dict[str, torch.Tensor]:
    """The whole weights of a run that starts from another run's drawn and exported ones."""
    case = CASES[2]["ep 2"]
    with case.config(folder / "exporting", 2).build() as trainer:
        trainer.checkpointer.export_hf(str(folder / "exported"))
    config = case.config(folder / "loading", 2)
    config.training.seed = 7  # weights that are loaded do not depend on it
    config.checkpoint = CheckpointManager.Config(load_from=str(folder / "exported"))
    with config.build() as trainer:
        trainer.checkpointer.load()
        return {name: p.full_tensor().detach() for name, p in trainer.model_parts[0].named_parameters()}


def measured_loads() -> list[dict[str, float]]:
    """Two groups of two ranks, two layers of four experts; each rank has 10 x (rank + 1) assignments in a layer."""
    dims = ParallelDims.from_config(ParallelismConfig(ep=2, dp_shard=4), 4)
    dims.build_mesh("cpu")
    rank, numbers = dist.get_rank(), {}
    callback = ExpertDispatchCallback(SimpleNamespace(parallel_dims=dims))
    tokens_LE = torch.tensor([[4, 1, 2, 3], [0, 0, 10, 0]]) * (rank + 1)
    for share in (tokens_LE - 1, torch.ones_like(tokens_LE)):  # two micro-batches
        callback.on_substep_end(SimpleNamespace(model_output=ModelOutput(tokens_per_expert=share)))
    callback.on_step_end(SimpleNamespace(add_metric=numbers.__setitem__))
    return [numbers]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Metrics of every case, below "single" those of one process, and below "resumed" those of a chain of layouts."""
    folder = tmp_path_factory.mktemp("expert_parallel")
    train(SINGLE.config(folder / "single", STEPS), STEPS)
    train(saving(SINGLE, folder / "resumed"), 2)
    return folder


@pytest.fixture(scope="module")
def by_rank(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """What each rank of each world found."""
    found = {size: run_world(size, run_cases, str(folder), size, timeout=580) for size in CASES}
    train(saving(SINGLE, folder / "resumed"), 12)
    return found


def assert_follows(single: list[dict[str, Any]], curve: list[dict[str, Any]], steps: int) -> None:
    assert [line["step"] for line in curve] == list(range(1, steps + 1))
    for key, difference in worst(single[:steps], curve).items():
        assert difference <= TOLERANCE, f"{key} differs by {difference}"
    for mine, line in zip(single, curve, strict=False):
        loads = [key for key in mine if key.startswith("moe_")]
        assert {key: line.get(key) for key in loads} == pytest.approx({key: mine[key] for key in loads})


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("world_size", "name"), ALL)
def test_follows_the_single_process(folder: Path, by_rank: Any, world_size: int, name: str) -> None:
    case, single = CASES[world_size][name], metrics(folder / "single")
    curve = metrics(folder / name)
    assert_follows(single, curve, case.steps)
    assert curve[-1].keys() - single[-1].keys() == {"ep_max_load", "ep_mean_max_load"}
    assert single[-1]["loss"] < single[0]["loss"] - 0.2  # the curves fall: they are not equal because nothing moves


@pytest.mark.slow
def test_validate_agrees_with_production(folder: Path, by_rank: Any) -> None:
    name = "tp 2, sp, lp, accumulate 2"
    pair = metrics(folder / name), metrics(folder / f"{name}, validate")
    assert max(worst(*pair).values()) <= 1e-12


@pytest.mark.slow
def test_every_layout_goes_on_from_every_other(folder: Path, by_rank: Any) -> None:
    assert_follows(metrics(folder / "single"), metrics(folder / "resumed"), 12)


@pytest.mark.slow
def test_weights_go_out_and_come_back(folder: Path, by_rank: Any) -> None:
    """Bit by bit those that one process draws from the same seed."""
    with SINGLE.config(folder / "drawn", 2).build() as trainer:
        drawn = {name: p.detach().clone() for name, p in trainer.model_parts[0].named_parameters()}
    loaded = by_rank[2][1]["loaded"]
    exported = dict(load_hf(folder / "exported", torch.float64).named_parameters())
    assert drawn.keys() == loaded.keys() == exported.keys()
    assert [name for name, p in drawn.items() if not torch.equal(p, exported[name])] == []
    assert [name for name, p in drawn.items() if not torch.equal(p, loaded[name])] == []


@pytest.mark.slow
def test_loads_of_the_ranks_that_tokens_are_sent_to(by_rank: Any) -> None:
    """First layer: 15, 15 in group 0 (ranks 0, 1), 35, 35 in group 1; second: 0, 30 and 0, 70. Mean: 25 in both."""
    for rank in by_rank[4]:
        assert rank["loads"] == [{"ep_max_load": 70 / 25, "ep_mean_max_load": (35 / 25 + 70 / 25) / 2}]


@pytest.mark.parametrize(
    ("world_size", "degrees", "message"),
    [
        (
            8,
            {"ep": 3, "dp_shard": 4, "cp": 2},
            "parallelism.ep: 3 does not divide dp_shard 4 x cp 2 = 8, the ranks that experts are spread over; set a "
            "divisor of 8, or start so many ranks that dp_shard x cp is a multiple of 3",
        ),
        (
            8,
            {"ep": 8},
            "parallelism.ep: 8 does not divide the model's num_experts 4; set a divisor of 4",
        ),
        (
            6,
            {"ep": 2},
            "parallelism.ep: dp_shard 6 x cp 1 / ep 2 = 3 ranks store each expert, and that does not divide the "
            "model's hidden_size 32; change them so that it does, as ep 6 would",
        ),
    ],
)
def test_refused(world_size: int, degrees: dict[str, Any], message: str) -> None:
    config = with_parallelism(tiny_config("unused", steps=1, micro_batch_size=1), **degrees)
    assert message in [str(fault) for fault in config.cross_faults(world_size)]


def test_a_model_without_experts_is_refused() -> None:
    config = with_parallelism(tiny_config("unused", steps=1), **EP)
    config.model_spec = qwen3.create_model_spec("debug", **DENSE)
    assert [str(fault) for fault in config.cross_faults(2)] == [
        "parallelism.ep: 2, but no layer of the model has experts; set 1, or choose another model"
    ]


@pytest.mark.parametrize(
    ("degrees", "ranks"),
    [({"ep": 4}, 4), ({"ep": 4, "cp": 2}, 4), ({"ep": 4, "cp": 8}, 8), ({"ep": 2, "dp_shard": 4, "tp": 2}, 8)],
)
def test_fewest_ranks(degrees: dict[str, Any], ranks: int) -> None:
    assert ParallelismConfig(**degrees).smallest_world_size() == ranks
