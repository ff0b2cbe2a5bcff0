"""One process writes a start, and runs of any split begin with its bits; other runs' checkpoints start them too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hyper_parallel import train as front_door
from hyper_parallel.components.checkpoint import CheckpointError, CheckpointManager
from hyper_parallel.models.qwen3_moe import create_model_spec
from hyper_parallel.trainer.config import TrainerConfig
from tests.distributed_world import run_world
from tests.trainer.runs import TINY, deterministic, metrics, tiny_config, train, with_parallelism

Weights = dict[str, torch.Tensor]


def config_of(folder: Path | str, *, steps: int = 4, seed: int = 42, dtype: str = "float64", **more: Any) -> Any:
    """Four layers, tied: a pipeline holds the embedding twice."""
    config = tiny_config(folder, steps=steps, dtype=dtype, seed=seed)
    config.model_spec = create_model_spec("debug", **TINY | {"num_hidden_layers": 4, "tie_word_embeddings": True})
    config.checkpoint = CheckpointManager.Config(**more)
    return config


def seed_in(folder: Path, **more: Any) -> Weights:
    """Writes a seed checkpoint; returns its weights."""
    config = config_of(folder, create_seed=True, **more)
    assert list(config.cross_faults(1)) == []
    with config.build() as trainer:
        trainer.train()
        return {name: p.detach().clone() for name, p in trainer.model_parts[0].named_parameters()}


def start(config: TrainerConfig) -> Weights:
    """The weights of this rank before the first step."""
    with config.build() as trainer:
        assert trainer.checkpointer.load() == 0
        return {
            name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
            for part in trainer.model_parts
            for name, p in part.named_parameters()
        }


def test_a_seed_is_the_start_and_nothing_else(tmp_path: Path) -> None:
    seed_in(tmp_path / "seed")
    assert [path.name for path in (tmp_path / "seed").rglob("*") if path.is_dir()] == ["checkpoint", "step-0"]
    assert not (tmp_path / "seed" / "metrics.jsonl").exists()
    straight = train(config_of(tmp_path / "straight", enable=False))
    assert deterministic(train(config_of(tmp_path / "seed"))) == deterministic(straight)  # it may go on itself
    assert sorted(path.name for path in (tmp_path / "seed" / "checkpoint").iterdir()) == ["step-0", "step-4"]


SPLITS: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2, "dp_shard": 1, "loss_parallel": True},
    "pp": {"pp": 2, "dp_shard": 1, "pp_schedule": "zbv"},
}


def starts(seed: str, folder: str) -> dict[str, Any]:
    """On a rank: how each split starts from `seed`, and what it says of the seed of another model."""
    results: dict[str, Any] = {}
    for name, degrees in SPLITS.items():
        settings = {"enable": False, "load_from": seed}
        results[name] = start(with_parallelism(config_of(folder, seed=7, **settings), **degrees))
        train(with_parallelism(config_of(Path(folder) / name, steps=2, **settings), **degrees))
    config = with_parallelism(config_of(folder, enable=False, load_from=seed), tp=2, dp_shard=1)
    config.model_spec = create_model_spec("debug", **TINY | {"num_experts": 8})
    with config.build() as trainer, pytest.raises(CheckpointError) as error:
        trainer.checkpointer.load()
    results["refusal"] = str(error.value)
    return results


def test_every_split_starts_with_the_same_bits(tmp_path: Path) -> None:
    seed = seed_in(tmp_path / "seed")
    ranks = run_world(2, starts, str(tmp_path / "seed"), str(tmp_path), timeout=120)
    for name in SPLITS:
        started = ranks[0][name] | ranks[1][name]
        assert started.keys() == seed.keys()
        assert [key for key, value in seed.items() if not torch.equal(value, started[key])] == [], name
    single = train(config_of(tmp_path / "single", steps=2, enable=False, load_from=str(tmp_path / "seed")))
    for name in SPLITS:
        for a, b in zip(single, metrics(tmp_path / name), strict=True):
            assert (b["loss"], b["grad_norm"]) == pytest.approx((a["loss"], a["grad_norm"]), abs=1e-12), name
    for rank in ranks:
        assert rank["refusal"] == (
            f"checkpoint.load_from: {tmp_path}/seed/checkpoint/step-0 is of another model: "
            "model.lm_head.weight is not in the checkpoint; "
            "model.layers.3.input_layernorm.weight is not in this run; "
            "model.layers.3.mlp.experts.down_proj is not in this run and 15 more; give another folder (on rank 0)"
        )


def test_weights_alone_are_taken_in_the_type_of_the_run(tmp_path: Path) -> None:
    seed = seed_in(tmp_path / "seed")
    train(config_of(tmp_path / "seed", steps=2))  # now there is a step 2 with weights of its own
    places = {"seed": 2, "seed/checkpoint": 2, "seed/checkpoint/step-0": 0}
    for place, step in places.items():
        config = config_of(tmp_path / "next", dtype="float32", seed=7, load_from=str(tmp_path / place))
        assert list(config.cross_faults(1)) == []
        started = start(config)
        assert started["norm.weight"].dtype == torch.float32
        equal = [torch.equal(started[name], value.float()) for name, value in seed.items()]
        assert all(equal) if step == 0 else not any(equal), place


def test_a_seed_of_weights_from_elsewhere(tmp_path: Path) -> None:
    first = seed_in(tmp_path / "first")
    again = seed_in(tmp_path / "again", seed=7, load_from=str(tmp_path / "first"))
    assert all(torch.equal(again[name], value) for name, value in first.items())


def test_refused_before_any_process_group(tmp_path: Path) -> None:
    seed_in(tmp_path / "seed")
    config = config_of(tmp_path / "seed", create_seed=True)
    assert [str(fault) for fault in config.cross_faults(4)] == [
        "checkpoint.create_seed: True, but 4 ranks were started; start one process, and the ranks with load_from its "
        "dump folder",
        f"checkpoint.create_seed: True, but {tmp_path}/seed/checkpoint holds checkpoints of the steps 0; give another "
        "dump_folder",
    ]
    wrong = CheckpointManager.Config(create_seed=True, enable=False, load_step=3)
    assert [str(fault) for fault in wrong.faults()] == [
        "load_step: 3 is given but enable is False; set enable True",
        "create_seed: True, but enable is False: nothing is to be saved; set enable True",
        "load_step: 3, but create_seed is True: step 0 is to be written; leave it out, or set create_seed False",
    ]


def test_a_checkpoint_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    seed_in(tmp_path / "seed")
    step = tmp_path / "seed" / "checkpoint" / "step-0"
    (shard,) = step.glob("*.distcp")
    shard.write_bytes(shard.read_bytes()[:-1])
    size = shard.stat().st_size
    fact = f"{shard.name} has {size} bytes, {size + 1} were written"
    (fault,) = CheckpointManager.Config(load_from=str(step)).faults()
    assert fault.fact == f"{step} is not a complete checkpoint: {fact}"
    (fault,) = CheckpointManager.Config(load_from=str(tmp_path / "seed")).faults()
    assert fault.fact == (
        f"{tmp_path}/seed holds neither the config.json of a Hugging Face model nor a complete checkpoint"
    )


def test_what_is_damaged_inside_is_told_when_it_is_read(tmp_path: Path) -> None:
    seed_in(tmp_path / "seed")
    step = tmp_path / "seed" / "checkpoint" / "step-0"
    (step / ".metadata").write_bytes(b"x" * (step / ".metadata").stat().st_size)
    config = config_of(tmp_path / "next", load_from=str(step))
    assert list(config.cross_faults(1)) == []
    with config.build() as trainer, pytest.raises(CheckpointError) as error:
        trainer.train()
    assert str(error.value).startswith(f"checkpoint.load_from: {step} is damaged: .metadata is not what was written (")
    assert str(error.value).endswith("; give another folder")


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model_spec", "qwen3_moe", "--training.steps", "1"]
    seed = ["--dump_folder", str(tmp_path / "seed"), "--checkpoint.create_seed"]
    assert front_door.main([*words, *seed]) == 0
    assert front_door.main([*words, *seed]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("checkpoint.create_seed: True, but ")
