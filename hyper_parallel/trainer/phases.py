"""The steps of set-up, each a function from what it needs to what it makes. Every trainer calls these."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hyper_parallel.components.checkpoint import CheckpointManager
from hyper_parallel.components.data import BaseDataLoader, HyperIter, StepBatchSampler
from hyper_parallel.components.loss import BaseLoss
from hyper_parallel.components.lr_scheduler import LRSchedulersContainer
from hyper_parallel.components.metrics import MetricsProcessor
from hyper_parallel.components.module_loss import ModuleLoss, adopted_loss
from hyper_parallel.components.optimizer import OptimizersContainer, adopt, parameter_groups
from hyper_parallel.components.profiler import Profiler
from hyper_parallel.components.tokenizer import BaseTokenizer, adopted_tokenizer
from hyper_parallel.components.validator import Validator
from hyper_parallel.config.errors import ConfigError, Fault, RunError, raise_faults
from hyper_parallel.config.target import Target
from hyper_parallel.distributed import construction
from hyper_parallel.distributed.distributed_setup import DistributedSetup
from hyper_parallel.distributed.fsdp import fsdp_needed
from hyper_parallel.distributed.grad_norm import clip_grad_norm
from hyper_parallel.distributed.last_words import end_with
from hyper_parallel.distributed.parallel_dims import ParallelDims
from hyper_parallel.distributed.process_group import init_distributed, is_fake, launched_world_size, rank
from hyper_parallel.distributed.reductions import all_reduce_max
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.environment import prepare_environment
from hyper_parallel.protocols.model import BaseModel
from hyper_parallel.protocols.model_spec import ModelSpec
from hyper_parallel.trainer import dump_folder
from hyper_parallel.trainer.callbacks import (
    Callback,
    CallbackHandler,
    EnvironMeterCallback,
    EvaluateCallback,
    ExpertDispatchCallback,
    GarbageCollectionCallback,
    LoggingCallback,
    TqdmCallback,
)
from hyper_parallel.trainer.callbacks.handler import failed_callback
from hyper_parallel.trainer.config import DEFAULT_STEPS, TrainerConfig, schedule_faults
from hyper_parallel.trainer.forward_backward import Accumulation, ForwardBackward, GetBatch, Pipelined
from hyper_parallel.trainer.step import FiniteGuard

if TYPE_CHECKING:
    from hyper_parallel.trainer.base import BaseTrainer

logger = logging.getLogger(__name__)

ClipGradFn = Callable[[list[torch.nn.Parameter], float | None], torch.Tensor]
"""`(parameters, max_norm)` -> the norm before clipping; gradients are scaled in place, unless max_norm is None."""


def set_up_logging(global_rank: int) -> None:
    """Log lines of rank 0 at INFO on standard error; of other ranks warnings only, with their rank."""
    root = logging.getLogger("hyper_parallel")
    root.setLevel(logging.INFO if global_rank == 0 else logging.WARNING)
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        place = "" if global_rank == 0 else f"[rank {global_rank}] "
        handler.setFormatter(logging.Formatter(f"%(asctime)s {place}%(message)s", datefmt="%H:%M:%S"))
        root.addHandler(handler)
        root.propagate = False


def set_up_process(config: TrainerConfig) -> ParallelDims:
    """Step 1: device, dump folder, determinism, process group, logging, mesh, random seed.

    Raises:
        ConfigError: the device does not compute in a configured type, or another run writes in the dump folder.
    """
    platform, training = get_platform(), config.training
    raise_faults(
        Fault(f"training.{name}", f"{platform.name} has no {dtype}", "choose another type")
        for name in ("dtype", "mixed_precision_param", "mixed_precision_reduce")
        if ((dtype := getattr(training, name)) == "float64" and not platform.supports_float64)
        or (dtype == "bfloat16" and not platform.bf16_supported())
    )
    dump_folder.hold(config.dump_folder)
    prepare_environment(deterministic=config.debug.deterministic, timeout_seconds=config.comm.timeout_seconds)
    platform.set_device()
    platform.set_deterministic(config.debug.deterministic)
    world_size = config.ranks(launched_world_size())
    init_distributed(config.comm, world_size, even_alone=needs_process_group(config, world_size))
    if world_size > 1:
        sys.excepthook = end_with  # in the place of torch's own, under which every rank prints a traceback
    set_up_logging(rank())
    parallel_dims = ParallelDims.from_config(config.parallelism, world_size)
    parallel_dims.build_mesh(platform.device_type)
    # Weights and data order have generators of their own; this one is for what draws while training, such as dropout,
    # which must differ between ranks that hold different tokens.
    platform.seed_all(training.seed + parallel_dims.token_rank)
    logger.info(
        "device %s, %d rank(s): %sdp_replicate %d x dp_shard %d%s%s%s",
        platform.name,
        world_size,
        f"pp {parallel_dims.pp} x " if parallel_dims.pp > 1 else "",
        parallel_dims.dp_replicate,
        parallel_dims.dp_shard,
        f" x cp {parallel_dims.cp} ({config.parallelism.cp_method})" if parallel_dims.cp > 1 else "",
        f" x tp {parallel_dims.tp}" if parallel_dims.tp > 1 else "",
        f", experts over ep {parallel_dims.ep}" if parallel_dims.ep > 1 else "",
    )
    if is_fake():
        logger.info("comm.mode fake: rank 0 is rehearsed, the others do not exist, and no number means anything")
    return parallel_dims


def needs_process_group(config: TrainerConfig, world_size: int) -> bool:
    """Whether a run on so many ranks has a process group, and so goes through FSDP."""
    # torch's process that writes checkpoints asks its parent for its rank.
    writes_elsewhere = getattr(config.checkpoint, "async_mode", None) == "process"
    return writes_elsewhere or fsdp_needed(config.training, config.parallelism, world_size)


def build_tokenizer(config: TrainerConfig) -> BaseTokenizer:
    """Step 2.

    Raises:
        ConfigError: the tokenizer has ids that the model cannot embed.
    """
    tokenizer = adopted_tokenizer(config.tokenizer.build(hf_assets_path=config.hf_assets_path))
    vocab_size = getattr(config.model_spec and config.model_spec.model, "vocab_size", None)
    if vocab_size is not None:
        check_vocabulary(tokenizer, vocab_size)
    return tokenizer


def check_vocabulary(tokenizer: BaseTokenizer, vocab_size: int) -> None:
    """Of a model that its function alone knows, `vocab_size` is seen when it stands.

    Raises:
        ConfigError: the tokenizer has ids that the model cannot embed.
    """
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError.one(
            "tokenizer",
            f"it has {tokenizer.vocab_size} entries, but the model's vocab_size is {vocab_size}",
            f"choose a tokenizer with {vocab_size} entries or fewer, or a model with a larger vocab_size",
        )


def loader_arguments(config: TrainerConfig, parallel_dims: ParallelDims, tokenizer: BaseTokenizer) -> dict[str, Any]:
    """The runtime arguments of every dataloader of the run: the training one's and the validator's."""
    training = config.training
    return {
        "tokenizer": tokenizer,
        "seq_len": training.seq_len,
        "micro_batch_size": training.micro_batch_size,
        "global_batch_size": training.global_batch_size,
        "dp_rank": parallel_dims.dp_rank,
        "dp_size": parallel_dims.dp_size,
        "seed": training.seed,
    }


def build_dataloader(config: TrainerConfig, parallel_dims: ParallelDims, tokenizer: BaseTokenizer) -> BaseDataLoader:
    """Step 3. Of a dataset it is the last of four."""
    if config.dataset is None:
        return config.dataloader.build(**loader_arguments(config, parallel_dims, tokenizer))
    transform = build_data_transform(config, tokenizer)
    dataset = build_dataset(config, parallel_dims, tokenizer, transform)
    return build_dataset_loader(config, parallel_dims, tokenizer, dataset, build_collate_fn(config, parallel_dims))


def build_data_transform(config: TrainerConfig, tokenizer: BaseTokenizer) -> Any:
    """What `dataset` makes samples with. None: it is not given."""
    if config.data_transform is None:
        return None
    return config.data_transform.build(
        tokenizer=_as_made(tokenizer),
        model_config=config.model_spec and config.model_spec.model,
        training_config=config.training,
    )


def build_dataset(config: TrainerConfig, parallel_dims: ParallelDims, tokenizer: BaseTokenizer, transform: Any) -> Any:
    """The samples."""
    assert config.dataset is not None, "validated before anything is built"
    return config.dataset.build(
        transform=transform,
        tokenizer=_as_made(tokenizer),
        mesh_context=parallel_dims,
        training_config=config.training,
    )


def build_collate_fn(config: TrainerConfig, parallel_dims: ParallelDims) -> Callable[[list[Any]], list[dict[str, Any]]]:
    """From the samples of a step on this rank to its micro-batches."""
    assert config.collate_fn is not None, "validated before anything is built"
    collate_fn: Any = config.collate_fn.build(num_micro_batch=_micro_batches(config, parallel_dims))
    return collate_fn


def build_dataset_loader(
    config: TrainerConfig,
    parallel_dims: ParallelDims,
    tokenizer: BaseTokenizer,
    dataset: Any,
    collate_fn: Callable[[list[Any]], list[dict[str, Any]]],
) -> BaseDataLoader:
    """The loader of a dataset, whichever it is, as one of ours.

    Raises:
        ConfigError: it gives no item, or its length is not known though nothing else says how long to train.
    """
    training = config.training
    sampler = None
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        sampler = StepBatchSampler(
            len(dataset),
            micro_batch_size=training.micro_batch_size,
            global_batch_size=training.global_batch_size,
            dp_rank=parallel_dims.dp_rank,
            dp_size=parallel_dims.dp_size,
            seed=training.seed,
        )
    loader: Any = config.dataloader.build(
        **loader_arguments(config, parallel_dims, tokenizer),
        dataset=dataset,
        collate_fn=collate_fn,
        batch_sampler=sampler,
        batch_size=training.global_batch_size // parallel_dims.dp_size,
        dp_world_size=parallel_dims.dp_size,
        max_seq_len=training.seq_len,
    )
    if not hasattr(loader, "__iter__"):
        fact = f"the target made a {type(loader).__name__}, which cannot be iterated over"
        raise ConfigError.one("dataloader", fact, "return an iterable of the micro-batches of each step")
    return HyperIter(
        loader,
        sampler=sampler,
        steps_per_epoch=_steps_per_epoch(loader, parallel_dims),
        global_batch_size=training.global_batch_size,
        micro_batches=_micro_batches(config, parallel_dims),
        seq_len=training.seq_len,
        vocab_size=tokenizer.vocab_size,
        row_parts=config.parallelism.sequence_ranks(),
    )


def _steps_per_epoch(loader: Any, parallel_dims: ParallelDims) -> int | None:
    """As many as the rank with the fewest has. None: a loader has no length."""
    try:
        steps = len(loader)
    except TypeError:  # also of a DataLoader whose dataset has none
        return None
    steps = -int(all_reduce_max(torch.tensor(-steps, device=get_platform().device()), parallel_dims.dp_group))
    if steps < 1:
        raise ConfigError.one("dataloader", "it has no item, on one rank at least", "give more data, or fewer ranks")
    return steps


def _micro_batches(config: TrainerConfig, parallel_dims: ParallelDims) -> int:
    """Micro-batches of a step on each rank."""
    training = config.training
    return training.global_batch_size // (training.micro_batch_size * parallel_dims.dp_size)


def _as_made(tokenizer: BaseTokenizer) -> Any:
    """What the target of the tokenizer slot made."""
    return getattr(tokenizer, "product", tokenizer)


def plan_steps(config: TrainerConfig, dataloader: BaseDataLoader) -> int:
    """Optimizer steps of the whole run: `training.steps`, or what `training.epochs` hold, or DEFAULT_STEPS.

    Raises:
        ConfigError: the learning-rate schedule does not fit into that many steps, or nobody knows how many there are.
    """
    training = config.training
    if training.steps is not None:
        return training.steps
    if training.epochs is None:
        steps = DEFAULT_STEPS
    else:
        if dataloader.rows_per_epoch is None:
            raise ConfigError.one(
                "training.epochs",
                f"{training.epochs} is given, but nobody knows the length of streamed data",
                "give training.steps instead",
            )
        # At least 1: a dataloader has rows for one step, or it refuses to be built.
        steps = training.epochs * dataloader.rows_per_epoch // training.global_batch_size
    raise_faults(schedule_faults(config, steps))
    return steps


def prepare_model_config(config: TrainerConfig) -> BaseModel.Config | None:
    """Step 4: the run's private copy of the model's Config, told about the run. None: `build_model_fn` alone knows."""
    assert config.model_spec is not None, "validated before anything is built"
    model_config = copy.deepcopy(config.model_spec.model)
    if model_config is not None:
        model_config.update_from_config(config)
    return model_config


def build_model(
    config: TrainerConfig, model_config: BaseModel.Config | None, parallel_dims: ParallelDims
) -> tuple[BaseModel, list[BaseModel]]:
    """Steps 5 to 8: the whole model as it was constructed, and the parts of it on this rank, with their initial values.

    A spec with `build_model_fn` has all of them done by that.
    """
    spec = config.model_spec
    assert spec is not None, "validated before anything is built"
    if spec.builds_whole:
        model = _built_whole(config, spec, model_config, parallel_dims)
        if not isinstance(model, BaseModel):
            fact = f"{spec.name} made a {type(model).__name__}, which is no BaseModel"
            remedy = "return what HyperAutoModelForCausalLM.from_config or from_pretrained gives, or a BaseModel"
            raise ConfigError.one("model_spec", fact, remedy)
        raise_faults(_unsharded(config, spec, model, parallel_dims))
        logger.info("model %s:%s, built in one call in %s", spec.name, spec.flavor, config.training.dtype)
        _tell_units([model], parallel_dims)
        return model, [model]
    assert model_config is not None, "validated before anything is built"
    model = construct_model(config, model_config)
    model.verify_module_protocol()
    model_parts = parallelize(config, model, parallel_dims)
    materialize(config, model_parts)
    _tell_units(model_parts, parallel_dims)
    return model, model_parts


def distributed_setup(config: TrainerConfig, parallel_dims: ParallelDims) -> DistributedSetup:
    """What a model and a loss are told of the ranks."""
    return DistributedSetup(
        parallel_dims=parallel_dims, parallelism=config.parallelism, plan_overrides=config.plan_overrides
    )


def _built_whole(
    config: TrainerConfig, spec: ModelSpec, model_config: BaseModel.Config | None, parallel_dims: ParallelDims
) -> Any:
    if spec.target is None:
        assert spec.build_model_fn is not None
        return spec.build_model_fn(model_config, parallel_dims, **_model_sections(config))
    return spec.target.build(
        distributed_setup=distributed_setup(config, parallel_dims),
        training=config.training,
        activation_checkpoint=config.activation_checkpoint,
        activation_swap=config.activation_checkpoint.swap,
        compile_config=config.compile,
        peft_config=None,
    )


def _unsharded(
    config: TrainerConfig, spec: ModelSpec, model: BaseModel, parallel_dims: ParallelDims
) -> Iterator[Fault]:
    """Parameters whose gradients nobody sums over ranks: each rank would train a model of its own."""
    if not fsdp_needed(config.training, config.parallelism, parallel_dims.world_size):
        return
    from torch.distributed.tensor import DTensor

    plain = [name for name, p in model.named_parameters() if p.requires_grad and not isinstance(p, DTensor)]
    if plain:
        fact = f"{spec.name} made a model in which FSDP does not hold {plain[0]}" + (
            f", nor {len(plain) - 1} others of its parameters" if len(plain) > 1 else ""
        )
        yield Fault("model_spec", fact, "hand its distributed_setup and training on to HyperAutoModelForCausalLM")


def _tell_units(model_parts: list[BaseModel], parallel_dims: ParallelDims) -> None:
    """Logs what FSDP gathers at a time, and over which mesh."""
    if parallel_dims.fsdp_mesh is None:
        return
    from torch.distributed.fsdp import FSDPModule

    units = [(name, m) for part in model_parts for name, m in part.named_modules() if isinstance(m, FSDPModule)]
    blocks = {id(block) for part in model_parts for block in part.blocks()}
    layers = sum(id(module) in blocks for _, module in units)
    roots = sum(name == "" for name, _ in units)
    mesh = parallel_dims.fsdp_mesh
    axes = ", ".join(f"{axis}={size}" for axis, size in zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    logger.info("FSDP over mesh (%s): %d layers by themselves, %d root(s) with the rest", axes, layers, roots)


def construct_model(config: TrainerConfig, model_config: BaseModel.Config) -> BaseModel:
    """Step 5: the whole model in `training.dtype` on the meta device: shapes without memory."""
    model = construction.construct_on_meta(model_config, getattr(torch, config.training.dtype))
    model.apply_overrides(config.plan_overrides, config.parallelism, config.training)
    return model


def parallelize(config: TrainerConfig, model: BaseModel, parallel_dims: ParallelDims) -> list[BaseModel]:
    """Step 7: the parts of the model that live on this rank, one for each pipeline stage, still without memory."""
    spec = config.model_spec
    assert spec is not None and spec.parallelize_fn is not None, "validated before anything is built"
    parts = [model]
    if parallel_dims.pp > 1:
        assert spec.pipelining_fn is not None, "validated before anything is built"
        parts = spec.pipelining_fn(model, parallel_dims, parallelism=config.parallelism)
    return [spec.parallelize_fn(part, parallel_dims, **_model_sections(config)) for part in parts]


def _model_sections(config: TrainerConfig) -> dict[str, Any]:
    """What the functions of a ModelSpec are told of the run."""
    sections = ("training", "parallelism", "activation_checkpoint", "compile", "dump_folder")
    return {name: getattr(config, name) for name in sections}


def materialize(config: TrainerConfig, model_parts: list[BaseModel]) -> None:
    """Step 8: memory for the shards of this rank, and their initial values."""
    construction.materialize(model_parts, cpu_offload=config.parallelism.cpu_offload, seed=config.training.seed)
    assert config.model_spec is not None
    logger.info(
        "model %s:%s, %s parameters%s in %s, initial weights drawn from seed %d%s",
        config.model_spec.name,
        config.model_spec.flavor,
        f"{sum(p.numel() for part in model_parts for p in part.parameters()):,}",
        " of the first rank of the pipeline" if config.parallelism.pp > 1 else "",
        config.training.dtype,
        config.training.seed,
        _fate_of_drawn_weights(config.model_spec.flavor, getattr(config.checkpoint, "load_from", None)),
    )


def _fate_of_drawn_weights(flavor: str, load_from: str | None) -> str:
    if load_from is not None:
        return ", to be replaced by those of a checkpoint or of checkpoint.load_from"
    if Path(flavor).is_dir():
        return f": {flavor} gave sizes alone, its weights are read with --checkpoint.load_from {flavor}"
    return ""


def build_optimizers(
    config: TrainerConfig, model_parts: list[BaseModel], parallel_dims: ParallelDims
) -> OptimizersContainer:
    """Step 9. A plain torch optimizer is taken into a container."""
    product = config.optimizer.build(
        model_parts=model_parts, params=parameter_groups(model_parts), model=model_parts[0]
    )
    optimizers = adopt(product, model_parts)
    if config.model_spec is not None and config.model_spec.post_optimizer_build_fn is not None:
        config.model_spec.post_optimizer_build_fn(optimizers, model_parts, parallel_dims)
    return optimizers


def choose_clip_grad_fn(config: TrainerConfig, model_parts: list[BaseModel], parallel_dims: ParallelDims) -> ClipGradFn:
    """Step 9: the model's own way to clip gradients, where its spec has one. Ours counts over all pipeline stages."""
    assert config.model_spec is not None
    copies = [part.get_parameter(name) for part in model_parts for name in part.copied_parameters]
    return config.model_spec.clip_grad_fn or partial(clip_grad_norm, copies=copies, pp_group=parallel_dims.pp_group)


