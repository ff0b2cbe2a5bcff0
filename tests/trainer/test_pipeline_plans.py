"""One loss curve in pipelines whose stages are split over ranks once more: by tensor and by context parallelism."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed_world import run_world
from tests.trainer.runs import metrics
from tests.trainer.test_context_parallel import ALL_GATHER, ULYSSES, SpreadCase, reference_folder
from tests.trainer.test_tensor_parallel import LP, SP, TOLERANCE, VALIDATE, train, worst

STEPS = 7
LAYERS = {"num_hidden_layers": 4}
TIED = LAYERS | {"tie_word_embeddings": True}
PP = {"pp": 2, "dp_shard": 1}
TP, CP = PP | {"tp": 2}, PP | {"cp": 2}
GPIPE, INTERLEAVED, ZBV, DUALPIPEV = ({"pp_schedule": s} for s in ("gpipe", "interleaved_1f1b", "zbv", "dualpipev"))
OFFLOAD = {"cpu_offload": True}

CASES: dict[str, SpreadCase] = {
    "tp": SpreadCase(TP, 2, sizes=LAYERS),
    "tp, sp, lp, tied, gpipe, recompute": SpreadCase(TP | SP | LP | GPIPE, 2, sizes=TIED, recompute=True),
    "tp, sp, dense, interleaved, validate": SpreadCase(TP | SP | INTERLEAVED | VALIDATE, 2, dense=True, sizes=LAYERS),
    "tp, sp, lp, offload, compile, recompute, dense, tied": SpreadCase(
        TP | SP | LP | OFFLOAD, 2, dense=True, sizes=TIED, recompute=True, compile=True
    ),
    "tp, sp, lp, tied, zbv, recompute": SpreadCase(TP | SP | LP | ZBV, 2, sizes=TIED, recompute=True),
    "tp, sp, lp, tied, zbv, validate": SpreadCase(TP | SP | LP | ZBV | VALIDATE, 2, sizes=TIED),
    "tp, tied, dualpipev": SpreadCase(TP | DUALPIPEV, 2, sizes=TIED),
    "tp, lp, recompute, validate": SpreadCase(TP | LP | VALIDATE, 2, sizes=LAYERS, recompute=True),
    "ring, rows of 29": SpreadCase(CP, 2, sizes=LAYERS, seq_len=29),
    "ulysses, zbv, tied, recompute": SpreadCase(CP | ULYSSES | ZBV, 2, sizes=TIED, recompute=True),
    "all-gather, interleaved, dense, pad": SpreadCase(
        CP | ALL_GATHER | INTERLEAVED, 2, dense=True, sizes=LAYERS, packing="pad"
    ),
    "ring, tied, dualpipev": SpreadCase(CP | DUALPIPEV, 2, sizes=TIED),
}


def run_cases(folder: str, cases: dict[str, SpreadCase]) -> None:
    for name, case in cases.items():
        train(case.config(Path(folder) / name, STEPS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Metrics of every case and of its reference."""
    folder = tmp_path_factory.mktemp("pipeline_plans")
    run_world(4, run_cases, str(folder), CASES, timeout=280)
    for case in CASES.values():
        if not (single := reference_folder(folder, case)).exists():
            train(case.reference.config(single, STEPS))
    return folder


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", CASES)
def test_follows_the_single_process(folder: Path, name: str) -> None:
    case = CASES[name]
    curve = metrics(folder / name)
    differences = worst(metrics(reference_folder(folder, case)), curve)
    assert differences.keys() == {"loss", "grad_norm", "validation_loss"} | (set() if case.dense else {"aux_loss"})
    for key, difference in differences.items():
        assert difference <= TOLERANCE, f"{key} differs by {difference}"
    assert [line["tokens"] for line in curve] == [8 * case.seq_len] * STEPS
    assert curve[-1]["loss"] < curve[0]["loss"] - 0.1  # the curves fall: they are not equal because nothing moves
