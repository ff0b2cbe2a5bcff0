"""From the model/data/train tree to the one that is trained. Every field is mapped or refused, none is left out."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any

from hyper_parallel.components.checkpoint import CheckpointManager
from hyper_parallel.components.data import TextDataLoader
from hyper_parallel.components.data.indexed.blend import Blend
from hyper_parallel.components.data.sources import IndexedSource
from hyper_parallel.components.lr_scheduler import LRSchedulersContainer
from hyper_parallel.components.metrics import ConsoleLog, JsonLines, MetricsProcessor, ProgressBar, TensorBoard, WandB
from hyper_parallel.components.optimizer import AdamW
from hyper_parallel.components.tokenizer import BaseTokenizer, HuggingFaceTokenizer, TokenIdTokenizer
from hyper_parallel.components.validator import Validator
from hyper_parallel.config.configurable import join
from hyper_parallel.config.errors import ConfigError, Fault, raise_faults
from hyper_parallel.config.imports import import_family
from hyper_parallel.config.resolver import spelled
from hyper_parallel.config.sections import ActivationCheckpointConfig, CommConfig, ParallelismConfig, TrainingConfig
from hyper_parallel.config.values import coerce, shown
from hyper_parallel.protocols.model_spec import ModelSpec
from hyper_parallel.trainer.callbacks import MemoryMonitorCallback, MoEMonitorCallback, SafetensorsExportCallback
from hyper_parallel.trainer.config import TrainerConfig
from hyper_parallel.trainer.legacy.fields import COPIED, LEGACY_NAMES, ONLY, VISION
from hyper_parallel.trainer.legacy.schema import (
    DataArguments,
    HyperTrainerConfig,
    ModelArguments,
    OptimizerArguments,
    TrainArguments,
)

logger = logging.getLogger(__name__)

_SOURCES: dict[str, Any] = {"dummy": "synthetic", "hf_datasets": "huggingface", "preset_pt": "pt"}
_NODE_FIELDS = {"interval_steps": "log_steps", "folder": "output_dir"}
_IMPLEMENTATIONS: dict[bool | None, Any] = {None: "fused", True: "foreach", False: "for_loop"}
_SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
)


def legacy_to_trainer_config(args: HyperTrainerConfig) -> TrainerConfig:
    """The tree that trains what `args` ask for.

    Raises:
        ConfigError: with every field that cannot be had, and every value of a wrong type.
    """
    args = coerce(dataclasses.asdict(args), HyperTrainerConfig, "")  # a copy with values of the right types
    faults = [*_refused_values(args), *_conflicts(args)]
    spec = None
    try:
        spec = _model_spec(args.model)
    except ConfigError as error:
        faults += error.faults
    if args.train.moe_monitor.enabled and spec is not None and not getattr(spec.model, "num_experts", 0):
        faults.append(Fault("train.moe_monitor.enabled", f"{args.model.name} has no experts", "leave it out"))
    sinks, callbacks = list(_sinks(args.train)), list(_callbacks(args.train))
    for node, group in sinks + callbacks:
        for fault in node.faults():
            faults.append(dataclasses.replace(fault, path=f"{group}.{_NODE_FIELDS.get(fault.path, fault.path)}"))

    config = _compose(args, spec)
    config.metrics = MetricsProcessor.Config(sinks=tuple(sink for sink, _ in sinks))
    config.callbacks = tuple(callback for callback, _ in callbacks)
    for name, path in COPIED.items():
        group, _, field = path.rpartition(".")
        setattr(attrgetter(group)(config) if group else config, field, attrgetter(name)(args))
    if faults:  # a tree without any is checked as a whole, by the door
        raise ConfigError([*faults, *_node_faults(config)])
    if args.train.max_steps is not None and args.train.num_train_epochs != TrainArguments().num_train_epochs:
        logger.warning(
            "train.num_train_epochs: %d has no effect beside train.max_steps %d; set max_steps to null for epochs",
            args.train.num_train_epochs,
            args.train.max_steps,
        )
    return config


@contextmanager
def legacy_words() -> Iterator[None]:
    """Faults of the tree that is trained, found within, stand at the fields that its values come from."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(_in_legacy_words(error.faults)) from error


def _in_legacy_words(faults: Iterable[Fault]) -> list[Fault]:
    return [dataclasses.replace(fault, path=spelled(fault.path, LEGACY_NAMES)) for fault in faults]


