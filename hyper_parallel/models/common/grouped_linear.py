"""A different matrix for each group of consecutive rows."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor

_GROUPED_MM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_GROUPED_MM_ALIGNMENT_BYTES = 16
_NARROW_CPU_ROWS = 32


def grouped_linear(x_ND: torch.Tensor, weight_EFD: torch.Tensor, rows_E: torch.Tensor) -> torch.Tensor:
    """Multiplies the first `rows_E[0]` rows by `weight_EFD[0]^T`, the next by the second, and so on: [N, F].

    `rows_E` is int64 and sums to N. A group without rows gets a zero gradient.
    """
    if grouped_mm_applies(x_ND, weight_EFD):
        ends_E = rows_E.cumsum(0, dtype=torch.int32)
        return F.grouped_mm(x_ND, weight_EFD.transpose(-2, -1), offs=ends_E)
    return torch.ops.hyper_parallel.grouped_linear_loop(x_ND, weight_EFD, rows_E)


def grouped_mm_applies(x_ND: torch.Tensor, weight_EFD: torch.Tensor) -> bool:
    """Whether `F.grouped_mm` takes this: its dtypes, all rows whole multiples of 16 bytes, and, where there are shapes
    alone, for whose rule there is no other, bfloat16."""
    if x_ND.dtype not in _GROUPED_MM_DTYPES or x_ND.dtype != weight_EFD.dtype:
        return False
    if has_shape_alone(x_ND) and x_ND.dtype != torch.bfloat16:
        return False
    return all(size * x_ND.element_size() % _GROUPED_MM_ALIGNMENT_BYTES == 0 for size in weight_EFD.shape[1:])


def preferred_row_multiple(x_ND: torch.Tensor) -> int:
    """What the rows of each group should be a multiple of, for speed.

    Products of narrow types on a CPU are oneDNN's, which builds a kernel for each shape that it has not met, in about
    1 ms and 1 MiB. Groups change their size with every batch; rounded up, they have few sizes. Compiled, the number of
    padding rows would have to be known.
    """
    is_narrow = x_ND.is_cpu and x_ND.element_size() < 4
    return _NARROW_CPU_ROWS if is_narrow and not has_shape_alone(x_ND) else 1


def has_shape_alone(x: torch.Tensor) -> bool:
    """Whether there are no numbers: under torch.compile, and on fake tensors."""
    return torch.compiler.is_compiling() or isinstance(x, FakeTensor)


# An operator of our own, because the loop depends on the counts: torch.compile and fake tensors then see one node.
@torch.library.custom_op("hyper_parallel::grouped_linear_loop", mutates_args=())
def grouped_linear_loop(x_ND: torch.Tensor, weight_EFD: torch.Tensor, rows_E: torch.Tensor) -> torch.Tensor:
    """The same, one matrix product per group."""
    out_NF = x_ND.new_empty(x_ND.shape[0], weight_EFD.shape[1])
    counts = rows_E.tolist()
    for x, weight, out in zip(x_ND.split(counts), weight_EFD, out_NF.split(counts), strict=True):
        torch.mm(x, weight.t(), out=out)
    return out_NF


@grouped_linear_loop.register_fake
def _(x_ND: torch.Tensor, weight_EFD: torch.Tensor, rows_E: torch.Tensor) -> torch.Tensor:
    return x_ND.new_empty(x_ND.shape[0], weight_EFD.shape[1])


@torch.library.custom_op("hyper_parallel::grouped_linear_loop_backward", mutates_args=())
def _grouped_linear_loop_backward(
    grad_NF: torch.Tensor, x_ND: torch.Tensor, weight_EFD: torch.Tensor, rows_E: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    grad_x_ND, grad_weight_EFD = torch.empty_like(x_ND), torch.empty_like(weight_EFD)
    counts = rows_E.tolist()
    groups = zip(
        grad_NF.split(counts), x_ND.split(counts), weight_EFD, grad_x_ND.split(counts), grad_weight_EFD, strict=True
    )
    for grad, x, weight, grad_x, grad_weight in groups:
        torch.mm(grad, weight, out=grad_x)
        torch.mm(grad.t(), x, out=grad_weight)
    return grad_x_ND, grad_weight_EFD


@_grouped_linear_loop_backward.register_fake
def _(
    grad_NF: torch.Tensor, x_ND: torch.Tensor, weight_EFD: torch.Tensor, rows_E: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x_ND), torch.empty_like(weight_EFD)


def _save(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad_NF: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    grads = torch.ops.hyper_parallel.grouped_linear_loop_backward(grad_NF.contiguous(), *ctx.saved_tensors)
    return *grads, None


grouped_linear_loop.register_autograd(_backward, setup_context=_save)
