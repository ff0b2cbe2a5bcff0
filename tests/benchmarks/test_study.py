"""What disturbs a weight, and who passes by whose yardstick."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.parity.study import DISTURBED, STRATEGIES, disturb, judge


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_weight_moves_by_one_unit_in_its_last_place(dtype: torch.dtype) -> None:
    integers = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[dtype]
    weights = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    moves = []
    for seed in (1, 2):
        moved = weights.clone()
        disturb([moved], seed)
        moves.append(moved.view(integers) - weights.view(integers))  # neighbours are neighbours as integers too
        assert set(moves[-1].tolist()) == {-1, 1}
        assert 400 < int((moved > weights).sum()) < 600
    assert not torch.equal(*moves)


def write(folder: Path, name: str, losses: list[float]) -> None:
    (folder / name).mkdir()
    lines = [{"step": step, "loss": loss, "grad_norm": 1.0} for step, loss in enumerate(losses, 1)]
    (folder / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_strategies_are_held_against_disturbed_runs_or_against_1e_9(tmp_path: Path) -> None:
    losses = {"one process": [4.0, 2.0], "disturbed 1": [4.0, 2.01], "disturbed 2": [4.0, 2.0]}
    losses |= {"disturbed 3": [4.02, 2.0]}
    losses |= {name: [4.0, 2.0] for name in STRATEGIES}
    losses |= {"cp 2": [4.0, 2.029], "ep 2": [4.0, 2.031], "pp 2": [4.0, 2.0, 1.0], "fsdp 2": [4.0 + 9e-10, 2.0]}
    for name, values in losses.items():
        write(tmp_path, name, values)
    assert {*losses} == {"one process", *DISTURBED, *STRATEGIES}
    judged = {cells[1]: (cells[2:], passes) for cells, passes in judge(tmp_path, "float32")}
    assert {name: passes for name, (_, passes) in judged.items()} == {
        "fsdp 2": True,
        "tp 2, sp": True,
        "cp 2": True,
        "ep 2": False,
        "pp 2": False,
    }
    assert judged["cp 2"][0] == ["1.45e-02", "1.5 x 1.00e-02", "2.90e-02", "1.5 x 2.00e-02", "0.00e+00", "PASS"]
    exact = {cells[1]: (cells[2:], passes) for cells, passes in judge(tmp_path, "float64")}
    assert [name for name, (_, passes) in exact.items() if passes] == ["fsdp 2", "tp 2, sp"]
    assert exact["fsdp 2"][0][1:4] == ["", "9.00e-10", "1e-09"]