def _refused_values(args: HyperTrainerConfig) -> Iterator[Fault]:
    for name, (accepted, reason) in ONLY.items():
        value = attrgetter(name)(args)
        if value not in accepted:
            yield Fault(name, f"{shown(value)} is not supported: {reason}", "leave it out")


def _conflicts(args: HyperTrainerConfig) -> Iterator[Fault]:
    """Faults of values by themselves or beside others, where the tree that is trained would not show them."""
    data, train = args.data, args.train
    if data.type == "vl_dummy":
        yield Fault("data.type", "vl_dummy is not supported", f"set dummy: {VISION}")
    yield from _data_conflicts(data)
    if data.type == "dummy" and train.eval.eval_dataset is not None:
        yield Fault("train.eval.eval_dataset", "is given, but data.type is dummy", "leave it out")

    ranks = train.accelerator
    if ranks.dp is not None and ranks.dp_shard not in (None, -1, ranks.dp):
        fact = f"{ranks.dp} differs from dp_shard {ranks.dp_shard}, and both name the same"
        yield Fault("train.accelerator.dp", fact, "keep one of them")
    if ranks.zero_stage == 1:
        fact = "1 is not supported: gradients are sharded with the optimizer's state"
        yield Fault("train.accelerator.zero_stage", fact, "set 2")
    if ranks.zero_stage == 3 and not ranks.reshard_after_forward:
        yield Fault("train.accelerator.zero_stage", "3 is given beside reshard_after_forward false", "set 2")

    optimizer = train.optimizer
    if not 0 <= optimizer.lr_warmup_ratio <= 1:
        fact = f"{optimizer.lr_warmup_ratio} is not within 0 and 1"
        yield Fault("train.optimizer.lr_warmup_ratio", fact, "give the part of the run that warms up, such as 0.1")
    elif optimizer.lr_warmup_ratio and train.max_steps is None:
        fact = f"{optimizer.lr_warmup_ratio} of a number of steps that is not known before the data is read"
        yield Fault("train.optimizer.lr_warmup_ratio", fact, "set it to 0, or give train.max_steps")
    if optimizer.lr_decay_style == "constant" and optimizer.lr_min != OptimizerArguments().lr_min:
        fact = f"{optimizer.lr_min} has no effect with lr_decay_style constant"
        yield Fault("train.optimizer.lr_min", fact, "leave it out, or choose another style")

    folder = train.checkpoint.load_path
    if folder is not None and not _describes_model(folder):
        yield Fault(
            "train.checkpoint.load_path",
            f"{folder} is no Hugging Face folder with a config.json",
            "leave it out: a run goes on from the newest checkpoint in output_dir",
        )


def _data_conflicts(data: DataArguments) -> Iterator[Fault]:
    path = data.train_path
    if data.type == "dummy" and path is not None:
        yield Fault("data.train_path", "is given, but data.type is dummy", "set type json_file, or remove it")
    elif data.type in ("hf_datasets", "preset_pt", "megatron") and path is None:
        yield Fault("data.train_path", f"not given, but data.type is {data.type}", "say which data")
    elif path is not None and not isinstance(path, str) and data.type != "megatron":
        yield Fault("data.train_path", f"expected text, got {shown(path)}", "give one path")
    elif data.type == "megatron":
        try:
            Blend.parse(path)
        except ConfigError as error:
            yield from (dataclasses.replace(fault, path="data.train_path") for fault in error.faults)
    if data.type in ("dummy", "preset_pt", "megatron") and data.text_key != "text":
        yield Fault("data.text_key", f"is given, but data.type is {data.type}", "set type json_file, or remove it")
    if data.subset is not None and data.type != "hf_datasets":
        yield Fault("data.subset", f"is given, but data.type is {data.type}", "set type hf_datasets, or remove it")


def _node_faults(config: TrainerConfig) -> list[Fault]:
    """Faults of single nodes, in legacy words. Sinks and callbacks have no fixed place, and are asked where made."""
    nodes = [(path, node) for path, node in config.traverse() if not path.startswith(("metrics", "callbacks"))]
    return _in_legacy_words(
        dataclasses.replace(fault, path=join(path, fault.path)) for path, node in nodes for fault in node.faults()
    )


