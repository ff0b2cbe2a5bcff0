"""HyperTrainer builds every component once, in the order of its eleven steps, with the right runtime arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from hyper_parallel.components.loss import BaseLoss
from hyper_parallel.components.tokenizer import BaseTokenizer
from hyper_parallel.config.sections import TrainingConfig
from hyper_parallel.protocols.initializer import Constant
from hyper_parallel.protocols.model import BaseModel, ModelOutput
from hyper_parallel.protocols.model_spec import ModelSpec
from hyper_parallel.trainer import HyperTrainer
from hyper_parallel.trainer.callbacks import Callback
from hyper_parallel.trainer.config import TrainerConfig

Calls = list[tuple[str, dict[str, Any]]]


class FakeModel(BaseModel):
    """One parameter; notes when it is built, verified and initialised."""

    calls: ClassVar[Calls] = []

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        """Sizes."""

        vocab_size: int = 7
        max_position_embeddings: int = 64

        def update_from_config(self, trainer_config: TrainerConfig) -> None:
            FakeModel.calls.append(("update_from_config", {"trainer_config": trainer_config, "config": self}))

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.vocab_size, self.max_seq_len = config.vocab_size, config.max_position_embeddings
        self.add_parameter("weight", 3, role="matrix", init=Constant(0.5))
        FakeModel.calls.append(("model", {"config": config, "device": self.weight.device, "dtype": self.weight.dtype}))

    def verify_module_protocol(self) -> None:
        super().verify_module_protocol()
        FakeModel.calls.append(("verify_module_protocol", {}))

    def init_weights(self, seed: int) -> None:
        super().init_weights(seed)
        FakeModel.calls.append(("init_weights", {"seed": seed, "device": self.weight.device}))

    def forward(self, input_ids_BT: torch.Tensor, **_: Any) -> ModelOutput:
        raise AssertionError("building a trainer runs no forward pass")

    def blocks(self) -> list[torch.nn.Module]:
        return []

    def flops_per_token(self, seq_len: int) -> float:
        return 6.0 * seq_len


class Recorder:
    """A slot's content: notes each `build` and returns `product`."""

    def __init__(self, name: str, calls: Calls, product: Callable[..., Any]) -> None:
        self._name, self._calls, self._product = name, calls, product

    def build(self, **runtime: Any) -> Any:
        self._calls.append((self._name, runtime))
        return self._product(**runtime)


class FakeAdapter:
    def __init__(self, config: BaseModel.Config) -> None:
        self.config = config


class FakeTokenizer(BaseTokenizer):
    """Nothing is tokenised while a trainer is built."""

    vocab_size = 5
    encode_batch = decode = None

    def __init__(self) -> None:
        pass


class FakeLoss(BaseLoss):
    """Nor is anything trained."""

    __call__ = None

    def __init__(self) -> None:
        pass


class FakeLoader:
    rows_per_epoch = 100


def parallelize(model: BaseModel, parallel_dims: Any, **sections: Any) -> BaseModel:
    FakeModel.calls.append(("parallelize_fn", {"model": model, "parallel_dims": parallel_dims, **sections}))
    return model


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[HyperTrainer, dict[str, dict[str, Any]], list[str]]:
    monkeypatch.chdir(tmp_path)
    calls = FakeModel.calls = []
    model_config = FakeModel.Config()
    spec = ModelSpec(
        name="fake",
        flavor="tiny",
        factory="nowhere.create",
        model=model_config,
        parallelize_fn=parallelize,
        state_dict_adapter=FakeAdapter,
    )
    config = TrainerConfig(
        model_spec=spec,
        hf_assets_path="assets",
        dump_folder="dump",
        training=TrainingConfig(steps=9, seq_len=16, global_batch_size=6, micro_batch_size=2, seed=11, dtype="float64"),
        tokenizer=Recorder("tokenizer", calls, lambda **_: FakeTokenizer()),
        dataloader=Recorder("dataloader", calls, lambda **_: FakeLoader()),
        optimizer=Recorder("optimizer", calls, lambda params, **_: torch.optim.SGD(params, lr=0.1)),
        lr_scheduler=Recorder("lr_scheduler", calls, lambda **_: "lr_schedulers"),
        loss=Recorder("loss", calls, lambda **_: FakeLoss()),
        checkpoint=Recorder("checkpoint", calls, lambda **_: "checkpointer"),
        metrics=Recorder("metrics", calls, lambda **_: "metrics"),
        profiler=Recorder("profiler", calls, lambda **_: "profiler"),
        validator=Recorder("validator", calls, lambda **_: "validator"),
        callbacks=(Recorder("callbacks", calls, Callback),),
    )
    trainer = config.build()
    return trainer, dict(calls), [name for name, _ in calls]


