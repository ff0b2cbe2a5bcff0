"""TrainerConfig: the one tree that every front door ends in."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from hyper_parallel.components.checkpoint import CheckpointManager, complete_steps, own_checkpoint
from hyper_parallel.components.data import BaseDataLoader, TextDataLoader
from hyper_parallel.components.loss import AutoCELoss, BaseLoss
from hyper_parallel.components.lr_scheduler import LRSchedulersContainer
from hyper_parallel.components.metrics import MetricsProcessor, MetricsSink
from hyper_parallel.components.module_loss import forward_faults
from hyper_parallel.components.optimizer import AdamW, OptimizersContainer
from hyper_parallel.components.profiler import Profiler
from hyper_parallel.components.tokenizer import BaseTokenizer, HuggingFaceTokenizer, folder_faults
from hyper_parallel.components.validator import Validator
from hyper_parallel.config.configurable import Buildable, Configurable, setting, slot
from hyper_parallel.config.errors import ConfigError, Fault
from hyper_parallel.config.sections import (
    ActivationCheckpointConfig,
    CommConfig,
    CompileConfig,
    DebugConfig,
    ParallelismConfig,
    TrainingConfig,
)
from hyper_parallel.config.target import Target, read_signature
from hyper_parallel.distributed.activation_checkpoint import activation_checkpoint_faults
from hyper_parallel.distributed.capabilities import capability_faults
from hyper_parallel.distributed.fsdp import fsdp_needed
from hyper_parallel.distributed.topology import Degrees, given_degrees, resolve_degrees
from hyper_parallel.protocols.model_spec import ModelSpec
from hyper_parallel.protocols.plan_override import PlanOverride
from hyper_parallel.trainer.callbacks import Callback, EvaluateCallback, SinkCallback
from hyper_parallel.trainer.pipeline_faults import pipeline_faults
from hyper_parallel.trainer.rehearsed_run_faults import rehearsed_run_faults

__all__ = [
    "ActivationCheckpointConfig",
    "CommConfig",
    "CompileConfig",
    "DebugConfig",
    "ParallelismConfig",
    "TrainerConfig",
    "TrainingConfig",
]

DEFAULT_STEPS = 100
"""Optimizer steps of a run that is given neither steps nor epochs."""
LOADER_RUNTIME = "tokenizer seq_len micro_batch_size global_batch_size dp_rank dp_size seed"
"""What every dataloader is given."""
DATASET_RUNTIME = "dataset collate_fn batch_sampler batch_size dp_world_size max_seq_len"
"""What that of a `dataset` is given beside it."""


@dataclass(kw_only=True, slots=True)
class TrainerConfig(Configurable.Config):
    """Everything a run is made of: slots that are built, and sections of plain data."""

    model_spec: ModelSpec | None = setting(None, aliases=("model",))
    """The model and its functions: a family, a family:flavor, or a family:folder with a Hugging Face config.json."""
    hf_assets_path: str | None = None
    """Folder with the tokenizer's files. None: the embedded tokenizer of 4096 entries."""
    dump_folder: str = "outputs"
    """Where everything that the run writes goes."""

    tokenizer: Buildable[BaseTokenizer] = slot(HuggingFaceTokenizer.Config, runtime="hf_assets_path")
    """Text to token ids."""
    data_transform: Buildable[object] | None = slot(None, runtime="tokenizer model_config training_config")
    """What `dataset` is given to make samples of documents with."""
    dataset: Buildable[object] | None = slot(None, runtime="transform tokenizer mesh_context training_config")
    """Samples in Hugging Face's manner, with labels that are not shifted. None: `dataloader` reads for itself."""
    collate_fn: Buildable[object] | None = slot(None, runtime="num_micro_batch")
    """From the samples of a step to its micro-batches. Goes with `dataset`."""
    dataloader: Buildable[BaseDataLoader] = slot(TextDataLoader.Config, runtime=f"{LOADER_RUNTIME} {DATASET_RUNTIME}")
    """One item for each optimizer step. The runtime arguments from `dataset` on are given beside that alone."""
    optimizer: Buildable[OptimizersContainer] = slot(AdamW.Config, runtime="model_parts params model")
    """Updates the weights."""
    lr_scheduler: Buildable[LRSchedulersContainer] = slot(
        LRSchedulersContainer.Config, runtime="optimizers training_steps optimizer train_iters"
    )
    """Learning rate by step."""
    loss: Buildable[BaseLoss] = slot(AutoCELoss.Config, runtime="vocab_size", aliases=("loss_fn",))
    """What is minimised: a sum over trained tokens."""
    checkpoint: Buildable[CheckpointManager] = slot(
        CheckpointManager.Config,
        runtime="dump_folder sd_adapter tokenizer model_parts optimizers lr_schedulers dataloader train_state",
    )
    """Saves and resumes."""
    metrics: Buildable[MetricsProcessor] = slot(
        MetricsProcessor.Config, runtime="dump_folder training_steps flops_per_token peak_flops is_writer"
    )
    """Numbers of every step, and where they go."""
    profiler: Buildable[Profiler] = slot(Profiler.Config, runtime="dump_folder")
    """Traces of a window of steps."""
    validator: Buildable[Validator] = slot(
        Validator.Config, runtime="model_parts evaluate loader_arguments dp_group loss_group training_steps"
    )
    """Loss on held-out data."""
    plan_overrides: tuple[PlanOverride, ...] = setting((), aliases=("plan_overhead",))
    """What is changed in the model, module by module, before it is sharded."""
    callbacks: tuple[Buildable[Callback], ...] = slot(tuple, runtime="trainer")
    """Observers of the run, told of each moment in this order, after those that every run has."""

    training: TrainingConfig = field(default_factory=TrainingConfig)
    """How long, in what batches, in which numbers."""
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    """How the ranks share the work."""
    activation_checkpoint: ActivationCheckpointConfig = setting(
        default_factory=ActivationCheckpointConfig, aliases=("gradient_checkpointing",)
    )
    """What the backward pass computes again."""
    compile: CompileConfig = field(default_factory=CompileConfig)
    """torch.compile of each block."""
    comm: CommConfig = field(default_factory=CommConfig)
    """How ranks talk."""
    debug: DebugConfig = field(default_factory=DebugConfig)
    """Aids that cost speed."""

    def build(self, **runtime: Any) -> Any:
        """The trainer of this run: a TextTrainer for a `dataset`, else a HyperTrainer."""
        if self.dataset is None:
            return Configurable.Config.build(self, **runtime)
        # By its path, since it stands above this module.
        return import_module("hyper_parallel.trainer.text_trainer").TextTrainer(self, **runtime)

    def described(self) -> TrainerConfig:
        """This tree, with what is known of its model where a Target builds that.

        Raises:
            ConfigError: there can be no such model.
        """
        if self.model_spec is None or self.model_spec.target is None:
            return self
        return self.derive(model_spec=self.model_spec.described())

    def ranks(self, started: int) -> int:
        """Number of ranks of the run where `started` were: one process may stand for as many as the degrees ask for."""
        rehearsed = self.comm.mode == "fake" and started == 1
        return self.parallelism.smallest_world_size() if rehearsed else started

    def cross_faults(self, world_size: int) -> Iterator[Fault]:
        """Faults that no section can see alone. `world_size` is the number of ranks that were started."""
        world_size = self.ranks(world_size)
        yield from rehearsed_run_faults(self, world_size)
        try:
            self = self.described()
        except ConfigError as error:
            yield from error.faults
        else:
            yield from _model_faults(self, world_size)
        yield from dataset_faults(self)
        yield from _tokenizer_faults(self)
        yield from _weights_faults(self)
        yield from _seed_faults(self, world_size)
        yield from _loss_faults(self)
        yield from activation_checkpoint_faults(self.activation_checkpoint, self.compile)
        # Degrees and steps that are no numbers of ranks and steps have been told by their sections.
        p = self.parallelism
        if min(p.dp_replicate, p.cp, p.tp, p.pp, p.ep) >= 1 and (p.dp_shard >= 1 or p.dp_shard == -1):
            try:
                degrees = resolve_degrees(p, world_size)
            except ConfigError as error:
                yield from error.faults
                degrees, is_dp_known = given_degrees(p), p.dp_shard != -1
            else:
                is_dp_known = True
                yield from _expert_faults(self, degrees)
            dp_size = degrees.dp_replicate * degrees.dp_shard
            faults = list(_batch_faults(self.training, dp_size)) if is_dp_known else []
            yield from faults
            yield from pipeline_faults(self, dp_size if is_dp_known and not faults else None)
            yield from capability_faults(self, degrees)
        steps = self.training.steps
        if steps is None and self.training.epochs is None:
            steps = DEFAULT_STEPS
        if steps is not None and steps >= 1:
            yield from schedule_faults(self, steps)
        if self.training.epochs is not None and getattr(self.dataloader, "reading", None) == "stream":
            fact = f"{self.training.epochs} is given, but nobody knows the length of streamed data"
            yield Fault("training.epochs", fact, "give training.steps, or set dataloader.reading ahead")
        yield from _validation_faults(self)
        yield from _profiler_faults(self, world_size)
        yield from _sink_faults(self)


