"""Every field of a model/data/train file: mapped, and then changing it changes the right value, or refused by name."""

from __future__ import annotations

import dataclasses
import json
import logging
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from hyper_parallel.components.data import TextDataLoader
from hyper_parallel.components.data.sources import IndexedSource
from hyper_parallel.config import manager, resolver
from hyper_parallel.config.configurable import ConfigNode, join
from hyper_parallel.config.errors import ConfigError, Fault
from hyper_parallel.trainer.config import TrainerConfig
from hyper_parallel.trainer.legacy import HyperTrainerConfig, legacy_to_trainer_config, legacy_words
from hyper_parallel.trainer.legacy.fields import COMPUTED, COPIED, ONLY
from tests.trainer.runs import TINY, small_corpus

TEXT = {"data.type": "json_file"}
HUB = {"data.type": "hf_datasets", "data.train_path": "owner/name"}
SINKS, CALLBACKS = "metrics.sinks", "callbacks"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """A Hugging Face folder of a tiny model, with weights and a tokenizer."""
    from hyper_parallel import models
    from hyper_parallel.assets import TOKENIZER_FOLDER
    from hyper_parallel.models.qwen3_moe import create_model_spec

    folder = tmp_path_factory.mktemp("hf")
    model = create_model_spec("debug", **TINY).model.build()
    model.init_weights(1)
    models.save_hf(model, folder)
    for file in TOKENIZER_FOLDER.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return str(folder)


@pytest.fixture(autouse=True)
def with_wandb(monkeypatch):
    monkeypatch.setattr("hyper_parallel.components.metrics.wandb.find_spec", lambda name: name)


def arguments(**values: Any) -> HyperTrainerConfig:
    """The defaults with the family that there is, and `values` by their dotted paths."""
    args = HyperTrainerConfig()
    args.model.name = "qwen3_moe"
    for name, value in values.items():
        group, _, field = name.rpartition(".")
        setattr(attrgetter(group)(args), field, value)
    return args


def convert(**values: Any) -> TrainerConfig:
    return legacy_to_trainer_config(arguments(**values))


def checked(config: TrainerConfig) -> tuple[Fault, ...]:
    """The faults of the whole tree, in legacy words."""
    with pytest.raises(ConfigError) as caught, legacy_words():
        manager.finish(config, world_size=1)
    return caught.value.faults


