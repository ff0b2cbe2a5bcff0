from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hyper_parallel.distributed.grad_norm import clip_grad_norm
from tests.distributed_world import run_world

SHAPES = {"even": (8, 3), "uneven": (5, 3), "fewer rows than ranks": (1, 4), "vector": (7,)}
EXPERTS = {"experts": (4, 2, 6)}


def _known(kind: str, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(sorted(SHAPES | EXPERTS).index(kind))
    return tuple(torch.randn((SHAPES | EXPERTS)[kind], generator=generator, dtype=dtype) for _ in range(2))


def _plain(kind: str, dtype: torch.dtype = torch.float64) -> nn.Parameter:
    value, grad = _known(kind, dtype)
    parameter = nn.Parameter(value)
    parameter.grad = grad
    return parameter


def _mixed_layouts(max_norm: float | None) -> tuple[float, bool, list[torch.Tensor]]:
    """One parameter of each shape over: HSDP 2x2, a second mesh of all ranks, no mesh; and ones without gradient."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    hsdp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    other = init_device_mesh("cpu", (4,), mesh_dim_names=("efsdp",))

    def placed(kind: str, mesh: object, placements: list) -> nn.Parameter:
        value, grad = (distribute_tensor(x, mesh, placements) for x in _known(kind))
        parameter = nn.Parameter(value)
        parameter.grad = grad
        return parameter

    parameters = [placed(kind, hsdp, [Replicate(), Shard(0)]) for kind in SHAPES]
    parameters += [placed(kind, other, [Shard(0)]) for kind in SHAPES]
    parameters += [placed(kind, hsdp, [Replicate(), Replicate()]) for kind in SHAPES]
    parameters += [_plain(kind) for kind in SHAPES]
    # A gradient that waits for its sum: each rank holds a quarter.
    pending = placed("even", other, [Replicate()])
    pending.grad = DTensor.from_local(pending.grad.to_local() / 4, other, [Partial()])
    parameters.append(pending)
    # Tensor parallel inside of sharding: whole or split on tp, by rows as FSDP lays them out too.
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    parameters += [placed("even", grid, [Shard(0), Replicate()]), placed("even", grid, [Replicate(), Shard(0)])]
    parameters.append(strided_by_rows("even", grid))
    partial = placed("even", grid, [Shard(0), Replicate()])
    share = partial.grad.to_local() * (0.25 if dist.get_rank() % 2 == 0 else 0.75)
    partial.grad = DTensor.from_local(share, grid, [Shard(0), Partial()])
    parameters.append(partial)
    parameters.append(nn.Parameter(torch.ones(2)))
    unused = placed("even", hsdp, [Replicate(), Shard(0)])
    unused.grad = None
    parameters.append(unused)
    norm = clip_grad_norm(parameters, max_norm)
    everywhere = [torch.zeros_like(norm) for _ in range(4)]
    dist.all_gather(everywhere, norm)
    grads = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in parameters[:-2]]
    return norm.item(), type(norm) is torch.Tensor and len({x.item() for x in everywhere}) == 1, grads


def strided_by_rows(kind: str, mesh: object) -> nn.Parameter:
    """Rows split over tp, and each part of them over dp_shard."""
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    rank = dist.get_rank()
    value, grad = (
        DTensor.from_local(
            x.chunk(2)[rank % 2].chunk(2)[rank // 2].clone(), mesh, [_StridedShard(0, split_factor=2), Shard(0)]
        )
        for x in _known(kind)
    )
    parameter = nn.Parameter(value)
    parameter.grad = grad
    return parameter


def _cases() -> list[tuple[float, bool, list[torch.Tensor]]]:
    return [_mixed_layouts(max_norm) for max_norm in (None, 0.5, 1e6)]


def test_every_layout_counts_each_element_once() -> None:
    results = run_world(4, _cases)
    for rank in range(4):
        for max_norm, (norm, plain_and_equal, grads) in zip((None, 0.5, 1e6), results[rank], strict=True):
            reference = [_plain(kind) for _ in range(4) for kind in SHAPES] + [_plain("even") for _ in range(5)]
            expected = torch.nn.utils.clip_grad_norm_(reference, max_norm or float("inf"))
            assert plain_and_equal
            assert norm == pytest.approx(expected.item(), rel=1e-14)
            for grad, parameter in zip(grads, reference, strict=True):
                torch.testing.assert_close(grad, parameter.grad, rtol=1e-14, atol=0)


def _spread_experts(degrees: dict[str, int], experts: list) -> tuple[float, list[torch.Tensor]]:
    """A router and experts as FSDP lays them out over the meshes of a run, with known gradients."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from hyper_parallel.distributed.parallel_dims import ParallelDims

    dims = ParallelDims(**degrees)
    dims.build_mesh("cpu")
    dense = [Shard(0)] if dims.fsdp_mesh.ndim == 1 else [Replicate(), Shard(0)]
    both = DeviceMesh._concatenate([dims.efsdp_mesh, dims.expert_mesh])
    parameters = []
    for kind, mesh, placements in (("uneven", dims.fsdp_mesh, dense), ("experts", both, experts)):
        value, grad = (distribute_tensor(x, mesh, placements) for x in _known(kind))
        parameters.append(nn.Parameter(value))
        parameters[-1].grad = grad
    return clip_grad_norm(parameters, 0.5).item(), [p.grad.full_tensor() for p in parameters]


def _expert_layouts() -> list[tuple[float, list[torch.Tensor]]]:
    from torch.distributed.tensor import Replicate, Shard

    stored = [Shard(2), Shard(0)]
    return [
        _spread_experts({"dp_replicate": 1, "dp_shard": 4, "ep": 2}, stored),
        _spread_experts({"dp_replicate": 1, "dp_shard": 4, "ep": 4}, stored),
        _spread_experts({"dp_replicate": 2, "dp_shard": 2, "ep": 2}, [Replicate(), *stored]),
        _spread_experts({"dp_replicate": 1, "dp_shard": 2, "ep": 2, "tp": 2}, [*stored, Shard(1)]),
    ]


def test_spread_experts_count_once_beside_what_is_not_spread() -> None:
    reference = [_plain("uneven"), _plain("experts")]
    expected = torch.nn.utils.clip_grad_norm_(reference, 0.5)
    for layouts in run_world(4, _expert_layouts):
        for norm, grads in layouts:
            assert norm == pytest.approx(expected.item(), rel=1e-14)
            for grad, parameter in zip(grads, reference, strict=True):
                torch.testing.assert_close(grad, parameter.grad, rtol=1e-14, atol=0)


def _rank_without_gradients() -> float:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0)]))
    if dist.get_rank() == 0:
        parameter.grad = distribute_tensor(torch.full((4,), 3.0), mesh, [Shard(0)], src_data_rank=None)
    return clip_grad_norm([parameter], 1.0).item()


