"""The fixed tree of model/data/train files. What becomes of each field stands in `fields`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from hyper_parallel.config.configurable import ConfigNode
from hyper_parallel.config.sections import DType


@dataclass(kw_only=True, slots=True)
class ModelArguments(ConfigNode):
    """Which model."""

    name: str = "qwen3_5"
    """Model family."""
    weights_path: str | None = None
    """Hugging Face folder: its config.json gives the sizes, its safetensors the initial weights, where it has any.
    None: the family's debug sizes, random weights."""
    tokenizer_path: str | None = None
    """Folder with the tokenizer's files. None: weights_path if it has them, else the tokenizer in the package."""
    freeze_modules: list[str] | None = None
    """Parts of names of modules that are not trained. Not supported."""
    tp_plan: Any = None
    """Tensor-parallel plan. Not supported: the model has its own."""
    cp_modules: Any = None
    """Modules that context parallelism wraps. Not supported: the model has its own."""
    ep_modules: Any = None
    """Modules that hold experts. Not supported: the model has its own."""
    num_hidden_layers: int | None = None
    """In the place of what weights_path or the family says, as the next six."""
    hidden_size: int | None = None
    """Width of the residual stream."""
    intermediate_size: int | None = None
    """Width of dense feed-forward layers."""
    num_attention_heads: int | None = None
    """Query heads."""
    num_key_value_heads: int | None = None
    """Key and value heads."""
    vocab_size: int | None = None
    """Entries of the vocabulary."""
    max_position_embeddings: int | None = None
    """Longest row."""
    config_overrides: dict[str, Any] | None = None
    """Any other field of the model's config; `text_config.NAME`, nested or dotted, is NAME."""


@dataclass(kw_only=True, slots=True)
class DataArguments(ConfigNode):
    """What it is trained on."""

    type: Literal["dummy", "json_file", "hf_datasets", "preset_pt", "vl_dummy", "megatron"] = "dummy"
    """dummy: random token ids. json_file: a file of text, one document a row. hf_datasets: a data set of the Hugging
    Face hub or in a folder. preset_pt: token ids in a file of torch.save. megatron: pairs of .bin and .idx, in
    Megatron's order. vl_dummy is not supported."""
    train_path: Any = None
    """File, folder or name; for megatron a prefix, or a blend: "0.7 one 0.3 other", or a list of such pairs. None: the
    corpus in the package."""
    subset: str | None = None
    """Name of a configuration of a Hugging Face data set."""
    max_seq_len: int = 2048
    """Tokens in one row."""
    text_key: str = "text"
    """Field of each JSON line that holds the text."""
    train_size: int | None = None
    """Documents to take. None: all of a file, 1024 of dummy data."""
    template: str = "empty"
    """Chat template. Only empty is supported: text as it stands."""
    image_key: str = "image"
    """Field with images. Not supported, as all that follows about vision."""
    messages_key: str = "messages"
    """Field with the turns of a chat. Not supported."""
    image_token_id: int = 151655
    """Token in the place of an image."""
    video_token_id: int = 151656
    """Token in the place of a video."""
    vl_video: bool = False
    """Dummy videos in the place of images."""
    vl_grid_t: int = 2
    """Frames of a dummy image or video."""
    vl_grid_h: int = 2
    """Its height in patches."""
    vl_grid_w: int = 2
    """Its width in patches."""
    streaming: bool = False
    """Read samples while training, instead of before; train_size is then how many an epoch has."""
    num_workers: int = 0
    """Processes that prepare batches."""
    prefetch_factor: int | None = None
    """Steps prepared ahead. None: 2."""
    pin_memory: bool = True
    """Copy batches to the device from page-locked memory. Always so where the device gains by it."""
    shuffle: bool = True
    """Another order in each epoch."""
    megatron_seed: int | None = None
    """Seed of the sample order of megatron data. Not supported: it is train.seed."""
    pad_token_id: int = 0
    """What fills rows. Not supported: it is the tokenizer's, and padding is known by length, not by its id."""
    eod_token_id: int | None = None
    """Token between documents of megatron data. Not supported: it is the tokenizer's EOS token."""
    eod_mask_loss: bool = False
    """Leave what follows that token out of the loss. Not supported."""
    mmap_bin_files: bool = True
    """Map files of megatron data into memory."""