def faults_of(**values: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        convert(**values)
    return [str(fault) for fault in caught.value.faults]


def at(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = config[int(name)] if name.isdecimal() else getattr(config, name)
    return config


def leaves(node: ConfigNode, path: str = "") -> list[str]:
    names = []
    for f in dataclasses.fields(node):
        value = getattr(node, f.name)
        names += leaves(value, join(path, f.name)) if isinstance(value, ConfigNode) else [join(path, f.name)]
    return names


# Field, a value, what else is set, path of the trained tree, what stands there.
COPIES: list[tuple[str, Any, dict[str, Any], Any]] = [
    ("data.max_seq_len", 64, {}, 64),
    ("data.num_workers", 2, {}, 2),
    ("data.shuffle", False, {}, False),
    ("data.train_size", 99, {}, 99),
    ("train.global_batch_size", 24, {}, 24),
    ("train.micro_batch_size", 4, {}, 4),
    ("train.seed", 7, {}, 7),
    ("train.accelerator.dp_replicate", 2, {}, 2),
    ("train.accelerator.tp", 2, {}, 2),
    ("train.accelerator.cp", 2, {}, 2),
    ("train.accelerator.pp", 2, {}, 2),
    ("train.accelerator.ep", 2, {}, 2),
    ("train.accelerator.cpu_offload", True, {}, True),
    ("train.optimizer.lr", 3e-4, {}, 3e-4),
    ("train.optimizer.betas", (0.8, 0.9), {}, (0.8, 0.9)),
    ("train.optimizer.eps", 1e-6, {}, 1e-6),
    ("train.optimizer.weight_decay", 0.2, {}, 0.2),
    ("train.optimizer.lr_decay_style", "linear", {}, "linear"),
    ("train.optimizer.loss_aggregation", "rank_average", {}, "rank_average"),
    ("train.optimizer.max_grad_norm", 1e9, {}, 1e9),
    ("train.checkpoint.output_dir", "elsewhere", {}, "elsewhere"),
    ("train.profile.enabled", True, {}, True),
    ("train.profile.output_dir", "traces", {}, "traces"),
    ("train.profile.wait_steps", 5, {}, 5),
    ("train.profile.warmup_steps", 2, {}, 2),
    ("train.profile.active_steps", 4, {}, 4),
    ("train.debug.deterministic", True, {}, True),
    ("train.debug.check_nan_inf", True, {}, True),
    ("train.debug.gc_steps", 9, {}, 9),
]
BOARD, WANDB = {"train.tensorboard.enabled": True}, {"train.wandb.enabled": True}
MEMORY = {"train.memory_monitor.enabled": True}
NARROW = {"train.mixed_precision.enabled": True}
HF = "{folder}"
"""Stands for the fixture's folder."""
MAPPED: list[tuple[str, Any, dict[str, Any], str, Any]] = [
    *((name, value, context, COPIED[name], expected) for name, value, context, expected in COPIES),
    ("model.name", "qwen3", {}, "model_spec.name", "qwen3"),
    ("model.weights_path", HF, {}, "model_spec.model.hidden_size", 32),
    ("model.weights_path", HF, {}, "checkpoint.load_from", HF),
    ("model.weights_path", HF, TEXT, "hf_assets_path", HF),
    ("model.tokenizer_path", HF, {}, "hf_assets_path", HF),
    ("model.num_hidden_layers", 3, {}, "model_spec.model.num_hidden_layers", 3),
    ("model.hidden_size", 512, {}, "model_spec.model.hidden_size", 512),
    ("model.intermediate_size", 48, {}, "model_spec.model.intermediate_size", 48),
    ("model.num_attention_heads", 8, {}, "model_spec.model.num_attention_heads", 8),
    ("model.num_key_value_heads", 4, {}, "model_spec.model.num_key_value_heads", 4),
    ("model.vocab_size", 300, {}, "model_spec.model.vocab_size", 300),
    ("model.vocab_size", 300, {}, "tokenizer.vocab_size", 300),
    ("model.max_position_embeddings", 8192, {}, "model_spec.model.max_position_embeddings", 8192),
    ("model.config_overrides", {"num_experts": 8}, {}, "model_spec.model.num_experts", 8),
    ("model.config_overrides", {"text_config": {"num_experts": 8}}, {}, "model_spec.model.num_experts", 8),
    ("model.config_overrides", {"text_config.rms_norm_eps": 1e-5}, {}, "model_spec.model.rms_norm_eps", 1e-5),
    ("data.type", "json_file", {}, "dataloader.source", "text"),
    ("data.train_path", small_corpus(), TEXT, "dataloader.path", small_corpus()),
    ("data.text_key", "body", TEXT | {"data.train_path": small_corpus()}, "dataloader.text_field", "body"),
    ("data.subset", "en", HUB, "dataloader.subset", "en"),
    ("data.streaming", True, TEXT, "dataloader.reading", "stream"),
    ("data.prefetch_factor", 5, {}, "dataloader.prefetch", 5),
    ("train.max_steps", 7, {}, "training.steps", 7),
    (
        "train.num_train_epochs",
        3,
        {"train.max_steps": None, "train.optimizer.lr_warmup_ratio": 0.0},
        "training.epochs",
        3,
    ),
    ("train.comm_backend", "gloo", {}, "comm.backend", "gloo"),
    ("train.accelerator.dp", 4, {}, "parallelism.dp_shard", 4),
    ("train.accelerator.dp_shard", 4, {}, "parallelism.dp_shard", 4),
    ("train.accelerator.zero_stage", 2, {}, "parallelism.reshard_after_forward", False),
    ("train.accelerator.reshard_after_forward", False, {}, "parallelism.reshard_after_forward", False),
    ("train.mixed_precision.enabled", True, {}, "training.mixed_precision_param", "bfloat16"),
    ("train.mixed_precision.enabled", True, {}, "training.mixed_precision_reduce", "float32"),
    ("train.mixed_precision.param_dtype", "float64", NARROW, "training.mixed_precision_param", "float64"),
    ("train.mixed_precision.reduce_dtype", "bfloat16", NARROW, "training.mixed_precision_reduce", "bfloat16"),
    ("train.gradient_checkpointing.activation_checkpoint", "full", {}, "activation_checkpoint.mode", "full"),
    ("train.gradient_checkpointing.activation_checkpoint", "selective", {}, "activation_checkpoint.mode", "selective"),
    ("train.optimizer.lr_min", 2e-5, {}, "lr_scheduler.min_lr", 2e-5),
    ("train.optimizer.lr_warmup_ratio", 0.25, {"train.max_steps": 10}, "lr_scheduler.warmup_steps", 3),
    ("train.optimizer.foreach", True, {}, "optimizer.implementation", "foreach"),
    ("train.optimizer.foreach", False, {}, "optimizer.implementation", "for_loop"),
    ("train.checkpoint.load_path", HF, {}, "checkpoint.load_from", HF),
    ("train.checkpoint.save_steps", 20, {}, "checkpoint.interval_steps", 20),
    ("train.checkpoint.save_steps", 20, {}, "callbacks.0.save_steps", 20),
    ("train.checkpoint.save_steps", 0, {}, "checkpoint.enable", False),
    ("train.checkpoint.save_steps", 0, {}, CALLBACKS, ()),
    ("train.checkpoint.save_hf_weights", False, {}, CALLBACKS, ()),
    ("train.logging.log_steps", 3, {}, "metrics.sinks.1.interval_steps", 3),
    ("train.logging.report_to", "tensorboard", {}, SINKS, ["ProgressBar", "ConsoleLog", "JsonLines", "TensorBoard"]),
    ("train.logging.report_to", "wandb", {}, SINKS, ["ProgressBar", "ConsoleLog", "JsonLines", "WandB"]),
    ("train.logging.report_to", "all", {}, SINKS, ["ProgressBar", "ConsoleLog", "JsonLines", "TensorBoard", "WandB"]),
    ("train.tensorboard.enabled", True, {}, SINKS, ["ProgressBar", "ConsoleLog", "JsonLines", "TensorBoard"]),
    ("train.tensorboard.output_dir", "board", BOARD, "metrics.sinks.3.folder", "board"),
    ("train.tensorboard.log_steps", 2, BOARD, "metrics.sinks.3.interval_steps", 2),
    ("train.wandb.enabled", True, {}, SINKS, ["ProgressBar", "ConsoleLog", "JsonLines", "WandB"]),
    ("train.wandb.project", "mine", WANDB, "metrics.sinks.3.project", "mine"),
    ("train.wandb.run_name", "first", WANDB, "metrics.sinks.3.run_name", "first"),
    ("train.wandb.log_steps", 2, WANDB, "metrics.sinks.3.interval_steps", 2),
    ("train.memory_monitor.enabled", True, {}, CALLBACKS, ["SafetensorsExportCallback", "MemoryMonitorCallback"]),
    ("train.memory_monitor.log_steps", 2, MEMORY, "callbacks.1.log_steps", 2),
    ("train.memory_monitor.reset_peak_each_step", True, MEMORY, "callbacks.1.reset_peak_each_step", True),
    ("train.moe_monitor.enabled", True, {}, CALLBACKS, ["SafetensorsExportCallback", "MoEMonitorCallback"]),
    ("train.eval.eval_steps", 5, {}, "validator.enable", True),
    ("train.eval.eval_steps", 5, {}, "validator.interval_steps", 5),
    ("train.eval.eval_dataset", small_corpus(), TEXT, "validator.dataloader.path", small_corpus()),
]
REFUSED: dict[str, Any] = {
    "model.freeze_modules": ["visual"],
    "model.tp_plan": {"q_proj": "colwise"},
    "model.cp_modules": ["attn"],
    "model.ep_modules": ["experts"],
    "data.template": "chatml",
    "data.image_key": "picture",
    "data.messages_key": "turns",
    "data.image_token_id": 5,
    "data.video_token_id": 5,
    "data.vl_video": True,
    "data.vl_grid_t": 1,
    "data.vl_grid_h": 1,
    "data.vl_grid_w": 1,
    "data.pin_memory": False,
    "data.megatron_seed": 1,
    "data.pad_token_id": 5,
    "data.eod_token_id": 5,
    "data.eod_mask_loss": True,
    "data.mmap_bin_files": False,
    "train.backend": "mindspore",
    "train.init_device": "cpu",
    "train.local_rank": 1,
    "train.accelerator.pp_micro_batch_num": 4,
    "train.accelerator.pp_schedule": "1f1b",
    "train.accelerator.pp_vpp": 2,
    "train.accelerator.pp_layer_split": [2, 2],
    "train.accelerator.etp": 2,
    "train.accelerator.moe_token_dispatcher_type": "allgather",
    "train.accelerator.npu_nums_per_device": 16,
    "train.accelerator.async_cp": True,
    "train.accelerator.ulysses_degree": 2,
    "train.accelerator.comm_fusion": False,
    "train.mixed_precision.output_dtype": "float32",
    "train.optimizer.type": "muon",
    "train.optimizer.bsz_warmup_ratio": 0.1,
    "train.checkpoint.save_async": True,
    "train.logging.report_throughput": False,
    "train.logging.model_flops_per_token": 1e9,
    "train.logging.peak_tflops": 300.0,
    "train.moe_monitor.lr": 1e-2,
    "train.moe_monitor.num_recomputations": 2,
    "train.debug.deterministic_warn_only": True,
}
ALWAYS = {"train.logging.report_global_loss": True}
"""Asked for or not, it is done."""


def test_every_field_is_mapped_or_refused_and_tested():
    fields = leaves(HyperTrainerConfig())
    assert len(fields) == 121
    assert sorted([*COPIED, *COMPUTED, *ONLY]) == sorted(fields)
    assert {row[0] for row in MAPPED} == {*COPIED, *COMPUTED}
    assert {*REFUSED, *ALWAYS} == {*ONLY}


@pytest.mark.parametrize(("name", "value", "context", "path", "expected"), MAPPED, ids=lambda part: str(part)[:50])
def test_a_mapped_field_changes_the_tree_in_its_place(name, value, context, path, expected, folder):
    value, expected = (folder if part == HF else part for part in (value, expected))
    with_context = arguments(**context)
    group, _, field = name.rpartition(".")
    assert getattr(attrgetter(group)(with_context), field) != value
    before, after = convert(**context), convert(**context, **{name: value})
    found = at(after, path)
    if path in (SINKS, CALLBACKS) and expected:
        found = [type(node).owner.__name__ for node in found]
    assert found == expected
    assert at(before, path) != found if path not in (SINKS, CALLBACKS) else before.to_dict() != after.to_dict()


def test_hub_data():
    loader = convert(**HUB, **{"data.text_key": "body", "data.streaming": True, "data.train_size": 50}).dataloader
    assert loader == TextDataLoader.Config(
        source="huggingface", path="owner/name", text_field="body", reading="stream", documents=50, packing="pad"
    )


def test_token_ids_of_others(tmp_path):
    loader = convert(**{"data.type": "preset_pt", "data.train_path": "ids.pt"}).dataloader
    assert loader == TextDataLoader.Config(source="pt", path="ids.pt", packing="pad")


def test_megatron_data():
    def loader(path: Any) -> TextDataLoader.Config:
        return convert(**{"data.type": "megatron", "data.train_path": path}).dataloader

    rows = {"packing": "megatron", "document_mask": False}
    assert loader("data/one") == TextDataLoader.Config(source="indexed", path="data/one", **rows)
    pair = tuple(IndexedSource.Config(path=path) for path in ("one", "other"))
    blends = ("0.25 one 0.75 other", [[0.25, "one"], [0.75, "other"]], ["1", "one", "3", "other"])
    for blend in blends:
        assert loader(blend) == TextDataLoader.Config(sources=pair, weights=(0.25, 0.75), **rows)
    assert loader("one other") == TextDataLoader.Config(sources=pair, **rows)
    [fault] = faults_of(**{"data.type": "megatron", "data.train_path": "0.5 one other"})
    assert fault.startswith("data.train_path: ")


def test_dp_is_another_name_of_dp_shard():
    names = ("train.accelerator.dp", "train.accelerator.dp_shard")
    degrees = [(4, None, 4), (4, -1, 4), (4, 4, 4), (None, 4, 4), (None, -1, -1), (None, None, -1)]
    for dp, dp_shard, expected in degrees:
        config = convert(**dict(zip(names, (dp, dp_shard), strict=True)))
        assert config.parallelism.dp_shard == expected


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_value_is_named_with_the_reason(name):
    [fault] = faults_of(**{name: REFUSED[name]})
    assert fault.startswith(f"{name}: ")
    assert f" is not supported: {ONLY[name][1]}; leave it out" in fault


@pytest.mark.parametrize("name", ALWAYS)
def test_what_is_always_done_changes_nothing(name):
    assert convert(**{name: ALWAYS[name]}).to_dict() == convert().to_dict()


@pytest.mark.parametrize("name", ONLY)
def test_defaults_are_among_the_values_that_are_taken(name):
    assert attrgetter(name)(HyperTrainerConfig()) in ONLY[name][0]


def test_all_refused_values_are_told_at_once():
    faults = faults_of(**REFUSED, **{"train.optimizer.lr": -1.0, "train.max_steps": 0, "train.logging.log_steps": 0})
    assert [fault.partition(":")[0] for fault in faults[: len(REFUSED)]] == list(REFUSED)
    assert sorted(faults[len(REFUSED) :]) == [
        "train.logging.log_steps: 0 is below 1; give 1 or more",
        "train.max_steps: 0 is below 1; give 1 or more",
        "train.optimizer.lr: -1.0 is not above 0; give a positive learning rate, such as 3e-4",
    ]


@pytest.mark.parametrize("axis", ["tp", "cp", "pp", "ep"])
def test_degrees_that_do_not_suit_the_run_are_named_as_they_were_written(axis):
    name = f"train.accelerator.{axis}"
    assert name in {fault.path for fault in checked(convert(**{name: 2}))}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {"model.name": "qwen3_5"},
            "model.name: 'qwen3_5' is no model family; did you mean 'qwen3'? choose one of qwen3, qwen3_moe, auto",
        ),
        (
            {"model.weights_path": "nowhere"},
            "model.weights_path: nowhere is no Hugging Face folder with a config.json; "
            "give one, or leave it out for random weights",
        ),
        (
            {"model.hidden_size": 64, "model.config_overrides": {"hidden_size": 64}},
            "model.config_overrides.hidden_size: hidden_size is given twice; keep one of them",
        ),
        (
            {"model.config_overrides": {"vl": True}},
            "model.config_overrides.vl: bool true is not supported: images and video are not supported; leave it out",
        ),
        (
            {"model.config_overrides": {"num_expert": 8}},
            "model.config_overrides.num_expert: qwen3_moe has no such field; did you mean 'num_experts'?",
        ),
        (
            {"model.num_attention_heads": 3},
            "model.num_key_value_heads: 2 does not divide num_attention_heads 3; give a divisor",
        ),
        *(
            ({"data.type": kind}, f"data.train_path: not given, but data.type is {kind}; say which data")
            for kind in ("megatron", "hf_datasets", "preset_pt")
        ),
        (
            {"data.type": "hf_datasets", "data.train_path": ["a", "b"]},
            "data.train_path: expected text, got a list of 2; give one path",
        ),
        (
            {"data.type": "preset_pt", "data.train_path": small_corpus(), "data.text_key": "body"},
            "data.text_key: is given, but data.type is preset_pt; set type json_file, or remove it",
        ),
        (
            TEXT | {"data.subset": "en"},
            "data.subset: is given, but data.type is json_file; set type hf_datasets, or remove it",
        ),
        (
            {"data.type": "vl_dummy"},
            "data.type: vl_dummy is not supported; set dummy: images and video are not supported",
        ),
        (
            {"data.train_path": "a.jsonl"},
            "data.train_path: is given, but data.type is dummy; set type json_file, or remove it",
        ),
        (
            {"data.text_key": "body"},
            "data.text_key: is given, but data.type is dummy; set type json_file, or remove it",
        ),
        (
            {"train.eval.eval_dataset": "a.jsonl"},
            "train.eval.eval_dataset: is given, but data.type is dummy; leave it out",
        ),
        (
            {"train.accelerator.dp": 2, "train.accelerator.dp_shard": 4},
            "train.accelerator.dp: 2 differs from dp_shard 4, and both name the same; keep one of them",
        ),
        (
            {"train.accelerator.zero_stage": 1},
            "train.accelerator.zero_stage: 1 is not supported: gradients are sharded with the optimizer's state; set 2",
        ),
        (
            {"train.accelerator.zero_stage": 3, "train.accelerator.reshard_after_forward": False},
            "train.accelerator.zero_stage: 3 is given beside reshard_after_forward false; set 2",
        ),
        (
            {"train.optimizer.lr_warmup_ratio": 1.5},
            "train.optimizer.lr_warmup_ratio: 1.5 is not within 0 and 1; "
            "give the part of the run that warms up, such as 0.1",
        ),
        (
            {"train.max_steps": None},
            "train.optimizer.lr_warmup_ratio: 0.1 of a number of steps that is not known before the data is read; "
            "set it to 0, or give train.max_steps",
        ),
        (
            {"train.optimizer.lr_decay_style": "constant", "train.optimizer.lr_min": 1e-6},
            "train.optimizer.lr_min: 1e-06 has no effect with lr_decay_style constant; "
            "leave it out, or choose another style",
        ),
        (
            {"train.checkpoint.load_path": "outputs/step-5"},
            "train.checkpoint.load_path: outputs/step-5 is no Hugging Face folder with a config.json; "
            "leave it out: a run goes on from the newest checkpoint in output_dir",
        ),
        (
            {"model.name": "qwen3", "train.moe_monitor.enabled": True},
            "train.moe_monitor.enabled: qwen3 has no experts; leave it out",
        ),
        ({"train.seed": "7"}, "train.seed: expected int, got text '7'; give a whole number, without quotes"),
        (
            {"train.optimizer.lr_decay_style": "cosin"},
            "train.optimizer.lr_decay_style: expected one of cosine, linear, constant, got text 'cosin'; "
            "did you mean 'cosine'?",
        ),
    ],
    ids=lambda part: str(part)[:60],
)
def test_what_cannot_be(values, expected):
    assert faults_of(**values) == [expected]