def build_lr_schedulers(
    config: TrainerConfig, optimizers: OptimizersContainer, training_steps: int
) -> LRSchedulersContainer:
    """Step 9. A target also gets them under the names `optimizer`, torch's own, and `train_iters`."""
    own = {"optimizers": optimizers, "training_steps": training_steps}
    if not isinstance(config.lr_scheduler, Target):
        return config.lr_scheduler.build(**own)
    product: Any = config.lr_scheduler.build(**own, optimizer=optimizers.optimizers[0], train_iters=training_steps)
    if isinstance(product, torch.optim.lr_scheduler.LRScheduler):
        raise_faults(_plain_scheduler_faults(product, optimizers))
    lacks = [name for name in ("step", "state_dict", "load_state_dict") if not hasattr(product, name)]
    if lacks:
        fact = f"the target made a {type(product).__name__}, which has no {', '.join(lacks)}"
        raise ConfigError.one("lr_scheduler", fact, "return a torch LRScheduler, or write them")
    return product


def _plain_scheduler_faults(
    scheduler: torch.optim.lr_scheduler.LRScheduler, optimizers: OptimizersContainer
) -> Iterator[Fault]:
    if (count := len(optimizers.optimizers)) > 1:
        fact = f"a plain {type(scheduler).__name__}: it sets the rate of one optimizer, and each rank has {count}"
        yield Fault("lr_scheduler", fact, "schedule all of `optimizers`, or set parallelism.pp 1")
    try:
        inspect.signature(scheduler.step).bind()
    except TypeError:
        fact = f"a {type(scheduler).__name__}, whose step() takes more than the trainer knows after a step"
        yield Fault("lr_scheduler", fact, "give one whose step() takes no argument")


