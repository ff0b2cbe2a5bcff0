"""One loss curve under context parallelism: in float64 every case follows the single process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch

from hyper_parallel.components.data import TextDataLoader
from hyper_parallel.components.validator import Validator
from hyper_parallel.config.sections import ParallelismConfig
from hyper_parallel.models.common.context_parallel import ATTENTIONS
from hyper_parallel.trainer.config import TrainerConfig
from tests.distributed_world import run_world
from tests.trainer.runs import metrics, small_corpus, tiny_config, with_parallelism
from tests.trainer.test_tensor_parallel import (
    LP,
    SP,
    TIED,
    TOLERANCE,
    VALIDATE,
    WIDE,
    Case,
    saving,
    stop_and_resume,
    train,
    worst,
)

STEPS = 8


@dataclass(frozen=True)
class SpreadCase(Case):
    """A case with a validation behind its last step."""

    seq_len: int = 32
    loss_aggregation: str = "token_weighted"

    def config(self, folder: str | Path, steps: int) -> TrainerConfig:
        config = super().config(folder, steps)
        config.training.seq_len = self.seq_len
        config.training.loss_aggregation = self.loss_aggregation
        config.validator = Validator.Config(
            enable=True, interval_steps=steps, steps=2, dataloader=TextDataLoader.Config(path=small_corpus())
        )
        return config

    @property
    def reference(self) -> SpreadCase:
        averages_ranks = self.loss_aggregation == "rank_average"
        return SpreadCase(
            rows=self.rows if averages_ranks else 8,
            dense=self.dense,
            sizes=self.sizes,
            packing=self.packing,
            seq_len=self.seq_len,
            loss_aggregation=self.loss_aggregation,
        )


CP, DENSE = {"cp": 2, "dp_shard": 1}, {"dense": True}
ULYSSES, ALL_GATHER = {"cp_method": "ulysses"}, {"cp_method": "allgather"}
CP_TP = CP | {"tp": 2}

CASES: dict[int, dict[str, SpreadCase]] = {
    2: {
        "ring": SpreadCase(CP),
        "ulysses, recompute, accumulate 2": SpreadCase(CP | ULYSSES, 4, recompute=True),
        "all-gather, tied, pad": SpreadCase(CP | ALL_GATHER, sizes=TIED, packing="pad"),
        "ring, rows of 29, whole logits": SpreadCase(CP, seq_len=29, whole_logits=True),
        "all-gather, dense, rank average": SpreadCase(CP | ALL_GATHER, 2, dense=True, loss_aggregation="rank_average"),
        "ring, compile, recompute, offload, accumulate 2": SpreadCase(
            CP | {"cpu_offload": True}, 4, recompute=True, compile=True
        ),
    },
    4: {
        "ring of 4, recompute": SpreadCase(CP | {"cp": 4}, recompute=True),
        "ulysses of 4, rows of 29, 4 key heads": SpreadCase(CP | {"cp": 4} | ULYSSES, sizes=WIDE, seq_len=29),
        "ring, tp 2": SpreadCase(CP_TP),
        "ulysses, tp 2, sp, lp, tied": SpreadCase(CP_TP | SP | LP | ULYSSES, sizes=TIED),
        "ring, tp 2, sp, rows of 30, validate": SpreadCase(CP_TP | SP | VALIDATE, seq_len=30),
        "ulysses, shard 2, accumulate 2": SpreadCase(CP | {"dp_shard": 2} | ULYSSES, 2),
        "ring, replicate 2, dense": SpreadCase(CP | {"dp_replicate": 2}, 4, dense=True),
    },
}
ALL = [(world_size, name) for world_size, cases in CASES.items() for name in cases]


def run_cases(folder: str, world_size: int, steps: int) -> None:
    for name, case in CASES[world_size].items():
        train(case.config(Path(folder) / name, steps))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Metrics of every case and of its reference, each world started once."""
    folder = tmp_path_factory.mktemp("context_parallel")
    for world_size, cases in CASES.items():
        run_world(world_size, run_cases, str(folder), world_size, STEPS, timeout=580)
        for case in cases.values():
            if not (single := reference_folder(folder, case)).exists():
                train(case.reference.config(single, STEPS))
    return folder


def reference_folder(folder: Path, case: SpreadCase) -> Path:
    reference = case.reference
    return folder / repr((reference.rows, reference.dense, reference.sizes, reference.packing, reference.seq_len))