def test_each_component_is_built_once_in_the_order_of_the_steps(built: Any) -> None:
    trainer, _, names = built
    assert type(trainer) is HyperTrainer
    assert names == [
        "tokenizer",
        "dataloader",
        "update_from_config",
        "model",
        "verify_module_protocol",
        "parallelize_fn",
        "init_weights",
        "optimizer",
        "lr_scheduler",
        "loss",
        "checkpoint",
        "metrics",
        "profiler",
        "validator",
        "callbacks",
    ]


def test_runtime_arguments(built: Any) -> None:
    trainer, calls, _ = built
    assert calls["tokenizer"] == {"hf_assets_path": "assets"}
    loader = {
        "tokenizer": trainer.tokenizer,
        "seq_len": 16,
        "micro_batch_size": 2,
        "global_batch_size": 6,
        "dp_rank": 0,
        "dp_size": 1,
        "seed": 11,
    }
    assert calls["dataloader"] == loader
    (model,) = trainer.model_parts
    optimizer = calls["optimizer"]
    assert optimizer["model_parts"] == [model] and optimizer["model"] is model
    assert [p for group in optimizer["params"] for p in group["params"]] == [model.weight]
    assert trainer.optimizers.optimizers[0].param_groups[0]["params"] == [model.weight]
    assert calls["lr_scheduler"] == {"optimizers": trainer.optimizers, "training_steps": 9}
    assert calls["loss"] == {"vocab_size": 7}
    adapter = calls["checkpoint"]["sd_adapter"]
    assert type(adapter) is FakeAdapter and adapter.config is calls["update_from_config"]["config"]
    assert calls["checkpoint"] == {
        "dump_folder": "dump",
        "sd_adapter": adapter,
        "tokenizer": trainer.tokenizer,
        "model_parts": [model],
        "optimizers": trainer.optimizers,
        "lr_schedulers": "lr_schedulers",
        "dataloader": trainer.dataloader,
        "train_state": trainer.state,
    }
    assert calls["metrics"] == {
        "dump_folder": "dump",
        "training_steps": 9,
        "flops_per_token": 96.0,
        "peak_flops": None,
        "is_writer": True,
    }
    assert calls["profiler"] == {"dump_folder": "dump"}
    assert calls["validator"] == {
        "model_parts": [model],
        "evaluate": trainer.forward_backward.evaluate,
        "loader_arguments": loader,
        "dp_group": None,
        "loss_group": None,
        "training_steps": 9,
    }
    assert calls["callbacks"] == {"trainer": trainer}


def test_the_runtime_arguments_are_those_that_the_slots_declare(built: Any) -> None:
    _, calls, _ = built
    import dataclasses

    slots = {f.name: f.metadata["slot"].runtime for f in dataclasses.fields(TrainerConfig) if "slot" in f.metadata}
    assert slots.keys() - calls.keys() == {"data_transform", "dataset", "collate_fn"}, "those that were given none"
    of_targets = {"optimizer", "train_iters", "batch_size", "dp_world_size", "max_seq_len"}
    of_datasets = {"dataset", "collate_fn", "batch_sampler"}
    left_out = {"dataloader": of_targets | of_datasets, "lr_scheduler": of_targets}
    given = {name: set(runtime) - left_out.get(name, set()) for name, runtime in slots.items() if name in calls}
    assert {name: set(calls[name]) for name in given} == given


def test_the_model_is_made_on_meta_from_a_private_copy_and_materialised_after_it_is_parallelised(built: Any) -> None:
    trainer, calls, _ = built
    spec = trainer.config.model_spec
    seen = calls["update_from_config"]
    assert seen["trainer_config"] is trainer.config
    assert seen["config"] == spec.model and seen["config"] is not spec.model
    assert calls["model"] == {"config": seen["config"], "device": torch.device("meta"), "dtype": torch.float64}
    sections = calls["parallelize_fn"]
    assert sections.pop("model") is trainer.model_parts[0] and sections.pop("parallel_dims") is trainer.parallel_dims
    assert sections == {
        "training": trainer.config.training,
        "parallelism": trainer.config.parallelism,
        "activation_checkpoint": trainer.config.activation_checkpoint,
        "compile": trainer.config.compile,
        "dump_folder": "dump",
    }
    assert calls["init_weights"] == {"seed": 11, "device": torch.device("cpu")}
    assert trainer.model_parts[0].weight.tolist() == [0.5, 0.5, 0.5]