def _model_spec(model: ModelArguments) -> ModelSpec:
    """The family's spec, of the sizes of `weights_path` or the debug ones, with all overrides."""
    family = import_family(model.name, "model.name")
    faults: list[Fault] = []
    overrides = {name: value for name in _SIZES if (value := getattr(model, name)) is not None}
    for name, value in _flat_overrides(model.config_overrides or {}):
        path = f"model.config_overrides.{name}"
        if name == "vl":
            if value is not False:
                faults.append(Fault(path, f"{shown(value)} is not supported: {VISION}", "leave it out"))
        elif name in overrides:
            faults.append(Fault(path, f"{name} is given twice", "keep one of them"))
        else:
            overrides[name] = value
    flavor = "debug"
    if model.weights_path is not None:
        # A folder that is called like a flavor is still a folder.
        flavor = f"./{model.weights_path}" if model.weights_path in family.FLAVORS else model.weights_path
        if not _describes_model(flavor):
            fact = f"{flavor} is no Hugging Face folder with a config.json"
            faults.append(Fault("model.weights_path", fact, "give one, or leave it out for random weights"))
        elif not _has_weights(flavor) and any(Path(flavor).glob("*.bin")):
            fact = f"the weights in {flavor} are no safetensors"
            faults.append(Fault("model.weights_path", fact, "save them again with transformers"))
    raise_faults(faults)
    with legacy_words():
        return family.FAMILY.model_spec(flavor, overrides)


