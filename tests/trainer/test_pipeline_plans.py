"""One loss curve in pipelines whose stages are split over ranks once more: by tensor and by context parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hyper_parallel.components.checkpoint import CheckpointManager
from hyper_parallel.models import load_hf
from hyper_parallel.trainer.config import TrainerConfig
from tests.distributed_world import run_world
from tests.trainer.runs import metrics
from tests.trainer.test_context_parallel import ALL_GATHER, ULYSSES, SpreadCase, reference_folder
from tests.trainer.test_tensor_parallel import LP, SP, TOLERANCE, VALIDATE, train, worst

STEPS = 6
LAYERS = {"num_hidden_layers": 4}
TIED = LAYERS | {"tie_word_embeddings": True}
PP = {"pp": 2, "dp_shard": 1}
TP, CP = PP | {"tp": 2}, PP | {"cp": 2}
GPIPE, INTERLEAVED, ZBV, DUALPIPEV = ({"pp_schedule": s} for s in ("gpipe", "interleaved_1f1b", "zbv", "dualpipev"))

CASES: dict[int, dict[str, SpreadCase]] = {
    4: {
        "tp": SpreadCase(TP, 2, sizes=LAYERS),
        "tp, sp, lp, tied, gpipe": SpreadCase(TP | SP | LP | GPIPE, 2, sizes=TIED),
        "tp, sp, interleaved, validate, dense": SpreadCase(
            TP | SP | INTERLEAVED | VALIDATE, 2, dense=True, sizes=LAYERS
        ),
        # Micro-batches of several packings are on their way at once.
        "tp, sp, lp, tied, offload, compile, dense": SpreadCase(
            TP | SP | LP | {"cpu_offload": True}, 2, dense=True, sizes=TIED, compile=True
        ),
        "tp, sp, zbv, recompute": SpreadCase(TP | SP | ZBV, 2, sizes=LAYERS, recompute=True),
        "tp, lp, tied, zbv, validate, recompute": SpreadCase(TP | LP | ZBV | VALIDATE, 2, sizes=TIED, recompute=True),
        "tp, tied, dualpipev": SpreadCase(TP | DUALPIPEV, 2, sizes=TIED),
        "shard 2, ep, interleaved, recompute": SpreadCase(
            {"pp": 2, "dp_shard": 2, "ep": 2} | INTERLEAVED, 1, sizes=LAYERS, recompute=True
        ),
        "shard 2, ep, tied, zbv": SpreadCase({"pp": 2, "dp_shard": 2, "ep": 2} | ZBV, 1, sizes=TIED),
        "ring, rows of 29": SpreadCase(CP, 2, sizes=LAYERS, seq_len=29),
        "ulysses, tied, zbv, recompute": SpreadCase(CP | ULYSSES | ZBV, 2, sizes=TIED, recompute=True),
        "all-gather, interleaved, dense, pad": SpreadCase(
            CP | ALL_GATHER | INTERLEAVED, 2, dense=True, sizes=LAYERS, packing="pad"
        ),
        "ring, tied, dualpipev": SpreadCase(CP | DUALPIPEV, 2, sizes=TIED),
    },
}
SPLIT = SpreadCase(TP | SP | LP | ZBV, 2, sizes=TIED)


def saving(case: SpreadCase, folder: Path) -> TrainerConfig:
    config = case.config(folder, STEPS)
    config.checkpoint = CheckpointManager.Config(interval_steps=STEPS // 2)
    return config


def run_half(config: TrainerConfig) -> None:
    with config.build() as trainer:
        trainer.training_steps = STEPS // 2
        trainer.train()


def run_in_world(folder: Path) -> dict[str, torch.Tensor]:
    """On each rank: every case, half a run for another world to go on with, the other half of one that another world
    began, and weights that go out and come back, which are returned."""
    for name, case in CASES[4].items():
        train(case.config(folder / name, STEPS))
    run_half(saving(SPLIT, folder / "from a pipeline"))
    train(saving(SPLIT, folder / "to a pipeline"))
    with SPLIT.config(folder / "run", 1).build() as trainer:
        trainer.checkpointer.export_hf(str(folder / "exported"))
    config = SPLIT.config(folder / "other", 1)
    config.training.seed = 7  # weights that are loaded do not depend on it
    config.checkpoint = CheckpointManager.Config(load_from=str(folder / "exported"))
    with config.build() as trainer:
        trainer.checkpointer.load()
        return {n: p.full_tensor().detach() for part in trainer.model_parts for n, p in part.named_parameters()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, torch.Tensor]]]:
    """Metrics of all runs and of the references of the cases; and per rank the weights that came back."""
    folder = tmp_path_factory.mktemp("pipeline_plans")
    run_half(saving(SPLIT.reference, folder / "to a pipeline"))
    weights = run_world(4, run_in_world, folder, timeout=400)
    for case in CASES[4].values():
        if not (single := reference_folder(folder, case)).exists():
            train(case.reference.config(single, STEPS))
    train(saving(SPLIT.reference, folder / "from a pipeline"))
    return folder, weights


def assert_follows(single: Path, other: Path) -> dict[str, float]:
    differences = worst(metrics(single), metrics(other))
    for key, difference in differences.items():
        assert difference <= TOLERANCE, f"{other.name}: {key} differs by {difference}"
    return differences


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("name", CASES[4])
def test_follows_the_single_process(runs: Any, name: str) -> None:
    (folder, _), case = runs, CASES[4][name]
    differences, curve = assert_follows(reference_folder(folder, case), folder / name), metrics(folder / name)
    assert differences.keys() == {"loss", "grad_norm", "validation_loss"} | (set() if case.dense else {"aux_loss"})
    assert [line["tokens"] for line in curve] == [8 * case.seq_len] * STEPS
    assert curve[-1]["loss"] < curve[0]["loss"] - 0.03  # the curves fall: they are not equal because nothing moves


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("name", ["from a pipeline", "to a pipeline"])
def test_resumes_elsewhere(runs: Any, name: str) -> None:
    folder, _ = runs
    assert_follows(reference_folder(folder, SPLIT), folder / name)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_weights_go_out_and_come_back(runs: Any, tmp_path: Path) -> None:
    """Bit by bit those that one process draws from the same seed, tied ones on both ends of the pipeline."""
    folder, loaded = runs
    exported = dict(load_hf(folder / "exported", torch.float64).named_parameters())
    with SPLIT.reference.config(tmp_path, 1).build() as trainer:
        drawn = dict(trainer.model_parts[0].named_parameters())
        assert drawn.keys() == exported.keys() == set().union(*loaded)
        for name, parameter in drawn.items():
            assert all(torch.equal(parameter, weights[name]) for weights in (exported, *loaded) if name in weights), (
                name
            )