@dataclass(kw_only=True, slots=True)
class AcceleratorArguments(ConfigNode):
    """How the ranks share the work."""

    dp: int | None = None
    """Another name of dp_shard."""
    dp_replicate: int = 1
    """Copies of the (sharded) model."""
    dp_shard: int | None = None
    """Ranks that share one copy of the model. None or -1: all that are left."""
    tp: int = 1
    """Tensor-parallel degree."""
    cp: int = 1
    """Context-parallel degree."""
    pp: int = 1
    """Pipeline-parallel degree."""
    pp_micro_batch_num: int = 1
    """Micro-batches in a pipeline. Not supported, as the next three."""
    pp_schedule: Literal["gpipe", "1f1b"] | None = None
    """Order of a pipeline's work."""
    pp_vpp: int = 1
    """Stages on one rank."""
    pp_layer_split: Any = None
    """Layers of each stage."""
    ep: int = 1
    """Expert-parallel degree."""
    etp: int = 1
    """Tensor-parallel degree within experts. Not supported."""
    moe_token_dispatcher_type: str = "all_to_all"
    """How tokens reach their experts. Only all_to_all is supported."""
    npu_nums_per_device: int = 8
    """Devices of a node. Not supported: the launcher knows them."""
    zero_stage: Literal[0, 1, 2, 3] = 0
    """0: dp_shard and reshard_after_forward say what is sharded. 2: gathered parameters stay until the backward pass.
    3: they do not. 1 is not supported."""
    reshard_after_forward: bool = True
    """Free gathered parameters between forward and backward."""
    async_cp: bool = False
    """Overlap of context-parallel communication. Not supported."""
    ulysses_degree: int | None = None
    """Part of cp that exchanges heads. Not supported."""
    comm_fusion: bool = True
    """One collective for all parameters of a block. Always so."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory."""


@dataclass(kw_only=True, slots=True)
class MixedPrecisionArguments(ConfigNode):
    """Narrow types in forward and backward passes; parameters stay float32."""

    enabled: bool = False
    """Use the types below."""
    param_dtype: DType = "bfloat16"
    """Type of parameters and activations."""
    reduce_dtype: DType = "float32"
    """Type in which gradients are summed over ranks."""
    output_dtype: DType | None = None
    """Type of what blocks return. Not supported: it is param_dtype."""


@dataclass(kw_only=True, slots=True)
class GradientCheckpointingArguments(ConfigNode):
    """Memory against time."""

    activation_checkpoint: Literal["off", "none", "selective", "full"] = "off"
    """full: the backward pass computes each block again. selective: all of it but matrix products, attention and sums
    over ranks. off and none are the same."""


@dataclass(kw_only=True, slots=True)
class OptimizerArguments(ConfigNode):
    """AdamW, its learning rate by step, and the loss that it minimises."""

    type: str = "adamw"
    """Only adamw is supported."""
    lr: float = 1e-4
    """Peak learning rate."""
    lr_min: float = 1e-5
    """Where the fall ends."""
    lr_decay_style: Literal["cosine", "linear", "constant"] = "cosine"
    """How the rate falls after warm-up."""
    lr_warmup_ratio: float = 0.1
    """Warm-up takes this part of max_steps, rounded up."""
    loss_aggregation: Literal["token_weighted", "rank_average"] = "token_weighted"
    """token_weighted: every trained token of the step counts the same. rank_average: every micro-batch does."""
    weight_decay: float = 0.01
    """Norms and biases are left alone."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm."""
    bsz_warmup_ratio: float = 0.0
    """Part of the run in which the batch grows. Not supported."""
    eps: float = 1e-8
    """Added to the root of the second mean."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the running means."""
    foreach: bool | None = None
    """true: one kernel per operation. false: one per parameter. None: one for all."""


@dataclass(kw_only=True, slots=True)
class CheckpointArguments(ConfigNode):
    """What is saved."""

    output_dir: str = "outputs"
    """Where everything that the run writes goes. A run goes on from the newest checkpoint in it."""
    save_steps: int = 500
    """Save every this many steps, and after the last one. 0: never."""
    save_hf_weights: bool = True
    """Write a Hugging Face folder beside each checkpoint."""
    load_path: str | None = None
    """Hugging Face folder with initial weights, in the place of weights_path."""
    save_async: bool = False
    """Save while training goes on. Not supported."""


@dataclass(kw_only=True, slots=True)
class LoggingArguments(ConfigNode):
    """What is told."""

    report_to: Literal["none", "tensorboard", "wandb", "all"] = "none"
    """Where numbers go besides log lines and metrics.jsonl."""
    report_global_loss: bool = False
    """Tell the loss over all ranks. Always so."""
    log_steps: int = 10
    """A log line every this many steps."""
    report_throughput: bool = True
    """Tell tokens per second. Always so."""
    model_flops_per_token: float | None = None
    """For MFU. Not supported: the model counts them."""
    peak_tflops: float | None = None
    """For MFU. Not supported: the platform knows it."""


@dataclass(kw_only=True, slots=True)
class TensorBoardArguments(ConfigNode):
    """TensorBoard files."""

    enabled: bool = False
    """Write them."""
    output_dir: str = "tb_traces"
    """Folder, below that of the run."""
    log_steps: int = 1
    """Only 1 is supported: every step is written."""


