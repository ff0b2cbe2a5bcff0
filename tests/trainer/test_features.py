"""Choices of a run that must not change its numbers, or must change them in a known way."""

from __future__ import annotations

import dataclasses
import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hyper_parallel.components.checkpoint import CheckpointManager
from hyper_parallel.components.loss import ChunkedCELoss
from hyper_parallel.components.lr_scheduler import LRSchedulersContainer
from hyper_parallel.components.optimizer import AdamW
from hyper_parallel.components.profiler import Profiler
from hyper_parallel.config.sections import ActivationCheckpointConfig, CompileConfig, DebugConfig, ParallelismConfig
from hyper_parallel.config.target import Target
from hyper_parallel.trainer.config import TrainerConfig
from hyper_parallel.trainer.errors import NotFiniteHereError
from tests.trainer.runs import deterministic, metrics, tiny_config, train


def assert_close(first: list[dict[str, Any]], second: list[dict[str, Any]], tolerance: float) -> None:
    for a, b in zip(first, second, strict=True):
        for key in ("loss", "grad_norm"):
            assert b[key] == pytest.approx(a[key], abs=tolerance), (a["step"], key)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return train(tiny_config(tmp_path_factory.mktemp("plain"), steps=6))


def test_full_recompute_changes_no_bit(dump_folder: str, plain: list[dict[str, Any]]) -> None:
    config = tiny_config(dump_folder, steps=6)
    config.activation_checkpoint = ActivationCheckpointConfig(mode="full")
    assert deterministic(train(config)) == deterministic(plain)


def test_chunked_loss_follows_the_whole_one(dump_folder: str, plain: list[dict[str, Any]]) -> None:
    config = tiny_config(dump_folder, steps=6)
    config.loss = ChunkedCELoss.Config(chunk_tokens=7)
    assert_close(plain, train(config), 1e-10)


def test_compiled_blocks_follow_eager_ones(dump_folder: str, plain: list[dict[str, Any]]) -> None:
    config = tiny_config(dump_folder, steps=6)
    config.compile = CompileConfig(enable=True, backend="aot_eager")
    assert_close(plain, train(config), 1e-10)


@pytest.mark.parametrize("implementation", ["foreach", "for_loop"])
def test_implementations_of_the_optimizer_agree(
    dump_folder: str, plain: list[dict[str, Any]], implementation: Any
) -> None:
    config = tiny_config(dump_folder, steps=6)
    config.optimizer = AdamW.Config(lr=3e-3, implementation=implementation)
    assert_close(plain, train(config), 1e-10)


def test_bfloat16_compute_is_near_and_not_equal(dump_folder: str, plain: list[dict[str, Any]]) -> None:
    mixed = train(tiny_config(dump_folder, steps=6, dtype="float32", mixed_precision_param="bfloat16"))
    differences = [abs(a["loss"] - b["loss"]) for a, b in zip(plain, mixed, strict=True)]
    assert 1e-5 < max(differences) < 5e-2


def sgd_config(folder: Path) -> TrainerConfig:
    config = tiny_config(folder, steps=8)
    config.optimizer = Target.of(torch.optim.SGD, lr=0.5, momentum=0.9)
    config.lr_scheduler = LRSchedulersContainer.Config(decay_type="constant")
    config.checkpoint = CheckpointManager.Config(interval_steps=4)
    return config


def test_a_plain_torch_optimizer_trains_and_resumes(tmp_path: Path) -> None:
    straight = train(sgd_config(tmp_path / "straight"))
    assert straight[-1]["loss"] < straight[0]["loss"] - 0.1
    with sgd_config(tmp_path / "stopped").build() as trainer:
        trainer.training_steps = 4
        trainer.train()
    resumed = train(sgd_config(tmp_path / "stopped"))
    assert deterministic(resumed) == deterministic(straight)


def test_profile_of_a_window_of_steps(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, steps=6)
    config.profiler = Profiler.Config(enable=True, wait_steps=1, warmup_steps=1, active_steps=2)
    train(config)
    (trace,) = (tmp_path / "profile").rglob("*.json*")
    assert "aten::scaled_dot_product_attention" in trace.read_text()


def test_check_nan_inf_names_the_module(dump_folder: str) -> None:
    config = tiny_config(dump_folder, steps=2)
    config.debug = DebugConfig(check_nan_inf=True)
    with config.build() as trainer:
        (model,) = trainer.model_parts
        with torch.no_grad():
            model.layers[1].mlp.down_proj.weight[0, 0] = float("nan")
        with pytest.raises(NotFiniteHereError, match=r"the output of module 'layers\.1\.mlp\.down_proj' is not finite"):
            trainer.train()