def build_loss(config: TrainerConfig, model_parts: list[BaseModel], parallel_dims: ParallelDims) -> BaseLoss:
    """Step 9: what the optimizer minimises."""
    vocab_size = model_parts[-1].vocab_size
    # torch's modules take any keyword, and theirs is no vocab_size.
    maker = type(config.loss).callable if isinstance(config.loss, Target) else None
    is_module = isinstance(maker, type) and issubclass(maker, torch.nn.Module)
    product = config.loss.build() if is_module else config.loss.build(vocab_size=vocab_size)
    loss = adopted_loss(product, vocab_size=vocab_size)
    if isinstance(loss, ModuleLoss):
        loss.module.to(get_platform().device())
        loss.bind(model_parts[-1], distributed_setup(config, parallel_dims))
    if config.parallelism.loss_parallel:
        loss.spread_over(parallel_dims.tp_group)
    return loss


def build_forward_backward(
    config: TrainerConfig,
    model_parts: list[BaseModel],
    parallel_dims: ParallelDims,
    loss: BaseLoss,
    get_batch: GetBatch,
) -> ForwardBackward:
    """Step 9: how the gradients of a step come about."""
    training = config.training
    if parallel_dims.pp == 1:
        return Accumulation(model_parts, loss, get_batch, training.global_batch_size)
    from hyper_parallel.distributed.pipeline import Pipeline

    pipeline = Pipeline(
        model_parts,
        parallel_dims,
        config.parallelism,
        micro_batches=_micro_batches(config, parallel_dims),
        rows=training.micro_batch_size,
        tokens=training.seq_len,
        dtype=getattr(torch, training.mixed_precision_param or training.dtype),
        device=get_platform().device(),
    )
    return Pipelined(pipeline, loss, get_batch, training.global_batch_size)