def _model_faults(config: TrainerConfig, world_size: int) -> Iterator[Fault]:
    spec = config.model_spec
    if spec is None:
        remedy = (
            "give --model_spec FAMILY[:FLAVOR or :FOLDER], or name the model's create_model_spec as the _target_ of "
            "the file's model"
        )
        yield Fault("model_spec", "no model is chosen", remedy)
        return
    if spec.build_model_fn is not None and config.plan_overrides:
        fact = f"given, but {spec.name} is built by its build_model_fn, which is told of none"
        remedy = "name HyperAutoModelForCausalLM.from_pretrained as the _target_ of the model"
        yield Fault("plan_overrides", fact, remedy)
    if isinstance(spec.target, Target) and not read_signature(type(spec.target).callable).takes("distributed_setup"):
        yield from _untold_faults(config, spec.target.target_path, world_size)
    if spec.builds_whole and spec.pipelining_fn is not None and config.parallelism.pp > 1:
        fact = f"{config.parallelism.pp}, but {spec.name} has a build_model_fn, which builds whole models"
        yield Fault("parallelism.pp", fact, "set 1, or leave build_model_fn None")
    if spec.model is None and spec.builds_whole:
        yield from _unplanned_faults(config, spec)
    elif spec.model is None or (spec.parallelize_fn is None and not spec.builds_whole):
        fact = f"{spec.name} lacks a model Config or a parallelize_fn"
        yield Fault("model_spec", fact, "give its ModelSpec both, or a build_model_fn")
    else:
        model = copy.deepcopy(spec.model)
        try:  # what only the model knows is asked of the model; the run makes a copy of its own later
            model.update_from_config(config)
        except ConfigError as error:
            yield from error.faults
        else:
            for axis, kind in (("cp", "context"), ("tp", "tensor"), ("ep", "expert")):
                degree = getattr(config.parallelism, axis)
                if degree > 1 and not model.sharding:
                    fact = f"{degree}, but {spec.name} has no {kind}-parallel plan"
                    yield Fault(f"parallelism.{axis}", fact, "set 1, or choose another model")


