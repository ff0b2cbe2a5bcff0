"""Pipelines of 2 and 4 ranks follow the single process, save and resume, and hold as much as their schedule says."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hyper_parallel.components.checkpoint import CheckpointManager
from hyper_parallel.components.data import TextDataLoader
from hyper_parallel.components.validator import Validator
from hyper_parallel.config.errors import ConfigError, RunError
from hyper_parallel.config.sections import ActivationCheckpointConfig, CompileConfig
from hyper_parallel.config.target import Target
from hyper_parallel.models import load_hf
from hyper_parallel.models.qwen3 import create_model_spec as create_dense_spec
from hyper_parallel.models.qwen3_moe import create_model_spec as create_moe_spec
from hyper_parallel.protocols.model import BaseModel
from hyper_parallel.trainer import HyperTrainer
from hyper_parallel.trainer.callbacks import MoEMonitorCallback
from hyper_parallel.trainer.config import TrainerConfig
from tests.distributed_world import run_world
from tests.trainer.runs import TINY, deterministic, metrics, small_corpus, tiny_config, train, with_parallelism

STEPS = 6
TOLERANCE = 1e-9
DENSE = {k: v for k, v in TINY.items() if k in ("hidden_size", "intermediate_size", "head_dim")} | {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
Case = dict[str, Any]
"""`model` (a key of MODELS), `steps`, fields of training, and everything else degrees of parallelism."""

MODELS: dict[str, Any] = {
    "moe tied": lambda: create_moe_spec("debug", **(TINY | {"num_hidden_layers": 4, "tie_word_embeddings": True})),
    "moe": lambda: create_moe_spec("debug", **(TINY | {"num_hidden_layers": 4})),
    "dense tied": lambda: create_dense_spec("debug", **(DENSE | {"num_hidden_layers": 8, "tie_word_embeddings": True})),
    "dense": lambda: create_dense_spec("debug", **(DENSE | {"num_hidden_layers": 5})),
}
"""The second layer of four has no experts, so a stage of one layer may have none."""

CASES: dict[int, dict[str, Case]] = {
    2: {
        "gpipe, a single micro-batch": {"model": "dense", "pp_schedule": "gpipe", "micro_batch_size": 8},
        "gpipe": {"model": "moe", "pp_schedule": "gpipe"},
        "1f1b": {"model": "moe tied"},
        "1f1b, recompute": {"model": "moe", "recompute": True},
        "1f1b, resharded": {"model": "moe tied", "reshard_after_forward": True},
        "1f1b, offloaded": {"model": "dense tied", "cpu_offload": True},
        "1f1b, compiled": {"model": "dense", "compiled": True, "steps": 2},
        "interleaved 1f1b": {"model": "moe tied", "pp_schedule": "interleaved_1f1b"},
        "interleaved 1f1b, 4 stages a rank": {
            "model": "dense tied",
            "pp_schedule": "interleaved_1f1b",
            "pp_virtual_stages": 4,
        },
        "zbv": {"model": "moe tied", "pp_schedule": "zbv"},
        "zbv, recompute, fewer micro-batches than stages": {
            "model": "dense tied",
            "pp_schedule": "zbv",
            "recompute": True,
            "micro_batch_size": 4,
        },
        "dualpipev": {"model": "moe", "pp_schedule": "dualpipev"},
    },
    4: {
        "1f1b x shard 2, recompute": {"model": "moe tied", "dp_shard": 2, "recompute": True},
        "interleaved x replicate 2": {"model": "moe", "pp_schedule": "interleaved_1f1b", "dp_replicate": 2},
        "zbv x shard 2": {"model": "moe tied", "pp_schedule": "zbv", "dp_shard": 2},
        "dualpipev x shard 2": {"model": "dense", "pp_schedule": "dualpipev", "dp_shard": 2, "micro_batch_size": 1},
        "1f1b over 4": {"model": "moe tied", "pp": 4},
        "zbv over 4": {"model": "dense tied", "pp": 4, "pp_schedule": "zbv"},
    },
}
NUMBERS = ("loss", "grad_norm", "aux_loss", "validation_loss", "moe_max_load", "moe_idle_experts")
OUR_OWN = ("model", "steps", "micro_batch_size", "recompute", "compiled")


def config_of(folder: Path, case: Case) -> TrainerConfig:
    """Every case is a piece of a run of STEPS steps, so that all of a model compare with one curve."""
    config = tiny_config(folder, steps=STEPS, micro_batch_size=case.get("micro_batch_size", 2))
    config.model_spec = MODELS[case["model"]]()
    config.activation_checkpoint = ActivationCheckpointConfig(mode="full" if case.get("recompute") else "none")
    config.compile = CompileConfig(enable=case.get("compiled", False), backend="aot_eager")
    held_out = TextDataLoader.Config(path=small_corpus(), shuffle=False)
    config.validator = Validator.Config(enable=True, interval_steps=3, steps=2, dataloader=held_out)
    if case["model"].startswith("moe"):
        config.callbacks = (MoEMonitorCallback.Config(log_steps=2),)
    return with_parallelism(config, **{key: value for key, value in case.items() if key not in OUR_OWN})


def train_case(folder: Path, case: Case) -> None:
    config = config_of(folder, {"pp": 2} | case)
    assert not list(config.cross_faults(dist.get_world_size()))
    with config.build() as trainer:
        trainer.training_steps = case.get("steps", STEPS)
        trainer.train()


def run_cases(folder: str, world_size: int) -> dict[str, Any]:
    """On each rank: every case of `world_size`; rank 0 leaves the metrics under `folder`."""
    for name, case in CASES[world_size].items():
        train_case(Path(folder) / name, case)
    return {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pipeline")


@pytest.fixture(scope="module")
def single(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The curves of one process that takes each batch at once."""
    return {model: train(config_of(folder / model, {"model": model, "micro_batch_size": 8})) for model in MODELS}


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> None:
    run_world(2, run_cases, str(folder), 2, timeout=280)


