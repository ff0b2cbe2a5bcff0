"""Every layout of data parallelism follows one process, in float64 and with very uneven rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.func import functional_call

from hyper_parallel.config.sections import (
    ActivationCheckpointConfig,
    CompileConfig,
    ParallelismConfig,
    TrainingConfig,
)
from hyper_parallel.distributed.fsdp import fsdp_needed, gradient_sync
from hyper_parallel.distributed.parallel_dims import ParallelDims
from hyper_parallel.distributed.reductions import all_reduce_sum
from tests.distributed.tiny_decoder import TinyDecoder, sum_loss
from tests.distributed.training import ROWS, SEQ_LEN, Curve, assert_same, batch, build, train, whole
from tests.distributed_world import run_world

REPLICATE = {"dp_replicate": 2}
KEEP = {"reshard_after_forward": False}
OFFLOAD = {"cpu_offload": True}

# With 3 blocks and the root there are 4 units of sharding.
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "fsdp": {"count": True},
        "fsdp, tied": {"tied": True},
        "fsdp, accumulation 2": {"accumulation": 2, "count": True},
        "fsdp, accumulation 4, tied": {"accumulation": 4, "tied": True},
        "fsdp, not resharded": {"parallelism": KEEP, "accumulation": 2, "count": True},
        "fsdp, CPU offload": {"parallelism": OFFLOAD, "accumulation": 2},
        "fsdp, recompute": {"ac": "full", "accumulation": 2, "tied": True},
        "fsdp, recompute, compile": {"ac": "full", "compile_backend": "aot_eager"},
        "replicate": {"parallelism": REPLICATE, "count": True},
        "replicate, accumulation 4": {"parallelism": REPLICATE, "accumulation": 4, "count": True},
    },
    4: {
        "fsdp": {},
        "fsdp, accumulation 2, tied": {"accumulation": 2, "tied": True},
        "hsdp": {"parallelism": REPLICATE, "count": True},
        "hsdp, accumulation 2": {"parallelism": REPLICATE, "accumulation": 2, "count": True},
        "hsdp, recompute": {"parallelism": REPLICATE, "ac": "full"},
        "replicate": {"parallelism": {"dp_replicate": 4}},
    },
}


def _train_all(layouts: dict[str, dict[str, Any]]) -> dict[str, Curve]:
    return {name: train(**options) for name, options in layouts.items()}


@pytest.fixture(scope="module")
def curves() -> dict[tuple[int, str], Curve]:
    return {
        (nproc, name): curve
        for nproc, layouts in LAYOUTS.items()
        for name, curve in run_world(nproc, _train_all, layouts)[nproc - 1].items()
    }


@pytest.fixture(scope="module")
def references() -> dict[bool, Curve]:
    return {tied: train(tied=tied) for tied in (False, True)}


@pytest.mark.parametrize(("nproc", "layout"), [(n, layout) for n, layouts in LAYOUTS.items() for layout in layouts])
def test_follows_one_process(nproc: int, layout: str, curves: Any, references: Any) -> None:
    assert_same(curves[nproc, layout], references[LAYOUTS[nproc][layout].get("tied", False)], 1e-12)


@pytest.mark.parametrize("accumulation", [2, 4])
def test_accumulation_alone_follows_one_batch(accumulation: int, references: Any) -> None:
    assert_same(train(accumulation=accumulation), references[False], 1e-12)


def test_gradients_are_reduced_once_per_step(curves: Any) -> None:
    """4 units, however many micro-batches: reduce-scatter over dp_shard, all-reduce over dp_replicate."""
    once = {
        (2, "fsdp"): {"reduce_scatter_base": 4},
        (2, "fsdp, accumulation 2"): {"reduce_scatter_base": 4},
        (2, "fsdp, not resharded"): {"reduce_scatter_base": 4},
        (2, "replicate"): {"allreduce": 4},
        (2, "replicate, accumulation 4"): {"allreduce": 4},
        (4, "hsdp"): {"reduce_scatter_base": 4, "allreduce": 4},
        (4, "hsdp, accumulation 2"): {"reduce_scatter_base": 4, "allreduce": 4},
    }
    for key, expected in once.items():
        counted = {name: n for name, n in curves[key].collectives.items() if name != "allgather_base"}
        assert counted == expected, key


def test_gathers_follow_the_reshard_policy(curves: Any) -> None:
    """Resharded: root once, 3 blocks in forward and backward, but not again in the forward after a held backward."""
    gathers = {key: curve.collectives.get("allgather_base", 0) for key, curve in curves.items() if curve.collectives}
    assert gathers[2, "fsdp"] == 1 + 3 + 3
    assert gathers[2, "fsdp, accumulation 2"] == 1 + 3 + 3 + 3
    assert gathers[2, "fsdp, not resharded"] == 4
    assert gathers[2, "replicate"] == 0
    assert gathers[4, "hsdp"] == 1 + 3 + 3


def test_who_goes_through_fsdp() -> None:
    plain, offload = ParallelismConfig(), ParallelismConfig(cpu_offload=True)
    assert not fsdp_needed(TrainingConfig(), plain, 1)
    assert not fsdp_needed(TrainingConfig(dtype="bfloat16", mixed_precision_param="bfloat16"), plain, 1)
    assert fsdp_needed(TrainingConfig(mixed_precision_param="bfloat16"), plain, 1)
    assert fsdp_needed(TrainingConfig(), offload, 1)
    assert fsdp_needed(TrainingConfig(), plain, 2)


@pytest.mark.parametrize(
    ("training", "parallelism"), [({"mixed_precision_param": "bfloat16"}, {}), ({}, {"cpu_offload": True})]
)
def test_fsdp_without_a_mesh_is_refused_not_ignored(training: dict, parallelism: dict) -> None:
    with pytest.raises(RuntimeError, match="even_alone=True"):
        train(parallelism, training=training)


MIXED = {"dtype": "float32", "mixed_precision_param": "bfloat16"}


def _mixed_gradients() -> tuple[float, dict[str, torch.Tensor]]:
    dims = ParallelDims.from_config(ParallelismConfig(), dist.get_world_size())
    dims.build_mesh("cpu")
    model = build(dims, ParallelismConfig(), training=TrainingConfig(**MIXED), tied=True)
    ids, labels = batch(0)
    rows = slice(dims.dp_rank * ROWS // dims.dp_size, (dims.dp_rank + 1) * ROWS // dims.dp_size)
    loss = model(ids[rows], labels_BT=labels[rows], loss_fn=_float32_loss).loss_sum / 50
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item(), {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def _float32_loss(hidden_BTD: torch.Tensor, lm_head: Any, labels_BT: torch.Tensor) -> torch.Tensor:
    return sum_loss(hidden_BTD, lambda hidden: lm_head(hidden).float(), labels_BT)


def test_mixed_precision_is_computing_with_cast_parameters() -> None:
    """One rank gives, bit by bit, what casting every parameter by hand gives; two ranks sum in float32."""
    model = TinyDecoder.Config(tied=True).build()
    model.init_weights(seed=3)
    ids, labels = batch(0)
    cast = {name: p.bfloat16() for name, p in model.named_parameters()}
    kwargs = {"labels_BT": labels, "loss_fn": _float32_loss}
    loss = functional_call(model, cast, (ids,), kwargs).loss_sum / 50
    loss.backward()

    ((one_loss, one_grads),) = run_world(1, _mixed_gradients)
    assert one_loss == loss.item()
    for name, parameter in model.named_parameters():
        assert one_grads[name].dtype == torch.float32
        assert torch.equal(one_grads[name], parameter.grad), name

    two_loss, two_grads = run_world(2, _mixed_gradients)[0]
    assert two_loss == pytest.approx(one_loss, rel=1e-3)
    for name, grad in two_grads.items():
        torch.testing.assert_close(grad, one_grads[name], rtol=0, atol=0.01 * one_grads[name].abs().max().item())


def _moe_step(ac: str, parallelism: dict[str, Any]) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Loss, auxiliary loss and gradients of one packed batch of a small real Qwen3-MoE, one micro-batch a row."""
    from hyper_parallel.models.qwen3_moe import create_model_spec

    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_experts": 6, "num_experts_per_tok": 2}
    spec = create_model_spec("debug", moe_intermediate_size=16, head_dim=8, tie_word_embeddings=True, **sizes)
    config = ParallelismConfig(**parallelism)
    dims = ParallelDims.from_config(config, dist.get_world_size() if dist.is_initialized() else 1)
    dims.build_mesh("cpu")
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            model = spec.model.build()
    finally:
        torch.set_default_dtype(torch.float32)
    model = spec.parallelize_fn(
        model,
        dims,
        training=TrainingConfig(dtype="float64"),
        parallelism=config,
        activation_checkpoint=ActivationCheckpointConfig(mode=ac),
        compile=CompileConfig(),
        dump_folder="unused",
    )
    model.to_empty(device="cpu")
    model.init_weights(seed=3)
    ids, labels = batch(0)
    totals = torch.zeros(2, dtype=torch.float64)
    rows = ROWS // dims.dp_size
    for i in range(rows):
        row = dims.dp_rank * rows + i
        gradient_sync([model], last=i == rows - 1)
        out = model(
            ids[row : row + 1],
            labels_BT=labels[row : row + 1],
            cu_seqlens=[0, row % 4 + 1, SEQ_LEN],
            loss_fn=sum_loss,
        )
        (out.loss_sum / 50 + out.aux_loss_sum / ROWS).backward()
        totals += torch.stack([out.loss_sum.detach() / 50, out.aux_loss_sum.detach() / ROWS])
    loss, aux_loss = all_reduce_sum(totals, dims.loss_group).tolist()
    return loss, aux_loss, {name: whole(p.grad) for name, p in model.named_parameters()}


def _moe_steps() -> list[Any]:
    return [_moe_step("none", {}), _moe_step("full", {"dp_replicate": 2})]


def test_qwen3_moe_follows_one_process() -> None:
    loss, aux_loss, grads = _moe_step("none", {})
    assert aux_loss > 0
    for other_loss, other_aux_loss, other_grads in run_world(2, _moe_steps)[1]:
        assert other_loss == pytest.approx(loss, abs=1e-12)
        assert other_aux_loss == pytest.approx(aux_loss, abs=1e-12)
        assert other_grads.keys() == grads.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(other_grads[name], grad, rtol=0, atol=1e-12, msg=name)