def _untold_faults(config: TrainerConfig, target: str, world_size: int) -> Iterator[Fault]:
    """What the run asks of a model whose function is told of none of it."""
    fact = f"but {target}, which makes the model, takes no distributed_setup"
    remedy = "let it take distributed_setup, and hand that on to HyperAutoModelForCausalLM"
    if config.plan_overrides:
        yield Fault("plan_overrides", f"given, {fact}", f"{remedy}, or leave them out")
    if world_size > 1:
        yield Fault("model_spec", f"{world_size} ranks share the work, {fact}", f"{remedy}, or start one process")
    elif fsdp_needed(config.training, config.parallelism, world_size):
        yield Fault("model_spec", f"mixed precision or parallelism.cpu_offload is asked for, {fact}", remedy)


def _unplanned_faults(config: TrainerConfig, spec: ModelSpec) -> Iterator[Fault]:
    """What a run asks of a model that `build_model_fn` alone knows, and nobody can check."""
    for axis in ("cp", "tp", "ep"):
        if (degree := getattr(config.parallelism, axis)) > 1:
            fact = f"{degree}, but {spec.name} has no model Config, so there is no plan to check"
            yield Fault(f"parallelism.{axis}", fact, "set 1, or give its ModelSpec a model")
    if spec.state_dict_adapter is not None:
        fact = f"given, but {spec.name} has no model Config, which it is built with"
        yield Fault("model_spec.state_dict_adapter", fact, "leave it out, or give its ModelSpec a model")