def _flat_overrides(overrides: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The overrides by the model's own names: here all is about text, so `text_config` adds nothing to a name."""
    for name, value in overrides.items():
        if name == "text_config" and isinstance(value, dict):
            yield from value.items()
        else:
            yield name.removeprefix("text_config."), value


def _describes_model(folder: str) -> bool:
    return (Path(folder) / "config.json").is_file()


def _has_weights(folder: str) -> bool:
    return any(Path(folder).glob("*.safetensors"))


def _compose(args: HyperTrainerConfig, spec: ModelSpec | None) -> TrainerConfig:
    """The tree with all that is computed, whatever of `args` is refused."""
    model, train, optimizer = args.model, args.train, args.train.optimizer
    narrow = train.mixed_precision
    dp_shard = train.accelerator.dp_shard if train.accelerator.dp is None else train.accelerator.dp
    tokenizer, assets = _tokenizer(args, spec)
    checkpoint = CheckpointManager.Config(enable=train.checkpoint.save_steps != 0)
    if checkpoint.enable:
        checkpoint.interval_steps = train.checkpoint.save_steps
    if train.checkpoint.load_path is not None:
        checkpoint.load_from = train.checkpoint.load_path if _describes_model(train.checkpoint.load_path) else None
    elif model.weights_path is not None and _has_weights(model.weights_path):
        checkpoint.load_from = model.weights_path
    warmup_ratio = max(0.0, min(optimizer.lr_warmup_ratio, 1.0))
    mode: Any = train.gradient_checkpointing.activation_checkpoint
    return TrainerConfig(
        model_spec=spec,
        hf_assets_path=assets,
        tokenizer=tokenizer,
        dataloader=_dataloader(args),
        optimizer=AdamW.Config(implementation=_IMPLEMENTATIONS[optimizer.foreach]),
        lr_scheduler=LRSchedulersContainer.Config(
            warmup_steps=max(0, math.ceil(warmup_ratio * (train.max_steps or 0))),
            min_lr=0.0 if optimizer.lr_decay_style == "constant" else optimizer.lr_min,
        ),
        checkpoint=checkpoint,
        validator=_validator(args),
        training=TrainingConfig(
            steps=train.max_steps,
            epochs=train.num_train_epochs if train.max_steps is None else None,
            mixed_precision_param=narrow.param_dtype if narrow.enabled else None,
            mixed_precision_reduce=narrow.reduce_dtype if narrow.enabled else None,
        ),
        parallelism=ParallelismConfig(
            dp_shard=-1 if dp_shard is None else dp_shard,
            reshard_after_forward=train.accelerator.reshard_after_forward and train.accelerator.zero_stage != 2,
        ),
        activation_checkpoint=ActivationCheckpointConfig(mode="none" if mode == "off" else mode),
        comm=CommConfig(backend=train.comm_backend or "auto"),
    )


def _tokenizer(args: HyperTrainerConfig, spec: ModelSpec | None) -> tuple[BaseTokenizer.Config, str | None]:
    """The tokenizer and the folder of its files. Dummy data without such a folder takes all ids that the model has."""
    folder = args.model.tokenizer_path
    vocab_size = getattr(spec and spec.model, "vocab_size", None)
    if folder is None and args.data.type == "dummy" and vocab_size is not None:
        return TokenIdTokenizer.Config(vocab_size=vocab_size), None
    if folder is None and args.model.weights_path is not None:
        weights = Path(args.model.weights_path)
        folder = args.model.weights_path if (weights / "tokenizer.json").is_file() else None
    return HuggingFaceTokenizer.Config(), folder


def _dataloader(args: HyperTrainerConfig) -> TextDataLoader.Config:
    """One document a row: a sample of these files is a row, whatever its length. Megatron's samples are full rows."""
    data = args.data
    loader = TextDataLoader.Config(packing="pad", reading="stream" if data.streaming else "ahead")
    if data.type == "megatron":
        _mix_pairs(loader, data.train_path)
    elif data.type != "dummy":
        loader.path = data.train_path if isinstance(data.train_path, str) else None
    if data.type in ("json_file", "hf_datasets"):
        loader.text_field = data.text_key
    if data.type == "dummy" or (data.type in _SOURCES and loader.path is not None):
        loader.source = _SOURCES[data.type]
    if data.type == "hf_datasets":
        loader.subset = data.subset
    if data.prefetch_factor is not None:
        loader.prefetch = data.prefetch_factor
    return loader


def _mix_pairs(loader: TextDataLoader.Config, blend: Any) -> None:
    """Samples as Megatron makes them by default: attention and loss reach over the ends of documents."""
    loader.packing, loader.document_mask = "megatron", False
    try:
        prefixes, weights = Blend.parse(blend)
    except (ConfigError, TypeError):  # told by _data_conflicts
        return
    if len(prefixes) == 1:
        loader.source, loader.path = "indexed", prefixes[0]
    else:
        loader.sources = tuple(IndexedSource.Config(path=prefix) for prefix in prefixes)
        loader.weights = tuple(weights or ())


def _validator(args: HyperTrainerConfig) -> Validator.Config:
    settings, data = args.train.eval, args.data
    held_out = TextDataLoader.Config(split="validation", shuffle=False, packing="pad")
    if data.type == "dummy":
        held_out.source = "synthetic"
    elif settings.eval_dataset is not None:
        held_out.path = settings.eval_dataset
        held_out.text_field = "text" if settings.eval_dataset.endswith(".txt") else data.text_key
    if settings.eval_steps == 0:
        return Validator.Config(dataloader=held_out)
    return Validator.Config(enable=True, interval_steps=settings.eval_steps, dataloader=held_out)


def _sinks(train: TrainArguments) -> Iterator[tuple[Any, str]]:
    """(what takes the numbers of each step, the group that it is set by)."""
    report_to = train.logging.report_to
    yield ProgressBar.Config(), "train.logging"
    yield ConsoleLog.Config(interval_steps=train.logging.log_steps), "train.logging"
    yield JsonLines.Config(), "train.logging"
    if train.tensorboard.enabled or report_to in ("tensorboard", "all"):
        board = train.tensorboard
        yield TensorBoard.Config(folder=board.output_dir, interval_steps=board.log_steps), "train.tensorboard"
    if train.wandb.enabled or report_to in ("wandb", "all"):
        wandb = train.wandb
        yield (
            WandB.Config(project=wandb.project, run_name=wandb.run_name, interval_steps=wandb.log_steps),
            "train.wandb",
        )


def _callbacks(train: TrainArguments) -> Iterator[tuple[Any, str]]:
    """(callback, the group that it is set by)."""
    memory, checkpoint = train.memory_monitor, train.checkpoint
    if checkpoint.save_hf_weights and checkpoint.save_steps > 0:
        yield SafetensorsExportCallback.Config(save_steps=checkpoint.save_steps), "train.checkpoint"
    if train.moe_monitor.enabled:
        yield MoEMonitorCallback.Config(), "train.moe_monitor"
    if memory.enabled:
        yield (
            MemoryMonitorCallback.Config(log_steps=memory.log_steps, reset_peak_each_step=memory.reset_peak_each_step),
            "train.memory_monitor",
        )