@dataclass(kw_only=True, slots=True)
class WandbArguments(ConfigNode):
    """Weights & Biases."""

    enabled: bool = False
    """Send numbers there."""
    project: str = "hyper-parallel"
    """W&B project."""
    run_name: str | None = None
    """Name of the run. None: W&B makes one up."""
    log_steps: int = 1
    """Only 1 is supported: every step is sent."""


@dataclass(kw_only=True, slots=True)
class ProfileArguments(ConfigNode):
    """Traces of a window of steps."""

    enabled: bool = False
    """Write them."""
    output_dir: str = "profiler_traces"
    """Folder, below that of the run."""
    wait_steps: int = 1
    """Steps before the window."""
    warmup_steps: int = 1
    """Steps that are traced and thrown away."""
    active_steps: int = 3
    """Steps in the trace."""


@dataclass(kw_only=True, slots=True)
class MemoryMonitorArguments(ConfigNode):
    """Device memory in the log."""

    enabled: bool = False
    """Tell it."""
    log_steps: int = 50
    """Every this many steps."""
    reset_peak_each_step: bool = False
    """Tell the peak of each step, not that of the run."""


@dataclass(kw_only=True, slots=True)
class MoEMonitorArguments(ConfigNode):
    """Load of experts."""

    enabled: bool = False
    """Measure it."""
    lr: float = 1e-3
    """Rate at which biases of the router even the load out. Not supported: the load is measured, not changed."""
    num_recomputations: int = 1
    """Forward passes of each block in a step. Not supported: recomputed ones are not counted."""


@dataclass(kw_only=True, slots=True)
class EvalArguments(ConfigNode):
    """Loss on held-out data."""

    eval_steps: int = 0
    """Measure it every this many steps, and after the last one. 0: never."""
    eval_dataset: str | None = None
    """File of held-out text. None: held-out dummy data, or the held-out part of the corpus in the package."""


@dataclass(kw_only=True, slots=True)
class DebugArguments(ConfigNode):
    """Aids that cost speed."""

    deterministic: bool = False
    """Only deterministic kernels."""
    deterministic_warn_only: bool = False
    """Warn where there is none. Not supported: it is an error."""
    check_nan_inf: bool = False
    """Stop at the first module whose output or gradient is not finite."""
    gc_steps: int = 0
    """Collect Python garbage every this many steps; 0 leaves it to Python."""


@dataclass(kw_only=True, slots=True)
class TrainArguments(ConfigNode):
    """How it is trained."""

    max_steps: int | None = 100
    """Optimizer steps. None: as many as num_train_epochs hold."""
    num_train_epochs: int = 1
    """Passes over the data where max_steps is None."""
    global_batch_size: int = 8
    """Rows in one optimizer step, over all ranks."""
    micro_batch_size: int = 1
    """Rows in one forward pass on one rank."""
    seed: int = 42
    """Seed of weights, data order and dropout."""
    backend: str = "torch"
    """Only torch is supported."""
    init_device: str = "meta"
    """Only meta is supported: no rank ever holds the whole model."""
    comm_backend: str | None = None
    """torch.distributed backend. None: that of the device."""
    local_rank: int = 0
    """Not supported: the launcher tells it in LOCAL_RANK."""

    accelerator: AcceleratorArguments = field(default_factory=AcceleratorArguments)
    """How the ranks share the work."""
    mixed_precision: MixedPrecisionArguments = field(default_factory=MixedPrecisionArguments)
    """Narrow types."""
    gradient_checkpointing: GradientCheckpointingArguments = field(default_factory=GradientCheckpointingArguments)
    """Memory against time."""
    optimizer: OptimizerArguments = field(default_factory=OptimizerArguments)
    """Optimizer, learning rate, loss."""
    checkpoint: CheckpointArguments = field(default_factory=CheckpointArguments)
    """What is saved."""
    logging: LoggingArguments = field(default_factory=LoggingArguments)
    """What is told."""
    tensorboard: TensorBoardArguments = field(default_factory=TensorBoardArguments)
    """TensorBoard files."""
    wandb: WandbArguments = field(default_factory=WandbArguments)
    """Weights & Biases."""
    profile: ProfileArguments = field(default_factory=ProfileArguments)
    """Traces."""
    memory_monitor: MemoryMonitorArguments = field(default_factory=MemoryMonitorArguments)
    """Device memory."""
    moe_monitor: MoEMonitorArguments = field(default_factory=MoEMonitorArguments)
    """Load of experts."""
    eval: EvalArguments = field(default_factory=EvalArguments)
    """Held-out loss."""
    debug: DebugArguments = field(default_factory=DebugArguments)
    """Aids."""


@dataclass(kw_only=True, slots=True)
class HyperTrainerConfig(ConfigNode):
    """All of a model/data/train file."""

    model: ModelArguments = field(default_factory=ModelArguments)
    """Which model."""
    data: DataArguments = field(default_factory=DataArguments)
    """What it is trained on."""
    train: TrainArguments = field(default_factory=TrainArguments)
    """How it is trained."""