def _expert_faults(config: TrainerConfig, degrees: Degrees) -> Iterator[Fault]:
    """FSDP splits no dim but the first into parts that differ, and the first is that of the experts."""
    ep, hidden = config.parallelism.ep, getattr(config.model_spec and config.model_spec.model, "hidden_size", None)
    efsdp = degrees.dp_shard * degrees.cp // ep
    if ep > 1 and hidden is not None and hidden % efsdp:
        yield Fault(
            "parallelism.ep",
            f"dp_shard {degrees.dp_shard} x cp {degrees.cp} / ep {ep} = {efsdp} ranks store each expert, and that does "
            f"not divide the model's hidden_size {hidden}",
            f"change them so that it does, as ep {degrees.dp_shard * degrees.cp} would",
        )


def dataset_faults(config: TrainerConfig) -> Iterator[Fault]:
    """What the slots of a dataset lack, or have without one."""
    reads_itself = not isinstance(config.dataloader, Target)
    if config.dataset is None:
        for name in ("data_transform", "collate_fn"):
            if getattr(config, name) is not None:
                yield Fault(name, "is given, but dataset is not", "give a dataset, or leave it out")
        if isinstance(config.dataloader, Target) and (lacks := config.dataloader.missing(LOADER_RUNTIME.split())):
            fact = f"{config.dataloader.target_path} needs {', '.join(lacks)}, but dataset is not given"
            yield Fault("dataloader", fact, "give a dataset, or leave it out")
        return
    if config.collate_fn is None:
        remedy = "give hyper_parallel.components.data.MakeMicroBatchCollator, or one of yours"
        yield Fault("collate_fn", "is missing, but dataset is given", remedy)
    if reads_itself:
        fact = f"{type(config.dataloader).__qualname__} reads for itself, but dataset is given"
        yield Fault("dataloader", fact, "give hyper_parallel.components.data.build_dataloader, or leave dataset out")


def _loss_faults(config: TrainerConfig) -> Iterator[Fault]:
    loss: Any = config.loss
    makes = loss.callable if isinstance(loss, Target) else type(loss).owner
    if isinstance(makes, type) and issubclass(makes, nn.Module):
        yield from forward_faults(makes)
        if config.parallelism.cp > 1:
            fact = f"{makes.__qualname__} is given whole rows, but parallelism.cp is {config.parallelism.cp}"
            yield Fault("loss", fact, "set cp 1, or give a BaseLoss, which is a sum over tokens")
    if not config.parallelism.loss_parallel:
        return
    if not getattr(makes, "spreads_vocabulary", False):
        yield Fault(
            "parallelism.loss_parallel",
            f"True, but {makes.__qualname__} knows whole logits only (it has no spreads_vocabulary = True)",
            "set False, or give a loss that computes from this rank's part of the vocabulary",
        )


def _tokenizer_faults(config: TrainerConfig) -> Iterator[Fault]:
    tokenizer, folder = config.tokenizer, config.hf_assets_path
    if isinstance(tokenizer, HuggingFaceTokenizer.Config) and tokenizer.path is None and folder is not None:
        yield from folder_faults(Path(folder), "hf_assets_path")


def _weights_faults(config: TrainerConfig) -> Iterator[Fault]:
    checkpoint, spec = config.checkpoint, config.model_spec
    if not isinstance(checkpoint, CheckpointManager.Config):
        return
    if checkpoint.export_hf != "none" and spec is not None and spec.state_dict_adapter is None:
        fact = f"{checkpoint.export_hf}, but {spec.name} has no state_dict_adapter to name its weights with"
        yield Fault("checkpoint.export_hf", fact, "set none")
    if checkpoint.load_from is None:
        return
    if spec is None or spec.model is None or any(fault.path == "load_from" for fault in checkpoint.faults()):
        return  # which is told elsewhere
    if own_checkpoint(Path(checkpoint.load_from)) is not None:
        return  # it has the model's own names; whether they are the same is seen when all is built
    if spec.state_dict_adapter is None:
        fact = f"{checkpoint.load_from} is given, but {spec.name} has no state_dict_adapter to read it with"
        yield Fault("checkpoint.load_from", fact, "leave it out")
        return
    try:
        spec.state_dict_adapter(spec.model).hf_differences(Path(checkpoint.load_from))
    except ConfigError as error:
        yield from error.faults


def _seed_faults(config: TrainerConfig, world_size: int) -> Iterator[Fault]:
    checkpoint = config.checkpoint
    if not isinstance(checkpoint, CheckpointManager.Config) or not checkpoint.create_seed:
        return
    if world_size > 1:
        fact = f"True, but {world_size} ranks were started"
        yield Fault("checkpoint.create_seed", fact, "start one process, and the ranks with load_from its dump folder")
    root = Path(config.dump_folder) / checkpoint.folder
    if steps := complete_steps(root):
        fact = f"True, but {root} holds checkpoints of the steps {', '.join(map(str, steps))}"
        yield Fault("checkpoint.create_seed", fact, "give another dump_folder")


