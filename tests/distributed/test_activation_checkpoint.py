"""What each mode computes again, what it keeps, and where."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from hyper_parallel.config.sections import ActivationCheckpointConfig, CompileConfig
from hyper_parallel.distributed import activation_swap
from hyper_parallel.distributed.activation_checkpoint import activation_checkpoint_faults, apply_activation_checkpoint
from hyper_parallel.distributed.activation_swap import swapping
from hyper_parallel.distributed.compile import apply_compile
from hyper_parallel.models.qwen3_moe import create_model_spec
from hyper_parallel.protocols.model import BaseModel
from tests.trainer.runs import TINY, tiny_config

LAYERS = 4
WATCHED = ("mm", "_scaled_dot_product_flash_attention_for_cpu", "grouped_linear_loop", "topk")


class CountOperators(TorchDispatchMode):
    """Counts what is computed inside, by the operator's name."""

    def __enter__(self) -> Counter[str]:
        super().__enter__()
        self.counts: Counter[str] = Counter()
        return self.counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._schema.name.partition("::")[2]] += 1
        return func(*args, **(kwargs or {}))


def model(compile_backend: str | None = None, **options: Any) -> BaseModel:
    """Four layers with experts, in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        built = create_model_spec(**TINY | {"num_hidden_layers": LAYERS, "mlp_only_layers": ()}).model.build()
    finally:
        torch.set_default_dtype(before)
    built.init_weights(seed=3)
    if compile_backend is not None:
        apply_compile(built, CompileConfig(enable=True, backend=compile_backend), options.get("memory_budget"))
    apply_activation_checkpoint(built, ActivationCheckpointConfig(**options))
    return built


def loss_of(built: BaseModel) -> torch.Tensor:
    ids = torch.arange(64).view(2, 32)
    loss = built(ids, labels_BT=ids, loss_fn=lambda hidden, head, labels: hidden.square().sum()).loss_sum
    assert loss is not None
    return loss


def counted_again(**options: Any) -> dict[str, int]:
    """How often the backward pass runs each watched operator, above what it does without recompute."""
    counts = []
    for config in ({}, options):
        loss = loss_of(model(**config))
        with CountOperators() as counter:
            loss.backward()
        counts.append(counter)
    return {name: counts[1][name] - counts[0][name] for name in WATCHED}


# A layer has four projections and a router; experts are two grouped products.
ALL = dict(zip(WATCHED, (5, 1, 2, 1), strict=True))


@pytest.mark.parametrize(
    ("options", "blocks", "kept"),
    [
        ({"mode": "full"}, 4, ()),
        ({"mode": "full", "every_n_layers": 3}, 2, ()),
        ({"mode": "full", "every_n_layers": 9}, 1, ()),
        ({"mode": "selective"}, 4, ("mm", "_scaled_dot_product_flash_attention_for_cpu", "grouped_linear_loop")),
        ({"mode": "selective", "save_ops": ("matmul",)}, 4, ("mm", "grouped_linear_loop")),
        ({"mode": "selective", "save_ops": ("attention", "aten.topk.default"), "every_n_layers": 2}, 2, (
            "_scaled_dot_product_flash_attention_for_cpu",
            "topk",
        )),
    ],
)  # fmt: skip
def test_the_backward_pass_runs_again_what_is_not_kept(
    options: dict[str, Any], blocks: int, kept: tuple[str, ...]
) -> None:
    assert counted_again(**options) == {name: 0 if name in kept else blocks * ALL[name] for name in WATCHED}


def kept_bytes(built: BaseModel) -> int:
    """Bytes of what autograd saves of blocks, parameters apart."""
    parameters = {p.untyped_storage().data_ptr() for p in built.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = loss_of(built)
    loss.backward()
    return sum(saved.values())


def test_a_smaller_budget_keeps_less_and_computes_the_same() -> None:
    models = [model("aot_eager", mode="memory_budget", memory_budget=share) for share in (1.0, 0.5, 0.1)]
    whole, half, least = (kept_bytes(built) for built in models)
    assert half < 0.7 * whole and least < 0.7 * half
    plain = model()
    loss_of(plain).backward()
    for built in models:
        for a, b in zip(plain.parameters(), built.parameters(), strict=True):
            torch.testing.assert_close(b.grad, a.grad, rtol=0, atol=1e-12)


def swapped_storages(monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[BaseModel, list[Any], torch.Tensor]:
    """A model behind its forward, weak references to each storage that was moved, and the loss."""
    moved: list[StorageWeakRef] = []

    class Recorded(activation_swap._HostCopy):
        def __init__(self, storage: torch.UntypedStorage) -> None:
            moved.append(StorageWeakRef(storage))
            super().__init__(storage)

    monkeypatch.setattr(activation_swap, "_HostCopy", Recorded)
    built = model(swap=True, **options)
    return built, moved, loss_of(built)


def test_swap_moves_each_memory_once_and_no_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    built, moved, loss = swapped_storages(monkeypatch)
    assert len(set(moved)) == len(moved) > 10 * LAYERS
    assert not set(moved) & {StorageWeakRef(p.untyped_storage()) for p in built.parameters()}
    # Nothing on the device is held for the backward pass by any block.
    assert [reference for reference in moved if not reference.expired()] == []
    loss.backward()


def test_full_recompute_swaps_the_inputs_of_blocks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    _, moved, loss = swapped_storages(monkeypatch, mode="full")
    assert len(moved) == LAYERS
    loss.backward()


class ChangesInPlace(nn.Module):
    """Saves a tensor, changes it, and saves it again: without swap autograd refuses the backward pass."""

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        y = x * 2
        first = y * gate
        y.add_(1)
        return first + (y[:, :2] * gate[:, :2]).sum() + (y.t() @ y).sum()


def test_a_swapped_tensor_has_the_values_and_strides_that_were_saved() -> None:
    block = ChangesInPlace()
    x, gate = (torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    swapping(block)(x, gate).sum().backward()
    grads = x.grad, gate.grad
    x, gate = (tensor.detach().requires_grad_() for tensor in (x, gate))
    y = x * 2
    again = y + 1
    (y * gate + (again[:, :2] * gate[:, :2]).sum() + (again.t() @ again).sum()).sum().backward()
    torch.testing.assert_close(grads, (x.grad, gate.grad), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"every_n_layers": 0, "mode": "full"}, "every_n_layers: 0 is below 1; give 1 or more"),
        (
            {"every_n_layers": 2},
            "every_n_layers: 2, but mode is none, which has no use for it; leave it out, or set mode full or selective",
        ),
        (
            {"mode": "full", "save_ops": ("matmul",)},
            "save_ops: ('matmul',), but mode is full, which has no use for it; leave it out, or set mode selective",
        ),
        (
            {"mode": "selective", "save_ops": ()},
            "save_ops: empty: everything is computed again; name what to keep, or set mode full",
        ),
        (
            {"mode": "memory_budget"},
            "memory_budget: None, but mode is memory_budget; give a share above 0 and at most 1",
        ),
        ({"mode": "memory_budget", "memory_budget": 1.5}, "memory_budget: 1.5 is above 1; give 1 or less"),
        (
            {"mode": "memory_budget", "memory_budget": 0.0},
            "memory_budget: 0.0 is not above 0 and finite; give a positive number",
        ),
        (
            {"memory_budget": 0.5},
            "memory_budget: 0.5, but mode is none, which has no use for it; leave it out, or set mode memory_budget",
        ),
    ],
)
def test_a_section_that_says_what_cannot_be_is_refused(options: dict[str, Any], expected: str) -> None:
    assert list(map(str, ActivationCheckpointConfig(**options).faults())) == [expected]


@pytest.mark.parametrize(
    ("options", "compile", "expected"),
    [
        (
            {"mode": "memory_budget", "memory_budget": 0.5},
            CompileConfig(),
            "activation_checkpoint.mode: memory_budget, but compile.enable is False: torch.compile is what keeps to a "
            "budget; set compile.enable True, or mode full or selective",
        ),
        (
            {"mode": "memory_budget", "memory_budget": 0.5},
            CompileConfig(enable=True, backend="eager"),
            "compile.backend: eager does not keep to activation_checkpoint.memory_budget 0.5; name one that does: "
            "inductor, aot_eager",
        ),
        (
            {"mode": "selective", "save_ops": ("matmul", "aten.topk", "aten.nothing.default", "aten.add_.Tensor")},
            CompileConfig(),
            "activation_checkpoint.save_ops: aten.topk is no operator of torch; give a kind (matmul, attention, "
            "collective), or namespace.name.overload as in aten.topk.default\n"
            "activation_checkpoint.save_ops: aten.nothing.default is no operator of torch; give a kind (matmul, "
            "attention, collective), or namespace.name.overload as in aten.topk.default\n"
            "activation_checkpoint.save_ops: aten.add_.Tensor writes into its arguments, so there is no result of it "
            "to keep; leave it out",
        ),
    ],
)
def test_what_only_torch_can_tell_is_refused_at_parse(
    options: dict[str, Any], compile: CompileConfig, expected: str
) -> None:
    section = ActivationCheckpointConfig(**options)
    faults = list(activation_checkpoint_faults(section, compile))
    assert "\n".join(map(str, faults)) == expected
    config = tiny_config("unused", steps=1)
    config.activation_checkpoint, config.compile = section, compile
    assert list(config.cross_faults(1)) == faults