def test_weights_that_are_no_safetensors(folder, tmp_path):
    (tmp_path / "config.json").write_bytes((Path(folder) / "config.json").read_bytes())
    assert convert(**{"model.weights_path": str(tmp_path)}).checkpoint.load_from is None  # sizes alone
    (tmp_path / "pytorch_model.bin").touch()
    assert faults_of(**{"model.weights_path": str(tmp_path)}) == [
        f"model.weights_path: the weights in {tmp_path} are no safetensors; save them again with transformers"
    ]


def test_sizes_of_the_folder_and_what_overrides_them(folder):
    sizes = convert(**{"model.weights_path": folder, "model.num_hidden_layers": 2}).model_spec.model
    saved = json.loads((Path(folder) / "config.json").read_text())
    assert (sizes.num_hidden_layers, sizes.num_experts, sizes.hidden_size) == (2, saved["num_experts"], 32)


def test_a_folder_that_is_called_like_a_flavor(folder, tmp_path, monkeypatch):
    (tmp_path / "debug").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    assert convert(**{"model.weights_path": "debug"}).model_spec.model.hidden_size == 32


def test_defaults_are_those_of_the_files_not_ours():
    config = convert()
    assert (config.optimizer.lr, config.optimizer.betas, config.optimizer.weight_decay) == (1e-4, (0.9, 0.999), 0.01)
    assert (config.training.steps, config.training.seq_len, config.training.micro_batch_size) == (100, 2048, 1)
    assert (config.lr_scheduler.warmup_steps, config.lr_scheduler.min_lr) == (10, 1e-5)
    assert (config.training.dtype, config.training.gc_steps, config.parallelism.dp_shard) == ("float32", 0, -1)


