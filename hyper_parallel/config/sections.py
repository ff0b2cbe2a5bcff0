"""The sections of the tree: plain data without a `build`, read by the phases and by every component that needs them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from hyper_parallel.config.configurable import ConfigNode, setting
from hyper_parallel.config.errors import Fault

DType = Literal["float32", "bfloat16", "float64"]
PipelineSchedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "zbv", "dualpipev"]


def at_least(node: ConfigNode, minimum: float, *names: str) -> Iterator[Fault]:
    """A fault for each named numeric field of `node` that is set below `minimum`."""
    for name in names:
        value = getattr(node, name)
        if value is not None and not value >= minimum:  # true of NaN as well
            yield Fault(name, f"{value} is below {minimum}", f"give {minimum} or more")


def above_zero(node: ConfigNode, *names: str) -> Iterator[Fault]:
    """A fault for each named numeric field of `node` that is set to 0 or less, to infinity or to NaN."""
    for name in names:
        value = getattr(node, name)
        if value is not None and not 0 < value < math.inf:
            yield Fault(name, f"{value} is not above 0 and finite", "give a positive number")


def at_most(node: ConfigNode, maximum: float, *names: str) -> Iterator[Fault]:
    """A fault for each named numeric field of `node` that is set above `maximum`."""
    for name in names:
        value = getattr(node, name)
        if value is not None and not value <= maximum:
            yield Fault(name, f"{value} is above {maximum}", f"give {maximum} or less")


@dataclass(kw_only=True, slots=True)
class TrainingConfig(ConfigNode):
    """How long, in what batches, and in which numbers to train."""

    steps: int | None = setting(None, aliases=("max_steps", "train_iters"))
    """Optimizer steps of the whole run, resumed parts included. None: as many as `epochs` hold, else 100."""
    epochs: int | None = setting(None, aliases=("num_train_epochs",))
    """Passes over the data, in the place of `steps`."""
    seq_len: int = 256
    """Tokens in one row of a batch."""
    global_batch_size: int = 8
    """Rows in one optimizer step, over all data-parallel ranks and accumulated micro-batches."""
    micro_batch_size: int = setting(4, aliases=("local_batch_size",))
    """Rows in one forward and backward pass on one data-parallel rank."""
    max_grad_norm: float | None = setting(1.0, aliases=("max_norm",))
    """Gradients are scaled down to this 2-norm over all parameters. None: measured, never scaled."""
    seed: int = 42
    """Seed of initial weights, data order and dropout."""
    init_device: Literal["meta"] = "meta"
    """Where models are constructed. On meta alone: no rank ever holds the whole of one."""
    dtype: DType = "float32"
    """Type of the parameters, and of everything computed from them unless mixed precision says otherwise."""
    mixed_precision_param: DType | None = None
    """Type of parameters and activations in forward and backward passes. None: `dtype`."""
    mixed_precision_reduce: DType | None = None
    """Type in which gradients are summed over ranks. None: `dtype`."""
    loss_aggregation: Literal["token_weighted", "rank_average"] = "token_weighted"
    """token_weighted: every trained token of the step counts the same. rank_average: every micro-batch of every
    data-parallel rank counts the same."""
    gc_steps: int = 50
    """Collect Python garbage every this many steps, on all ranks at once; 0 leaves it to Python."""
    empty_cache_steps: int = 0
    """Return cached accelerator memory every this many steps; 0 is never."""

    def faults(self) -> Iterator[Fault]:
        yield from at_least(self, 1, "steps", "epochs", "seq_len", "global_batch_size", "micro_batch_size")
        yield from at_least(self, 0, "seed", "gc_steps", "empty_cache_steps")
        yield from at_most(self, 2**63 - 1, "seed")  # what random generators take
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            yield Fault("max_grad_norm", f"{self.max_grad_norm} is not above 0", "give a positive norm, or None")
        if self.steps is not None and self.epochs is not None:
            yield Fault("epochs", f"{self.epochs} is given beside steps {self.steps}", "set one of the two")


@dataclass(kw_only=True, slots=True)
class ParallelismConfig(ConfigNode):
    """How the ranks share the work. The product of the degrees is the number of ranks."""

    dp_replicate: int = setting(1, aliases=("data_parallel_replicate_degree",))
    """Copies of the (sharded) model; gradients are summed over them."""
    dp_shard: int = setting(-1, aliases=("data_parallel_shard_degree", "fsdp_config.dp_shard_size"))
    """Ranks that share one copy of parameters, gradients and optimizer state (FSDP). -1: all that are left."""
    tp: int = setting(1, aliases=("tensor_parallel_degree", "accelerator.tp_size"))
    """Tensor-parallel degree: ranks that share the matrices of every layer and see the same rows."""
    sequence_parallel: bool = setting(False, aliases=("accelerator.sequence_parallel",))
    """Spread the residual stream and its norms over the tensor-parallel ranks, a part of each row on each: less
    memory for activations, the same bytes moved."""
    loss_parallel: bool = setting(False, aliases=("accelerator.loss_parallel",))
    """Spread the output matrix, the logits and the loss over the tensor-parallel ranks, a part of the vocabulary on
    each. False: each of them computes all logits."""
    mode: Literal["production", "validate"] = setting(
        "production", switches={"model.validate_placement": ("production", "validate")}
    )
    """How a tensor-parallel plan is run. production: on local tensors, with the declared communication alone. validate:
    on DTensors, each boundary compared with what is declared; slow, and the same loss."""
    cp: int = setting(1, aliases=("context_parallel_degree", "accelerator.cp_size"))
    """Context-parallel degree: ranks that hold different parts of the same rows, two chunks of every row each."""
    cp_method: Literal["ring", "ulysses", "allgather"] = "ring"
    """How attention sees the other ranks' tokens. ring: keys and values go round, the least memory. ulysses: all-to-all
    from tokens to heads and back, the least moved; heads must divide by cp x tp. allgather: all keys and values on each
    rank, the fewest collectives."""
    pp: int = setting(1, aliases=("pipeline_parallel_degree", "accelerator.pp_size"))
    """Pipeline-parallel degree: ranks that hold different layers and pass micro-batches on to each other."""
    pp_schedule: PipelineSchedule = "1f1b"
    """Order of the micro-batches in a pipeline. gpipe: all forward, then all backward. 1f1b: backward as soon as it can
    be, so that fewer are live. interleaved_1f1b: the same over several stages a rank, with shorter waits. zbv,
    dualpipev: two stages a rank in the shape of a V, with the gradients of weights computed while others wait."""
    pp_virtual_stages: int | None = None
    """Stages on each rank. None: 1 for gpipe and 1f1b, 2 for the others."""
    pp_embedding_layers: float = 1.0
    """Layers that the embedding counts as when layers are shared out over stages."""
    pp_head_layers: float = 1.0
    """Layers that the last norm, the output matrix and the loss count as."""
    ep: int = setting(1, aliases=("expert_parallel_degree", "accelerator.ep_size"))
    """Expert-parallel degree: ranks that hold different experts, to which tokens are sent. It adds no ranks: of the
    dp_shard x cp ranks, every ep neighbours share the experts, and dp_shard x cp / ep ranks the matrices of each."""
    reshard_after_forward: bool | None = setting(None, aliases=("fsdp_config.reshard_after_forward",))
    """Free gathered parameters between forward and backward: less memory, one more all-gather a layer. None: do so,
    except in a pipeline, where it would be done for every micro-batch."""
    cpu_offload: bool = False
    """Keep sharded parameters, gradients and optimizer state in host memory."""

    def reshards(self) -> bool:
        """`reshard_after_forward`, the default resolved."""
        return self.pp == 1 if self.reshard_after_forward is None else self.reshard_after_forward

    def sequence_ranks(self) -> int:
        """Ranks that each have a part of the tokens of the residual stream."""
        return self.tp if self.sequence_parallel else 1

    def smallest_world_size(self) -> int:
        """Ranks that the degrees ask for, with one for a dp_shard of -1."""
        fewest = self.ep // max(math.gcd(self.ep, self.cp), 1)  # ep divides dp_shard x cp
        return self.dp_replicate * (fewest if self.dp_shard == -1 else self.dp_shard) * self.tp * self.cp * self.pp

    def faults(self) -> Iterator[Fault]:
        yield from at_least(self, 1, "dp_replicate", "tp", "cp", "pp", "ep")
        if self.dp_shard != -1 and self.dp_shard < 1:
            yield Fault("dp_shard", f"{self.dp_shard} is neither -1 nor above 0", "give -1 for all ranks that are left")
        if self.cp_method != "ring" and self.cp == 1:
            yield Fault("cp_method", f"{self.cp_method}, but cp is 1: rows are whole", "set cp above 1 or ring")
        for name in ("sequence_parallel", "loss_parallel"):
            if getattr(self, name) and self.tp == 1:
                yield Fault(name, "True, but tp is 1: there are no ranks to spread over", "set False, or tp above 1")
        if self.mode == "validate" and self.tp == 1:
            yield Fault("mode", "validate, but tp is 1: there is no plan to compare with", "set production")
        yield from at_least(self, 1, "pp_virtual_stages")
        yield from at_least(self, 0, "pp_embedding_layers", "pp_head_layers")
        alone = {"pp_schedule": "1f1b", "pp_virtual_stages": None, "pp_embedding_layers": 1.0, "pp_head_layers": 1.0}
        for name, default in alone.items() if self.pp == 1 else ():
            if (value := getattr(self, name)) != default:
                yield Fault(name, f"{value}, but pp is 1: there is no pipeline", "leave it out, or set pp above 1")


@dataclass(kw_only=True, slots=True)
class ActivationCheckpointConfig(ConfigNode):
    """Memory against time: what the backward pass computes again, and what waits for it in host memory."""

    mode: Literal["none", "selective", "full", "memory_budget"] = "none"
    """full: keep only the input of each block and run its forward again in the backward pass. selective: keep the
    results of `save_ops` too. memory_budget: torch.compile decides, within `memory_budget`."""
    every_n_layers: int = 1
    """full and selective: the first of every this many blocks computes again, the others keep everything."""
    save_ops: tuple[str, ...] = ("matmul", "attention", "collective")
    """selective: whose results are kept, by these three kinds or by name, as aten.topk.default. collective: sums over
    ranks and all-to-alls; all-gathers, which would keep what other ranks hold, run again."""
    memory_budget: float | None = None
    """memory_budget: bytes that a compiled graph may keep, as a share of what it would, above 0 and at most 1."""
    swap: bool = False
    """Move what a block keeps to host memory until its backward. Results kept by `save_ops` stay."""

    def faults(self) -> Iterator[Fault]:
        yield from at_least(self, 1, "every_n_layers")
        yield from above_zero(self, "memory_budget")
        yield from at_most(self, 1, "memory_budget")
        if self.mode == "memory_budget" and self.memory_budget is None:
            yield Fault("memory_budget", "None, but mode is memory_budget", "give a share above 0 and at most 1")
        if self.mode == "selective" and not self.save_ops:
            yield Fault("save_ops", "empty: everything is computed again", "name what to keep, or set mode full")
        used = {
            "every_n_layers": ("full", "selective"),
            "save_ops": ("selective",),
            "memory_budget": ("memory_budget",),
        }
        defaults = type(self)()
        for name, modes in used.items():
            if self.mode not in modes and (value := getattr(self, name)) != getattr(defaults, name):
                fact = f"{value}, but mode is {self.mode}, which has no use for it"
                yield Fault(name, fact, f"leave it out, or set mode {' or '.join(modes)}")


@dataclass(kw_only=True, slots=True)
class CompileConfig(ConfigNode):
    """torch.compile of each block."""

    enable: bool = False
    """Compile every decoder block by itself."""
    backend: str = "inductor"
    """Backend of torch.compile."""
    fullgraph: bool = False
    """Refuse graph breaks inside a block."""


@dataclass(kw_only=True, slots=True)
class CommConfig(ConfigNode):
    """How ranks talk to each other."""

    backend: str = setting("auto", aliases=("training.backend",))
    """auto: gloo on CPU, and the accelerator's own library beside gloo elsewhere. Else a torch.distributed backend."""
    timeout_seconds: int = 600
    """A collective that waits longer than this ends the run."""
    mode: Literal["real", "fake"] = "real"
    """fake: one process rehearses rank 0, as if the others were there, to see what a rank computes, keeps in memory and
    writes to its log; `backend` is that of the real run. There are WORLD_SIZE ranks, or as few as the degrees of
    parallelism ask for; collectives carry nothing, so that all numbers mean nothing, and none is saved."""

    def faults(self) -> Iterator[Fault]:
        yield from at_least(self, 1, "timeout_seconds")
        yield from at_most(self, 2**31 - 1, "timeout_seconds")


@dataclass(kw_only=True, slots=True)
class DebugConfig(ConfigNode):
    """Aids that cost speed."""

    deterministic: bool = setting(False, aliases=("training.enable_full_determinism",))
    """Only deterministic kernels; an operation that has none is an error."""
    check_nan_inf: bool = False
    """Stop at the first module whose output, or first parameter whose gradient, is not finite, and name it."""