def test_a_rank_without_gradients_still_takes_part() -> None:
    assert run_world(2, _rank_without_gradients, timeout=60) == [pytest.approx(18**0.5)] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_process_agrees_with_torch(dtype: torch.dtype) -> None:
    ours, theirs = ([_plain(kind, dtype) for kind in SHAPES] for _ in range(2))
    norm = clip_grad_norm(ours, 0.7)
    assert norm.dtype == dtype
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(theirs, 0.7))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_bfloat16_gradients_are_measured_in_float32() -> None:
    parameters = [nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16)) for _ in range(3)]
    for i, parameter in enumerate(parameters):
        parameter.grad = torch.linspace(0, 1 + i, 1000).bfloat16()
    exact = torch.cat([p.grad for p in parameters]).double().norm()
    norm = clip_grad_norm(parameters, 1.0)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(exact.item(), rel=1e-6)
    assert torch.cat([p.grad for p in parameters]).double().norm().item() == pytest.approx(1.0, rel=5e-3)


def test_bfloat16_matrices_are_as_exact_as_the_roundings_of_their_rows_cancel_out() -> None:
    parameters = [nn.Parameter(torch.zeros(512, 64, dtype=torch.bfloat16)) for _ in range(3)]
    for parameter in parameters:
        parameter.grad = torch.randn(512, 64, dtype=torch.bfloat16)
    exact = torch.cat([p.grad for p in parameters]).double().norm().item()
    norm = clip_grad_norm(parameters, None)
    assert norm.dtype == torch.float32
    # One bfloat16 rounding of the norm could be off by 2^-9 = 2e-3; over 1,536 rows that falls by their root.
    assert norm.item() == pytest.approx(exact, rel=2e-4)


def test_nothing_to_measure_is_zero() -> None:
    assert clip_grad_norm([], 1.0).item() == 0.0
    assert clip_grad_norm([nn.Parameter(torch.ones(2))], 1.0).item() == 0.0


def test_without_a_maximum_nothing_is_scaled() -> None:
    parameter = _plain("even")
    before = parameter.grad.clone()
    clip_grad_norm([parameter], None)
    assert torch.equal(parameter.grad, before)


def test_a_norm_that_is_not_finite_is_reported() -> None:
    parameter = _plain("even")
    parameter.grad[0, 0] = float("inf")
    assert clip_grad_norm([parameter], 1.0).item() == float("inf")