def test_epochs_give_the_number_of_steps(dump_folder: str) -> None:
    config = tiny_config(dump_folder, steps=1, seq_len=128)
    config.training.steps, config.training.epochs = None, 2
    with config.build() as trainer:
        assert trainer.training_steps == 2 * trainer.dataloader.rows_per_epoch // 8
        trainer.train()
        assert trainer.state.step == trainer.training_steps == len(metrics(dump_folder))


def test_each_line_of_the_metrics_has_every_number(dump_folder: str) -> None:
    train(tiny_config(dump_folder, steps=2))
    for line in (Path(dump_folder) / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        assert list(record)[:9] == [
            *("step", "loss", "grad_norm", "lr", "tokens"),
            *("step_seconds", "tokens_per_second", "data_seconds", "memory_bytes"),
        ]
        assert record["tokens_per_second"] == record["tokens"] / record["step_seconds"]
        assert 0 < record["data_seconds"] < record["step_seconds"]


def test_a_model_may_clip_in_its_own_way(dump_folder: str, plain: list[dict[str, Any]]) -> None:
    seen: list[float | None] = []

    def clip_to_nothing(parameters: list[torch.nn.Parameter], max_norm: float | None) -> torch.Tensor:
        seen.append(max_norm)
        for parameter in parameters:
            parameter.grad = None
        return torch.tensor(7.0)

    config = tiny_config(dump_folder, steps=2)
    assert config.model_spec is not None
    config.model_spec.clip_grad_fn = clip_to_nothing
    config.optimizer = AdamW.Config(lr=3e-3, weight_decay=0.0)
    lines = train(config)
    assert seen == [1.0, 1.0] and [line["grad_norm"] for line in lines] == [7.0, 7.0]
    with config.build() as trainer:
        before = [p.detach().clone() for p in trainer.model_parts[0].parameters()]
        trainer.train()
        after = list(trainer.model_parts[0].parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_model_that_its_spec_builds_in_one_call(dump_folder: str) -> None:
    """With the same weights as the steps give it, and with no Config of its own to check anything by."""
    steps = train(tiny_config(f"{dump_folder}/steps", steps=2))
    config = tiny_config(f"{dump_folder}/one_call", steps=2)
    spec, told = config.model_spec, {}

    def build(model_config: Any, parallel_dims: Any, **sections: Any) -> Any:
        told.update(sections, model_config=model_config)
        model = spec.model.build()
        model.to(torch.float64).init_weights(sections["training"].seed)
        return model

    config.model_spec = dataclasses.replace(
        spec, model=None, parallelize_fn=None, pipelining_fn=None, state_dict_adapter=None, build_model_fn=build
    )
    assert list(config.cross_faults(1)) == []
    assert [line["loss"] for line in train(config)] == [line["loss"] for line in steps]
    assert told.pop("model_config") is None
    assert told.keys() == {"training", "parallelism", "activation_checkpoint", "compile", "dump_folder"}

    config = tiny_config(dump_folder, steps=1)
    config.model_spec = dataclasses.replace(spec, build_model_fn=build)
    config.parallelism = ParallelismConfig(pp=2)
    assert "parallelism.pp: 2, but qwen3_moe has a build_model_fn, which builds whole models" in str(
        next(config.cross_faults(2))
    )
    config.model_spec = dataclasses.replace(spec, model=None, build_model_fn=build)
    config.parallelism = ParallelismConfig(tp=2)
    facts = [str(fault) for fault in config.cross_faults(2)]
    assert "parallelism.tp: 2, but qwen3_moe has no model Config, so there is no plan to check" in facts[0]
    assert "model_spec.state_dict_adapter: given, but qwen3_moe has no model Config" in facts[1]


def test_garbage_is_collected_at_the_configured_steps_only(dump_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    config = tiny_config(dump_folder, steps=6, gc_steps=2)
    with config.build() as trainer:
        monkeypatch.setattr(gc, "collect", lambda *_: steps.append(trainer.state.step))
        assert gc.isenabled()
        trainer.train()
        assert gc.isenabled() and gc.get_freeze_count() == 0
        monkeypatch.undo()
    assert steps == [0, 2, 4, 6]