def build_checkpointer(
    config: TrainerConfig, trainer: BaseTrainer, model_config: BaseModel.Config | None
) -> CheckpointManager:
    """Step 10. The manager knows Hugging Face's names where the model's spec has an adapter."""
    assert config.model_spec is not None
    adapter = config.model_spec.state_dict_adapter
    return config.checkpoint.build(
        dump_folder=config.dump_folder,
        sd_adapter=None if adapter is None or model_config is None else adapter(model_config),
        tokenizer=trainer.tokenizer,
        model_parts=trainer.model_parts,
        optimizers=trainer.optimizers,
        lr_schedulers=trainer.lr_schedulers,
        dataloader=trainer.dataloader,
        train_state=trainer.state,
    )


def build_metrics(config: TrainerConfig, model: BaseModel, training_steps: int) -> MetricsProcessor:
    """Step 11. `model` is the whole one, whose FLOPs are counted."""
    training = config.training
    compute_dtype = getattr(torch, training.mixed_precision_param or training.dtype)
    peak_flops = get_platform().peak_flops(compute_dtype)
    return config.metrics.build(
        dump_folder=config.dump_folder,
        training_steps=training_steps,
        flops_per_token=model.flops_per_token(training.seq_len),
        peak_flops=None if peak_flops is None else peak_flops * launched_world_size(),
        is_writer=rank() == 0,
    )


