"""A vocabulary that does not divide by tp: nothing of the cut is seen in loss, norm, logits, checkpoints or exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hyper_parallel.components.checkpoint import CheckpointManager
from hyper_parallel.models import load_hf
from hyper_parallel.trainer.config import TrainerConfig
from hyper_parallel.trainer.hyper_trainer import HyperTrainer
from tests.distributed_world import run_world
from tests.trainer.runs import metrics
from tests.trainer.test_tensor_parallel import LP, SP, TIED, TP, VALIDATE, Case, train, worst

STEPS = 6
ODD = {"vocab_size": 4097}
TP4 = {"tp": 4, "dp_shard": 1}
WIDE = {"num_key_value_heads": 4}

CASES: dict[int, dict[str, Case]] = {
    2: {
        "sp, lp, untied": Case(TP | SP | LP, sizes=ODD),
        "lp, tied, whole logits, dense": Case(TP | LP, dense=True, sizes=ODD | TIED, whole_logits=True),
        "sp, lp, tied, validate, dense": Case(TP | SP | LP | VALIDATE, dense=True, sizes=ODD | TIED),
        "untied, validate, dense": Case(TP | VALIDATE, dense=True, sizes=ODD),
    },
    4: {
        "tp 4, lp, tied, whole logits, dense": Case(TP4 | LP, dense=True, sizes=ODD | TIED | WIDE, whole_logits=True),
        "tp 4, sp, lp, untied": Case(TP4 | SP | LP, sizes=ODD | WIDE),
        "tp 2 x shard 2, lp, untied": Case({"tp": 2, "dp_shard": 2} | LP, 4, sizes=ODD | WIDE),
        "tp 2 x cp 2, lp, tied, dense": Case(
            {"tp": 2, "cp": 2, "dp_shard": 1} | LP, dense=True, sizes=ODD | TIED | WIDE
        ),
    },
}
SAVED = Case(TP | LP, sizes=ODD | WIDE)
READERS = {"tp 4": Case(TP4 | LP | SP, sizes=ODD | WIDE), "shard 2 x tp 2": CASES[4]["tp 2 x shard 2, lp, untied"]}

State = dict[str, torch.Tensor]


def saving(case: Case, folder: Path) -> TrainerConfig:
    config = case.config(folder, 4)
    config.checkpoint = CheckpointManager.Config(interval_steps=2)
    return config


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def state_of(trainer: HyperTrainer) -> State:
    """Whole weights, and whole moments of the optimizer by the names of their weights."""
    names = {id(p): name for part in trainer.model_parts for name, p in part.named_parameters()}
    state = {names[id(p)]: whole(p) for part in trainer.model_parts for p in part.parameters()}
    for optimizer in trainer.optimizers.optimizers:
        for parameter, moments in optimizer.state.items():
            state |= {f"{names[id(parameter)]} {key}": whole(moments[key]) for key in ("exp_avg", "exp_avg_sq")}
    return state


def logits_of(trainer: HyperTrainer) -> torch.Tensor:
    with torch.no_grad():
        return trainer.model_parts[0](torch.arange(4097 - 64, 4097).view(2, 32)).logits


def loaded(config: TrainerConfig) -> tuple[State, torch.Tensor]:
    with config.build() as trainer:
        trainer.checkpointer.load()
        assert trainer.state.global_step == 2
        return state_of(trainer), logits_of(trainer)


def two_ranks(folder: str) -> State:
    for name, case in CASES[2].items():
        train(case.config(Path(folder) / name, STEPS))
    with saving(SAVED, Path(folder) / "saved").build() as trainer:
        trainer.training_steps = 2
        trainer.train()
        trainer.checkpointer.export_hf(str(Path(folder) / "exported"))
        return state_of(trainer)


def four_ranks(folder: str) -> dict[str, tuple[State, torch.Tensor]]:
    for name, case in CASES[4].items():
        train(case.config(Path(folder) / name, STEPS))
    return {name: loaded(saving(case, Path(folder) / "saved")) for name, case in READERS.items()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, State, dict[str, tuple[State, torch.Tensor]]]:
    folder = tmp_path_factory.mktemp("uneven")
    (saved, _), (readers, *_) = (
        run_world(ranks, function, str(folder), timeout=280) for ranks, function in ((2, two_ranks), (4, four_ranks))
    )
    return folder, saved, readers


@pytest.mark.slow
def test_follows_the_single_process(runs: Any, tmp_path: Path) -> None:
    references: dict[str, list[dict[str, Any]]] = {}
    for name, case in (CASES[2] | CASES[4]).items():
        key = repr(case.reference)
        if key not in references:
            train(case.reference.config(tmp_path / str(len(references)), STEPS))
            references[key] = metrics(tmp_path / str(len(references)))
        for quantity, difference in worst(references[key], metrics(runs[0] / name)).items():
            assert difference <= 1e-9, f"{name}: {quantity} differs by {difference}"


@pytest.mark.slow
def test_a_checkpoint_is_read_bit_by_bit_under_any_split(runs: Any) -> None:
    folder, saved, readers = runs
    assert {"lm_head.weight", "lm_head.weight exp_avg", "embed_tokens.weight exp_avg_sq"} <= saved.keys()
    assert saved["embed_tokens.weight"].shape == saved["lm_head.weight exp_avg"].shape == (4097, 32)
    alone, logits = loaded(saving(Case(sizes=ODD | WIDE), folder / "saved"))
    for state in (alone, *(state for state, _ in readers.values())):
        assert state.keys() == saved.keys()
        assert [name for name in saved if not torch.equal(saved[name], state[name])] == []
    for _, split_logits in readers.values():
        torch.testing.assert_close(split_logits, logits, rtol=0, atol=1e-13)
    exported = dict(load_hf(folder / "exported", torch.float64).named_parameters())
    assert [name for name, p in exported.items() if not torch.equal(p, saved[name])] == []


def test_a_rank_without_any_row_is_refused(tmp_path: Path) -> None:
    config = Case({"tp": 4} | LP, sizes={"vocab_size": 9} | WIDE).config(tmp_path, 1)
    (fault,) = config.cross_faults(4)
    assert str(fault) == (
        "parallelism.tp: of the model's vocab_size 9, in parts of 3 rows, the last of 4 ranks has none; "
        "set a smaller tp"
    )