def _profiler_faults(config: TrainerConfig, world_size: int) -> Iterator[Fault]:
    places = {"profiler": config.profiler} | {f"callbacks.{i}": item for i, item in enumerate(config.callbacks)}
    profilers = {path: item for path, item in places.items() if isinstance(item, Profiler.Config) and item.enable}
    for path, profiler in profilers.items():
        beyond = [rank for rank in profiler.ranks if rank >= world_size]
        if beyond:
            fact = f"{', '.join(map(str, beyond))} are not among the ranks 0 to {world_size - 1}"
            yield Fault(f"{path}.ranks", fact, "remove them")
    for path in list(profilers)[1:]:
        fact = f"True, and so is {next(iter(profilers))}.enable, but a process can run one profiler alone"
        yield Fault(f"{path}.enable", fact, "set one of them False")


def _sink_faults(config: TrainerConfig) -> Iterator[Fault]:
    sinks = {f"metrics.sinks.{i}": sink for i, sink in enumerate(getattr(config.metrics, "sinks", ()))}
    for i, item in enumerate(config.callbacks):
        if isinstance(item, SinkCallback.Config):
            sinks[f"callbacks.{i}"] = item.sink()
    writers: dict[str, str] = {}
    for path, sink in sinks.items():
        place = sink.writes_to() if isinstance(sink, MetricsSink.Config) else None
        if place is not None and (first := writers.setdefault(place, path)) != path:
            yield Fault(path, f"it writes to {place}, as {first} does", "give it another place, or leave one out")


def schedule_faults(config: TrainerConfig, training_steps: int) -> Iterator[Fault]:
    """Faults of the learning-rate schedule in a run of `training_steps`."""
    if isinstance(config.lr_scheduler, LRSchedulersContainer.Config):
        peak_lr = config.optimizer.lr if isinstance(config.optimizer, AdamW.Config) else None
        yield from config.lr_scheduler.faults_for(training_steps, peak_lr)


def _validation_faults(config: TrainerConfig) -> Iterator[Fault]:
    train, validator = config.dataloader, config.validator
    if not isinstance(validator, Validator.Config):
        return
    if not validator.enable:
        for i, item in enumerate(config.callbacks):
            if isinstance(item, EvaluateCallback.Config) and item.eval_steps:
                fact = f"{item.eval_steps}, but validator.enable is False, so there is no held-out data"
                yield Fault(f"callbacks.{i}.eval_steps", fact, "set validator.enable True")
        return
    held_out = validator.dataloader
    if not isinstance(held_out, TextDataLoader.Config) or held_out.path is not None or held_out.sources:
        return
    if config.dataset is not None:
        own = "dataset is given"
    elif not isinstance(train, TextDataLoader.Config):
        own = "dataloader reads data of its own"
    elif train.sources or train.path is not None:
        own = "dataloader.sources are given" if train.sources else f"dataloader.path is {train.path!r}"
    else:
        if held_out.split == train.split:
            fact = f"{held_out.split} is also what dataloader.split trains on"
            yield Fault("validator.dataloader.split", fact, "set one of them to the other split")
        return
    fact = f"not given, but {own}: the embedded corpus is not held-out data of that"
    yield Fault("validator.dataloader.path", fact, "give a file of held-out text")


def _batch_faults(training: TrainingConfig, dp_size: int) -> Iterator[Fault]:
    rows = training.micro_batch_size * dp_size
    if rows > 0 and training.global_batch_size % rows:
        below = training.global_batch_size // rows * rows
        choices = f"{below} or {below + rows}" if below else f"{rows}"
        yield Fault(
            "training.global_batch_size",
            f"{training.global_batch_size} is not a multiple of training.micro_batch_size {training.micro_batch_size} "
            f"x data-parallel size {dp_size}",
            f"set global_batch_size to {choices}, or change micro_batch_size",
        )


def __getattr__(name: str) -> Any:
    """Scripts of model/data/train files look for two names of `trainer.legacy` here, which stands on this module."""
    if name in ("HyperTrainerConfig", "parse_args"):
        return getattr(import_module("hyper_parallel.trainer.legacy"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
