"""Recompute and compile change what is kept and how it is run, never what comes out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hyper_parallel.config.errors import ConfigError
from hyper_parallel.config.sections import ParallelismConfig, TrainingConfig
from hyper_parallel.distributed.parallel_dims import ParallelDims
from tests.distributed.tiny_decoder import TinyDecoder, sum_loss
from tests.distributed.training import batch, build


def _gradients(**options: Any) -> tuple[float, dict[str, torch.Tensor], TinyDecoder]:
    dims = ParallelDims(dp_replicate=1, dp_shard=1)
    model = build(dims, ParallelismConfig(), training=TrainingConfig(dtype="float64"), tied=True, **options)
    ids, labels = batch(0)
    torch.manual_seed(5)
    loss = model(ids, labels_BT=labels, loss_fn=sum_loss).loss_sum
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}, model


def _forwards(model: TinyDecoder) -> int:
    """How often the second block's norm runs in one forward and backward pass."""
    calls = []
    model.layers[1].norm.register_forward_hook(lambda *_: calls.append(1))
    ids, labels = batch(0)
    model(ids, labels_BT=labels, loss_fn=sum_loss).loss_sum.backward()
    return len(calls)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_recompute_is_bitwise_equal(dropout: float) -> None:
    loss, grads, plain = _gradients(dropout=dropout)
    again_loss, again_grads, recomputed = _gradients(dropout=dropout, ac="full")
    assert again_loss == loss
    assert again_grads.keys() == grads.keys()  # the names of parameters do not change
    for name, grad in grads.items():
        assert torch.equal(again_grads[name], grad), name
    assert (_forwards(plain), _forwards(recomputed)) == (1, 2)


@pytest.mark.parametrize("ac", ["none", "full"])
def test_compiled_blocks_agree(ac: str) -> None:
    loss, grads, _ = _gradients()
    compiled_loss, compiled_grads, _ = _gradients(ac=ac, compile_backend="aot_eager")
    assert compiled_loss == pytest.approx(loss, abs=1e-12)
    assert compiled_grads.keys() == grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(compiled_grads[name], grad, rtol=0, atol=1e-12)


def test_a_backend_that_torch_does_not_know_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^compile.backend: foo does not compile for .*; name a backend that does"):
        _gradients(compile_backend="foo")


def test_blocks_are_what_the_backend_compiles() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    _gradients(compile_backend=counter)
    assert counter.frame_count == 1  # three equal blocks share one graph
