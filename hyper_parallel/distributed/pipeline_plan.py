"""Which stage of a pipeline runs where, and what its schedule demands: plain arithmetic, done before torch loads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hyper_parallel.config.errors import Fault
from hyper_parallel.config.sections import ParallelismConfig


@dataclass(frozen=True, slots=True)
class Schedule:
    """What a schedule of torch.distributed.pipelining needs to know beforehand."""

    torch_name: str
    """Its name there."""
    stages_per_rank: range
    """How many it can have; the first is the default."""
    needs_full_pipeline: bool = False
    """Whether it refuses fewer micro-batches than stages."""
    needs_equal_rounds: bool = False
    """Whether the micro-batches must divide evenly into rounds of about as many as there are ranks."""
    v_shaped: bool = False
    """Whether stages go down the ranks and up again, so that the first rank has the first and the last one."""
    splits_backward: bool = False
    """Whether gradients of weights are computed apart from those of inputs."""


MANY = range(2, 2**16)
SCHEDULES = {
    "gpipe": Schedule("GPipe", range(1, 2)),
    "1f1b": Schedule("1F1B", range(1, 2), needs_full_pipeline=True),
    "interleaved_1f1b": Schedule("Interleaved1F1B", MANY, needs_equal_rounds=True),
    "zbv": Schedule("ZBVZeroBubble", range(2, 3), v_shaped=True, splits_backward=True),
    "dualpipev": Schedule("DualPipeV", range(2, 3), needs_full_pipeline=True, v_shaped=True, splits_backward=True),
}
"""GPipe (Huang et al. 2018, https://arxiv.org/abs/1811.06965), 1F1B and its interleaved form (Narayanan et al. 2021,
https://arxiv.org/abs/2104.04473), zero bubble (Qi et al. 2024, https://arxiv.org/abs/2401.10241), DualPipe (DeepSeek-AI
2024, https://arxiv.org/abs/2412.19437). Keyed by `parallelism.pp_schedule`."""


def schedule_of(parallelism: ParallelismConfig) -> Schedule:
    """The schedule that `parallelism` names."""
    return SCHEDULES[parallelism.pp_schedule]


def stages_per_rank(parallelism: ParallelismConfig) -> int:
    """`pp_virtual_stages`, the default resolved."""
    return parallelism.pp_virtual_stages or schedule_of(parallelism).stages_per_rank.start


def stages_of_rank(parallelism: ParallelismConfig, pp_rank: int) -> list[int]:
    """The stages of a rank, ascending."""
    pp = parallelism.pp
    if schedule_of(parallelism).v_shaped:
        return [pp_rank, 2 * pp - 1 - pp_rank]
    return list(range(pp_rank, pp * stages_per_rank(parallelism), pp))


def layers_of_stages(parallelism: ParallelismConfig, layers: int) -> list[range]:
    """The layers of each stage: as even as whole layers can be, with the embedding in the first stage and the head in
    the last, counted as `pp_embedding_layers` and `pp_head_layers`. No stage is without a layer."""
    stages = parallelism.pp * stages_per_rank(parallelism)
    counts = [1] * stages
    loads = [1.0] * stages
    loads[0] += parallelism.pp_embedding_layers
    loads[-1] += parallelism.pp_head_layers
    for _ in range(layers - stages):
        lightest = loads.index(min(loads))
        counts[lightest] += 1
        loads[lightest] += 1
    ends = [sum(counts[: stage + 1]) for stage in range(stages)]
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


def layer_faults(parallelism: ParallelismConfig, layers: int) -> Iterator[Fault]:
    """Faults of a pipeline for a model of `layers`."""
    per_rank = stages_per_rank(parallelism)
    stages = parallelism.pp * per_rank
    if layers < stages:
        yield Fault(
            "parallelism.pp",
            f"pp {parallelism.pp} x {per_rank} stage(s) a rank = {stages} stages, but the model has {layers} layers",
            "each stage needs one: set fewer ranks or pp_virtual_stages",
        )


def schedule_faults(parallelism: ParallelismConfig) -> Iterator[Fault]:
    """Faults of a schedule, whatever the batches are."""
    schedule, name = schedule_of(parallelism), parallelism.pp_schedule
    per_rank, allowed = stages_per_rank(parallelism), schedule.stages_per_rank
    if per_rank not in allowed:
        many = f"{allowed.start} or more" if allowed == MANY else f"{allowed.start}"
        yield Fault(
            "parallelism.pp_virtual_stages",
            f"{per_rank}, but pp_schedule {name} has {many} stage(s) on each rank",
            f"set {allowed.start}, or leave it out",
        )
    if schedule.splits_backward and parallelism.reshards():
        yield Fault(
            "parallelism.reshard_after_forward",
            f"True, but pp_schedule {name} computes gradients of weights apart, for which they must stay gathered",
            "leave it out, or set False",
        )


def micro_batch_faults(
    parallelism: ParallelismConfig, *, global_batch_size: int, micro_batch_size: int, dp_size: int
) -> Iterator[Fault]:
    """Faults of a schedule that has the stages it allows, for batches that divide exactly."""
    schedule, name = schedule_of(parallelism), parallelism.pp_schedule
    pp, per_rank = parallelism.pp, stages_per_rank(parallelism)
    if per_rank not in schedule.stages_per_rank:
        return
    micro_batches = global_batch_size // (micro_batch_size * dp_size)
    factors = (
        f"training.global_batch_size {global_batch_size} / (micro_batch_size {micro_batch_size} x data-parallel size "
        f"{dp_size}) = {micro_batches} micro-batch(es)"
    )
    if schedule.needs_full_pipeline and micro_batches < pp * per_rank:
        yield Fault(
            "parallelism.pp_schedule",
            f"{name} needs as many micro-batches as stages, pp {pp} x {per_rank} = {pp * per_rank}, but {factors}",
            f"raise training.global_batch_size to {pp * per_rank * micro_batch_size * dp_size}, lower "
            "micro_batch_size, or set pp_schedule gpipe",
        )
    rounds = max(1, micro_batches // pp)
    if schedule.needs_equal_rounds and micro_batches % rounds:
        yield Fault(
            "parallelism.pp_schedule",
            f"{name} sends micro-batches in {rounds} equal rounds over pp {pp} ranks, but {factors}",
            f"give a multiple of {pp} micro-batches",
        )