@pytest.fixture(scope="module")
def four_ranks(folder: Path) -> None:
    run_world(4, run_cases, str(folder), 4, timeout=280)


def assert_follows(expected: list[dict[str, Any]], lines: list[dict[str, Any]], steps: int) -> None:
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    for a, b in zip(expected, lines, strict=False):
        assert set(b) >= {key for key in NUMBERS if key in a}, "validation comes after the last step too"
        worst = {key: abs(a[key] - b[key]) for key in NUMBERS if key in a and key in b}
        assert max(worst.values()) <= TOLERANCE, (b["step"], worst)
    assert [line["tokens"] for line in lines] == [256] * steps
    assert [line["lr"] for line in lines] == [line["lr"] for line in expected[:steps]]


@pytest.mark.parametrize("name", CASES[2])
def test_two_ranks_follow_the_single_process(folder: Path, single: Any, two_ranks: None, name: str) -> None:
    case = CASES[2][name]
    assert_follows(single[case["model"]], metrics(folder / name), case.get("steps", STEPS))


@pytest.mark.parametrize("name", CASES[4])
def test_four_ranks_follow_the_single_process(folder: Path, single: Any, four_ranks: None, name: str) -> None:
    case = CASES[4][name]
    assert_follows(single[case["model"]], metrics(folder / name), case.get("steps", STEPS))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            {"pp": 2, "micro_batch_size": 8},
            "parallelism.pp_schedule: 1f1b needs as many micro-batches as stages, pp 2 x 1 = 2, but "
            "training.global_batch_size 8 / (micro_batch_size 8 x data-parallel size 1) = 1 micro-batch(es)",
        ),
        ({"pp": 4, "pp_schedule": "zbv"}, "parallelism.pp: pp 4 x 2 stage(s) a rank = 8 stages, but the model has 4 "),
        ({"pp": 2, "pp_schedule": "zbv", "compiled": True}, "compile.enable: True: pp_schedule zbv takes the backward"),
        (
            {"pp": 2, "recompute": True, "compiled": True},
            "activation_checkpoint.mode: full, and compile.enable is True: between a micro-batch's forward and its ",
        ),
    ],
)
def test_refused_before_any_process_group(dump_folder: str, change: Case, expected: str) -> None:
    config = config_of(Path(dump_folder), {"model": "moe"} | change)
    (fault,) = config.cross_faults(change["pp"])
    assert str(fault).startswith(expected)