def build_profiler(config: TrainerConfig) -> Profiler:
    """Step 11."""
    return config.profiler.build(dump_folder=config.dump_folder)


def build_validator(config: TrainerConfig, trainer: BaseTrainer) -> Validator:
    """Step 11."""
    dims = trainer.parallel_dims
    return config.validator.build(
        model_parts=trainer.model_parts,
        evaluate=trainer.forward_backward.evaluate,
        loader_arguments=loader_arguments(config, dims, trainer.tokenizer),
        dp_group=dims.dp_group,
        loss_group=dims.loss_group,
        training_steps=trainer.training_steps,
    )


def guard_finite(config: TrainerConfig, model_parts: list[BaseModel]) -> FiniteGuard | None:
    """Step 11: hooks that name the source of a NaN, when `debug.check_nan_inf` asks for them."""
    return FiniteGuard(model_parts) if config.debug.check_nan_inf else None


def build_callbacks(config: TrainerConfig, trainer: BaseTrainer) -> CallbackHandler:
    """Step 11, when all else stands: the default chain, then `config.callbacks`.

    Raises:
        ConfigError: one of `config.callbacks` does not suit the run, or is no callback.
        CallbackError: one of them raised when it was made.
    """
    training = config.training
    chain: list[Callback] = [
        EnvironMeterCallback(trainer),
        LoggingCallback.Config().build(trainer=trainer, metrics=trainer.metrics),
        TqdmCallback.Config().build(trainer=trainer, metrics=trainer.metrics),
        EvaluateCallback.Config().build(trainer=trainer),
        GarbageCollectionCallback.Config(
            gc_steps=training.gc_steps, empty_cache_steps=training.empty_cache_steps
        ).build(trainer=trainer),
    ]
    if trainer.parallel_dims.ep > 1:
        chain.append(ExpertDispatchCallback(trainer))
    faults: list[Fault] = []
    for i, item in enumerate(config.callbacks):
        try:
            callback: Any = item.build(trainer=trainer)
        except ConfigError as error:
            faults += (dataclasses.replace(fault, path=f"callbacks.{i}.{fault.path}") for fault in error.faults)
            continue
        except RunError:
            raise
        except (Exception, SystemExit) as error:  # the user's code, which must end the run with its name
            path = item.target_path if isinstance(item, Target) else type(item).__qualname__
            raise failed_callback(path.rpartition(".")[2], "__init__", trainer.state, error) from error
        if isinstance(callback, Callback):
            chain.append(callback)
        else:
            made, base = type(callback).__name__, f"{Callback.__module__.rpartition('.')[0]}.{Callback.__name__}"
            faults.append(Fault(f"callbacks.{i}", f"it makes a {made}, which is no callback", f"derive it from {base}"))
    raise_faults(faults)
    return CallbackHandler(chain)