def test_learning_rates_of_ten_steps():
    expected = [0, 1e-4, 9.729e-5, 8.947e-5, 7.75e-5, 6.281e-5, 4.719e-5, 3.25e-5, 2.053e-5, 1.271e-5]
    schedule = convert(**{"train.max_steps": 10}).lr_scheduler
    rates = [schedule.lr_at(step, peak_lr=1e-4, training_steps=10) for step in range(10)]
    assert rates == pytest.approx(expected, rel=1e-3)


def test_linear_and_constant_learning_rates():
    rates = {}
    for style in ("linear", "constant"):
        schedule = convert(**{"train.max_steps": 10, "train.optimizer.lr_decay_style": style}).lr_scheduler
        rates[style] = [schedule.lr_at(step, peak_lr=1e-4, training_steps=10) for step in range(10)]
    assert rates["constant"] == [0] + [1e-4] * 9
    assert rates["linear"] == pytest.approx([0] + [1e-4 - 9e-5 * step / 9 for step in range(9)], rel=1e-12)


@pytest.mark.parametrize(("ratio", "steps", "warmup"), [(0.1, 10, 1), (0.1, 11, 2), (0.0, 10, 0), (1.0, 10, 10)])
def test_warm_up_is_rounded_up(ratio, steps, warmup):
    config = convert(**{"train.optimizer.lr_warmup_ratio": ratio, "train.max_steps": steps})
    assert config.lr_scheduler.warmup_steps == warmup