def test_a_backward_in_two_parts_finds_what_selective_recompute_keeps_once_only(dump_folder: str) -> None:
    config = config_of(Path(dump_folder), {"model": "moe", "pp": 2, "pp_schedule": "zbv"})
    config.activation_checkpoint.mode = "selective"
    (fault,) = config.cross_faults(2)
    assert str(fault).startswith(
        "parallelism.pp_schedule: zbv takes the backward apart, and activation_checkpoint.mode is selective: what it "
    )


def test_a_world_that_does_not_fit_hides_no_other_fault(dump_folder: str) -> None:
    change = {"pp": 2, "tp": 2, "dp_shard": 1, "mode": "validate", "compiled": True, "micro_batch_size": 8}
    config = config_of(Path(dump_folder), {"model": "moe"} | change)
    faults = {fault.path: fault.fact for fault in config.cross_faults(6)}
    assert faults.keys() == {"parallelism.dp_shard", "parallelism.pp_schedule", "compile.enable"}
    assert faults["parallelism.dp_shard"].endswith(" x tp 2 x pp 2 = 4 ranks, but the world size is 6")
    # What is left for dp_shard is not known, and with it the micro-batches.
    config.parallelism.dp_shard = -1
    assert [fault.path for fault in config.cross_faults(6)] == ["parallelism.tp", "compile.enable"]
    config.training.micro_batch_size, config.parallelism.dp_replicate = 3, 2
    config.model_spec = dataclasses.replace(config.model_spec, pipelining_fn=None)
    assert [fault.path for fault in config.cross_faults(8)] == [
        "training.global_batch_size",
        "model_spec.pipelining_fn",
        "compile.enable",
    ]