@pytest.mark.slow
@pytest.mark.timeout(1300)
@pytest.mark.parametrize(("world_size", "name"), ALL)
def test_follows_the_single_process(folder: Path, world_size: int, name: str) -> None:
    case = CASES[world_size][name]
    single, curve = metrics(reference_folder(folder, case)), metrics(folder / name)
    differences = worst(single, curve)
    assert differences.keys() == {"loss", "grad_norm", "validation_loss"} | (set() if case.dense else {"aux_loss"})
    for key, difference in differences.items():
        assert difference <= TOLERANCE, f"{key} differs by {difference}"
    assert [line["tokens"] for line in curve] == [8 * case.seq_len] * STEPS
    assert curve[-1]["loss"] < curve[0]["loss"] - 0.03  # the curves fall: they are not equal because nothing moves


def test_methods_are_those_of_the_config() -> None:
    assert get_type_hints(ParallelismConfig)["cp_method"].__args__ == tuple(ATTENTIONS)


@pytest.mark.parametrize(
    ("world_size", "degrees", "training", "message"),
    [
        (
            8,
            {"cp": 4, "tp": 2, "dp_shard": 1, "cp_method": "ulysses"},
            {},
            "parallelism.cp: cp 4 x tp 2 = 8 does not divide the model's num_attention_heads 4, which cp_method "
            "ulysses spreads over the ranks; set a divisor, or cp_method ring or allgather",
        ),
        (
            4,
            {"cp": 4, "dp_shard": 1},
            {"seq_len": 3},
            "training.seq_len: 3 is below parallelism.cp 4: there are ranks without a token; set 4 or more, or a "
            "smaller cp",
        ),
        (
            4,
            {"cp": 2, "tp": 2, "dp_shard": 1, "sequence_parallel": True},
            {"seq_len": 2},
            "training.seq_len: 2 is below parallelism.cp 2 x tp 2 = 4: there are ranks without a token; set 4 or more, "
            "or a smaller cp",
        ),
        (
            8,
            {"cp": 3, "tp": 2, "dp_shard": 1},
            {},
            "parallelism.dp_shard: dp_replicate 1 x dp_shard 1 x cp 3 x tp 2 = 6 ranks, but the world size is 8; start "
            "6 ranks (torchrun --nproc_per_node=6), or set dp_shard -1 to take what is left",
        ),
        (
            8,
            {"cp": 3, "tp": 2},
            {},
            "parallelism.cp: dp_replicate 1 x cp 3 x tp 2 = 6 does not divide the world size 8; set divisors of 8, or "
            "start a multiple of 6 ranks",
        ),
        (
            2,
            {"cp_method": "ulysses"},
            {},
            "parallelism.cp_method: ulysses, but cp is 1: rows are whole; set cp above 1 or ring",
        ),
    ],
)
def test_refused(world_size: int, degrees: dict[str, Any], training: dict[str, Any], message: str) -> None:
    config = with_parallelism(tiny_config("unused", steps=1, **training), **degrees)
    own = [fault for path, node in config.traverse() for fault in _placed(path, node)]
    assert message in [str(fault) for fault in [*own, *config.cross_faults(world_size)]]


def _placed(path: str, node: Any) -> list[str]:
    return [f"{path}.{fault}" for fault in node.faults()]


RING, SHARDED = SpreadCase(CP), SpreadCase({"dp_shard": 2}, 4)
CHANGES = {"cp 2 -> shard 2": (RING, SHARDED), "shard 2 -> cp 2": (SHARDED, RING)}


def test_resumes_under_another_parallelism(tmp_path: Path) -> None:
    train(saving(SpreadCase(), tmp_path / "straight"))
    run_world(2, stop_and_resume, str(tmp_path), CHANGES, timeout=240)
    for name in CHANGES:
        for key, difference in worst(metrics(tmp_path / "straight"), metrics(tmp_path / name)).items():
            assert difference <= TOLERANCE, f"{name}: {key} differs by {difference}"


def logits(folder: str, case: SpreadCase) -> list[torch.Tensor]:
    """Of rows that are one document each, and of packed ones whose positions count on from 5."""
    input_ids_BT = torch.randint(0, 4096, (2, 29), generator=torch.Generator().manual_seed(0))
    packed = {"cu_seqlens": [0, 3, 29, 50, 58], "position_ids_BT": torch.arange(5, 34)[None].expand(2, -1)}
    with case.config(folder, 1).build() as trainer, torch.no_grad():
        model = trainer.model_parts[0]
        return [model(input_ids_BT, **batch).logits for batch in ({}, packed)]


@pytest.mark.parametrize("more", [{}, {"tp": 2, "cp": 2} | LP | VALIDATE | ULYSSES], ids=["cp 4", "tp 2, lp, validate"])
def test_logits_are_those_of_whole_rows(tmp_path: Path, more: dict[str, Any]) -> None:
    single = logits(str(tmp_path), SpreadCase())
    for ranks in run_world(4, logits, str(tmp_path), SpreadCase(CP | {"cp": 4} | more), timeout=120):
        assert max(float((a - b).abs().max()) for a, b in zip(single, ranks, strict=True)) <= 1e-13