def test_max_steps_wins_over_epochs_and_says_so(caplog):
    with caplog.at_level(logging.WARNING, logger="hyper_parallel"):
        config = convert(**{"train.num_train_epochs": 3, "train.max_steps": 20})
    assert (config.training.steps, config.training.epochs) == (20, None)
    assert caplog.messages == [
        "train.num_train_epochs: 3 has no effect beside train.max_steps 20; set max_steps to null for epochs"
    ]


def test_faults_of_the_trained_tree_stand_at_the_fields_of_the_file():
    config = convert(
        **TEXT,
        **{
            "train.global_batch_size": 6,
            "train.micro_batch_size": 4,
            "data.max_seq_len": 5000,
            "data.train_path": "nowhere.jsonl",
            "train.optimizer.lr_min": 1.0,
            "train.checkpoint.save_steps": -1,
            "train.accelerator.dp_shard": 3,
        },
    )
    faults = checked(config)
    assert {fault.path for fault in faults} == {
        "data.max_seq_len",
        "data.train_path",
        "train.global_batch_size",
        "train.optimizer.lr_min",
        "train.checkpoint.save_steps",
        "train.accelerator.dp_shard",
    }
    config = convert(**{"train.global_batch_size": 6, "train.micro_batch_size": 4})
    [fault] = checked(config)
    assert fault.path == "train.global_batch_size"


def test_the_arguments_stay_as_they_are_and_the_tree_is_open():
    args = arguments(**{"train.optimizer.betas": [0.9, 0.99]})
    before = args.to_dict()
    first, second = legacy_to_trainer_config(args), legacy_to_trainer_config(args)
    assert args.to_dict() == before
    assert first.optimizer.betas == (0.9, 0.99)
    first.training.steps = 1
    assert second.training.steps == 100


def test_the_tree_as_yaml_resolves_to_an_equal_tree(folder):
    config = convert(**TEXT, **BOARD, **MEMORY, **{"model.weights_path": folder, "train.eval.eval_steps": 5})
    again = resolver.resolve_root(resolver.document(config))
    assert again.to_dict() == config.to_dict()