class WithoutBoundary(BaseModel):
    """A model that its family takes apart, but that does not say what its parts send."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        """Nothing to set."""


def test_a_model_without_a_boundary_is_refused(dump_folder: str) -> None:
    config = config_of(Path(dump_folder), {"model": "moe", "pp": 2})
    config.model_spec = dataclasses.replace(config.model_spec, model=WithoutBoundary.Config())
    assert [str(fault) for fault in config.cross_faults(2)] == [
        "model_spec.model: WithoutBoundary has no boundary(), which tells what one part of it sends to the next; "
        "parallelism.pp is 2; change it, or set parallelism.pp 1"
    ]


def test_functions_and_optimizers_that_know_no_pipeline_are_refused(dump_folder: str) -> None:
    config = config_of(Path(dump_folder), {"model": "moe", "pp": 2, "pp_schedule": "interleaved_1f1b"})
    assert config.model_spec is not None and not list(config.cross_faults(2))
    config.model_spec.pipelining_fn = None
    config.model_spec.clip_grad_fn = print
    config.optimizer = Target.of(torch.optim.SGD, lr=0.1)
    config.lr_scheduler = Target.of(torch.optim.lr_scheduler.LinearLR)
    assert [(fault.path, fault.fact) for fault in config.cross_faults(2)] == [
        ("model_spec.pipelining_fn", "None: this family cannot be taken apart; parallelism.pp is 2"),
        (
            "model_spec.clip_grad_fn",
            "given: it sees the parameters of one stage alone, and cannot tell the norm of all; parallelism.pp is 2",
        ),
        (
            "optimizer",
            "a plain SGD: it is made for one model part, and each rank has 2; parallelism.pp is 2",
        ),
        (
            "lr_scheduler",
            "a plain LinearLR: it is made for one optimizer, and each rank has 2; parallelism.pp is 2",
        ),
    ]


# Checkpoints, folders of weights, and what a rank holds


def saved_config(folder: Path, **degrees: Any) -> TrainerConfig:
    config = tiny_config(folder, steps=8)
    config.model_spec = MODELS["moe tied"]()
    config.checkpoint = CheckpointManager.Config(interval_steps=4)
    return with_parallelism(config, **degrees)


def weights(trainer: HyperTrainer) -> list[tuple[str, torch.Tensor]]:
    return [
        (name, (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone())
        for part in trainer.model_parts
        for name, p in part.named_parameters()
    ]


def run_to(config: TrainerConfig, step: int) -> list[tuple[str, torch.Tensor]]:
    with config.build() as trainer:
        trainer.training_steps = step
        trainer.train()
        return weights(trainer)


def masked_step(config: TrainerConfig) -> tuple[float, float]:
    """Loss and gradient norm of a step in which one micro-batch trains nothing and one trains a single token."""
    with config.build() as trainer:
        micro_batches = next(trainer.dataloader)
        micro_batches[1]["labels"].fill_(-100)
        micro_batches[2]["labels"][:, 1:].fill_(-100)
        record = trainer.train_step(iter([micro_batches]))
        return record.loss, record.grad_norm


def mixed_step(config: TrainerConfig) -> dict[str, float]:
    """The numbers of the first step, computed in bfloat16."""
    config.training.dtype, config.training.mixed_precision_param = "float32", "bfloat16"
    with config.build() as trainer:
        record = trainer.train_step(iter(trainer.dataloader))
        return {"loss": record.loss, "aux_loss": record.extra["aux_loss"], "grad_norm": record.grad_norm}


def linear(optimizer: torch.optim.Optimizer, **_: Any) -> torch.optim.lr_scheduler.LinearLR:
    """What only its product tells of: that it sets the rate of one optimizer."""
    return torch.optim.lr_scheduler.LinearLR(optimizer)


def refusals(folder: Path) -> list[str]:
    """What cannot be told before the parts are made, or before the data are read."""
    scheduled = saved_config(folder / "scheduled", pp=2, pp_schedule="zbv")
    scheduled.lr_scheduler = Target.of(linear)
    with pytest.raises(ConfigError) as unscheduled:
        scheduled.build()
    with saved_config(folder / "short", pp=2).build() as trainer:
        micro_batches = next(trainer.dataloader)
        short = {name: value[:, :16] for name, value in micro_batches[1].items() if name != "cu_seqlens"}
        micro_batches[1] = {**short, "cu_seqlens": [0, 16, 32]}
        with pytest.raises(RunError) as too_short:
            trainer.train_step(iter([micro_batches]))
    return [str(unscheduled.value), str(too_short.value)]


def most_live(schedule: str, folder: Path) -> int:
    """Micro-batches whose activations this rank holds at the same time, at most, in a step of eight."""
    config = with_parallelism(tiny_config(folder, steps=5, micro_batch_size=1), pp=2, pp_schedule=schedule)
    config.model_spec = MODELS["moe"]()
    with config.build() as trainer:
        (stage,) = trainer.forward_backward._pipeline._stages  # type: ignore[attr-defined]
        forward, counts = stage.forward_one_chunk, []

        def counted(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            counts.append(len(stage.fwd_cache))
            return output

        stage.forward_one_chunk = counted
        trainer.train_step(iter(trainer.dataloader))
    return max(counts)


def save_and_resume(folder: str) -> dict[str, Any]:
    place = Path(folder)
    results: dict[str, Any] = {}
    for schedule in ("1f1b", "zbv"):
        pp = {"pp": 2, "pp_schedule": schedule}
        results[f"{schedule} straight"] = run_to(saved_config(place / f"{schedule} straight", **pp), 8)
        run_to(saved_config(place / f"{schedule} resumed", **pp), 4)
        results[f"{schedule} resumed"] = run_to(saved_config(place / f"{schedule} resumed", **pp), 8)
    with saved_config(place / "zbv straight", pp=2, pp_schedule="zbv").build() as trainer:
        trainer.train()  # there is nothing left to train, so the checkpoint is all that it does
        trainer.checkpointer.export_hf(place / "exported")
    start = saved_config(place / "started", pp=2, pp_schedule="zbv")
    start.checkpoint = CheckpointManager.Config(enable=False, load_from=str(place / "exported"))
    results["started"] = run_to(start, 0)
    results["refused"] = refusals(place)
    results["masked"] = masked_step(saved_config(place / "masked", pp=2))
    results["mixed"] = mixed_step(saved_config(place / "mixed", pp=2, pp_schedule="zbv"))
    results["live"] = {schedule: most_live(schedule, place / "live") for schedule in ("gpipe", "1f1b")}
    return results


@pytest.fixture(scope="module")
def by_rank(folder: Path) -> list[dict[str, Any]]:
    return run_world(2, save_and_resume, str(folder), timeout=280)


def test_one_optimizers_scheduler_and_short_rows_are_refused(by_rank: list[dict[str, Any]]) -> None:
    for rank in by_rank:
        assert rank["refused"] == [
            "lr_scheduler: a plain LinearLR: it sets the rate of one optimizer, and each rank has 2; schedule all of "
            "`optimizers`, or set parallelism.pp 1",
            "a micro-batch has [rows, tokens] [2, 16], but parallelism.pp sends all from stage to stage as "
            "training.micro_batch_size x training.seq_len, [2, 32]; pad them in dataset or collate_fn",
        ]


def together(by_rank: list[dict[str, Any]], name: str) -> dict[str, torch.Tensor]:
    """The parameters of all ranks; those that several parts hold must be equal."""
    found: dict[str, torch.Tensor] = {}
    for rank in by_rank:
        for parameter, value in rank[name]:
            assert torch.equal(found.setdefault(parameter, value), value), parameter
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_resumed_pipeline_ends_in_the_same_bits(folder: Path, by_rank: Any, schedule: str) -> None:
    straight, resumed = together(by_rank, f"{schedule} straight"), together(by_rank, f"{schedule} resumed")
    assert straight.keys() == resumed.keys()
    assert all(torch.equal(value, resumed[name]) for name, value in straight.items())
    lines = [metrics(folder / f"{schedule} {kind}") for kind in ("straight", "resumed")]
    assert deterministic(lines[0]) == deterministic(lines[1]) and len(lines[0]) == 8


def test_tied_weights_are_held_twice_and_saved_once(by_rank: Any) -> None:
    names = [name for rank in by_rank for name, _ in rank["1f1b straight"]]
    assert sorted({name for name in names if names.count(name) > 1}) == ["embed_tokens.weight"]
    assert [name for name, _ in by_rank[0]["zbv straight"]].count("embed_tokens.weight") == 2
    assert not any(name == "embed_tokens.weight" for name, _ in by_rank[1]["zbv straight"])


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_one_process_goes_on_from_the_checkpoint_of_a_pipeline(folder: Path, by_rank: Any, schedule: str) -> None:
    config = saved_config(folder / f"{schedule} resumed")
    config.dump_folder = str(folder / f"{schedule} straight")
    config.checkpoint = CheckpointManager.Config(load_step=4)
    expected = metrics(folder / f"{schedule} resumed")
    alone = run_to(config, 8)
    lines = metrics(folder / f"{schedule} straight")
    assert [line["step"] for line in lines] == list(range(1, 9))
    for a, b in zip(expected, lines, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], abs=TOLERANCE)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], abs=TOLERANCE)
    pipeline = together(by_rank, f"{schedule} straight")
    assert {name for name, _ in alone} == pipeline.keys()
    for name, value in alone:
        torch.testing.assert_close(value, pipeline[name], rtol=0, atol=1e-9)


def test_weights_leave_a_pipeline_and_come_back(folder: Path, by_rank: Any) -> None:
    model = load_hf(folder / "exported", dtype=torch.float64)
    trained, started = together(by_rank, "zbv straight"), together(by_rank, "started")
    assert trained.keys() == started.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, trained[name]) and torch.equal(parameter, started[name]), name


def test_micro_batches_without_labels(folder: Path, by_rank: Any) -> None:
    loss, grad_norm = masked_step(saved_config(folder / "masked alone"))
    for rank in by_rank:
        assert rank["masked"][0] == pytest.approx(loss, abs=1e-12)
        assert rank["masked"][1] == pytest.approx(grad_norm, abs=1e-12)


def test_what_is_summed_in_float32_passes_between_stages_in_float32(folder: Path, by_rank: Any) -> None:
    alone = mixed_step(saved_config(folder / "mixed alone"))
    for rank in by_rank:
        assert rank["mixed"]["loss"] == pytest.approx(alone["loss"], rel=1e-6)
        assert rank["mixed"]["aux_loss"] == pytest.approx(alone["aux_loss"], rel=1e-6)
        assert rank["mixed"]["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-2)


def test_1f1b_holds_as_many_micro_batches_as_stages_lie_ahead(by_rank: Any) -> None:
    assert [rank["live"] for rank in by_rank] == [{"gpipe": 8, "1f1b": 2}, {"gpipe": 8, "1f1b": 1}]
