"""A few optimizer steps on fixed data under any topology: what every parity test compares."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from hyper_parallel.config.sections import (
    ActivationCheckpointConfig,
    CompileConfig,
    ParallelismConfig,
    TrainingConfig,
)
from hyper_parallel.distributed.fsdp import gradient_sync
from hyper_parallel.distributed.grad_norm import clip_grad_norm
from hyper_parallel.distributed.parallel_dims import ParallelDims
from hyper_parallel.distributed.reductions import all_reduce_sum
from hyper_parallel.models.common.parallelize import parallelize_decoder
from tests.distributed.tiny_decoder import VOCAB, TinyDecoder, sum_loss

ROWS, SEQ_LEN = 8, 10


class Curve(NamedTuple):
    """What a run did."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]
    """Whole parameters after the last step."""
    collectives: dict[str, int]
    """If asked for: how many of each the forward and backward passes of the second step launched."""


class CountCollectives(TorchDispatchMode):
    """Counts the collectives launched inside, by name."""

    def __enter__(self) -> Counter[str]:
        super().__enter__()
        self.counts: Counter[str] = Counter()
        return self.counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func._opname.strip("_")] += 1
        return func(*args, **(kwargs or {}))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels [ROWS, SEQ_LEN] of a global batch whose rows train very different numbers of tokens."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(VOCAB, (ROWS, SEQ_LEN), generator=generator)
    labels = torch.randint(VOCAB, (ROWS, SEQ_LEN), generator=generator)
    for row in range(ROWS):
        labels[row, : (3 * row + step) % SEQ_LEN] = -100
    return ids, labels


def build(
    dims: ParallelDims,
    parallelism: ParallelismConfig,
    *,
    training: TrainingConfig,
    ac: str = "none",
    compile_backend: str | None = None,
    **model: Any,
) -> TinyDecoder:
    """The decoder, parallelised and with its initial values."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, training.dtype))
    try:
        decoder = TinyDecoder.Config(**model).build()
    finally:
        torch.set_default_dtype(before)
    decoder = parallelize_decoder(
        decoder,
        dims,
        training=training,
        parallelism=parallelism,
        activation_checkpoint=ActivationCheckpointConfig(mode=ac),
        compile=CompileConfig(enable=compile_backend is not None, backend=compile_backend or "eager", fullgraph=True),
        dump_folder="unused",
    )
    decoder.init_weights(seed=3)
    return decoder


def train(
    parallelism: dict[str, Any] | None = None,
    *,
    accumulation: int = 1,
    steps: int = 4,
    max_norm: float = 0.5,
    count: bool = False,
    training: dict[str, Any] | None = None,
    **options: Any,
) -> Curve:
    """Trains under `parallelism` on the ranks of the process group, or alone."""
    training_config = TrainingConfig(**{"dtype": "float64", **(training or {})})
    parallelism_config = ParallelismConfig(**(parallelism or {}))
    dims = ParallelDims.from_config(parallelism_config, dist.get_world_size() if dist.is_initialized() else 1)
    dims.build_mesh("cpu")
    model = build(dims, parallelism_config, training=training_config, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, foreach=True)
    rows = ROWS // (dims.dp_size * accumulation)
    losses, norms, collectives = [], [], {}
    for step in range(steps):
        ids, labels = batch(step)
        micro = [slice(i, i + rows) for i in range(dims.dp_rank * rows * accumulation, ROWS, rows)][:accumulation]
        tokens = all_reduce_sum(sum((labels[m] != -100).sum() for m in micro), dims.loss_group)
        loss = torch.zeros((), dtype=torch.float64)
        with CountCollectives() if count else nullcontext({}) as counted:
            for i, m in enumerate(micro):
                gradient_sync([model], last=i == accumulation - 1)
                part = model(ids[m], labels_BT=labels[m], loss_fn=sum_loss).loss_sum / tokens
                part.backward()
                loss += part.detach()
        if step == 1:
            collectives = dict(counted)
        norms.append(clip_grad_norm(model.parameters(), max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(all_reduce_sum(loss, dims.loss_group).item())
    weights = {name: whole(parameter) for name, parameter in model.named_parameters()}
    return Curve(losses, norms, weights, collectives)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor that may be sharded. A collective."""
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def assert_same(curve: Curve, reference: Curve, tolerance: float) -> None:
    for name in ("losses", "norms"):
        torch.testing.assert_close(getattr(curve, name), getattr(reference, name), rtol=0, atol=tolerance)
    assert curve.weights.keys() == reference.weights.keys()
    for name, weight in curve.weights.items():
        assert (weight - reference.weights[name]).abs().max() <= tolerance, name
