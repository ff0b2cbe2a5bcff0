from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hyper_parallel.components.loss import (
    AutoCELoss,
    BaseLoss,
    CausalLMLoss,
    ChunkedCELoss,
    CrossEntropyLoss,
)
from tests.distributed_world import run_world

B, T, D, V = 2, 9, 8, 53


def case(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, nn.Linear, torch.Tensor]:
    """Hidden states, head and labels: one row half masked, one token of each edge masked."""
    torch.manual_seed(3)
    hidden_BTD = torch.randn(B, T, D).to(dtype).requires_grad_()
    head = nn.Linear(D, V, bias=False).to(dtype)
    labels_BT = torch.randint(V, (B, T))
    labels_BT[0, :5] = -100
    labels_BT[1, -1] = -100
    return hidden_BTD, head, labels_BT


def by_hand(hidden_BTD: torch.Tensor, weight_VD: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    """The definition, token by token."""
    total = hidden_BTD.new_zeros(())
    for b in range(B):
        for t in range(T):
            if labels_BT[b, t] != -100:
                logits_V = weight_VD @ hidden_BTD[b, t]
                total = total + logits_V.exp().sum().log() - logits_V[labels_BT[b, t]]
    return total


def gradients(loss: BaseLoss, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    hidden_BTD, head, labels_BT = case(dtype)
    total = loss(hidden_BTD, head, labels_BT)
    (total * scale).backward()
    return [total.detach(), hidden_BTD.grad, head.weight.grad]


IMPLEMENTATIONS = {
    "whole": CrossEntropyLoss.Config(),
    "causal": CausalLMLoss.Config(),
    "chunks of 1": ChunkedCELoss.Config(chunk_tokens=1),
    "uneven chunks": ChunkedCELoss.Config(chunk_tokens=5),
    "one chunk": ChunkedCELoss.Config(),
    "auto": AutoCELoss.Config(),
}


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_is_the_sum_over_valid_tokens_with_its_gradients(name: str) -> None:
    hidden_BTD, head, labels_BT = case()
    expected = by_hand(hidden_BTD, head.weight, labels_BT)
    (expected / 7).backward()
    total, grad_hidden, grad_weight = gradients(IMPLEMENTATIONS[name].build(vocab_size=V), 1 / 7)
    assert (total - expected).abs() < 1e-12
    assert (grad_hidden - hidden_BTD.grad).abs().max() < 1e-14
    assert (grad_weight - head.weight.grad).abs().max() < 1e-14
    assert grad_hidden[0, :5].abs().max() == 0


@pytest.mark.parametrize("name", ["whole", "uneven chunks"])
def test_no_valid_token_is_zero_with_zero_gradients(name: str) -> None:
    hidden_BTD, head, labels_BT = case(torch.float32)
    total = IMPLEMENTATIONS[name].build(vocab_size=V)(hidden_BTD, head, torch.full_like(labels_BT, -100))
    total.backward()
    assert total == 0
    assert hidden_BTD.grad.count_nonzero() == 0 and head.weight.grad.count_nonzero() == 0


@pytest.mark.parametrize("name", ["whole", "uneven chunks"])
@pytest.mark.parametrize(
    ("dtype", "of_loss"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float64, torch.float64)],
)
def test_type_of_the_loss_and_of_gradients(name: str, dtype: torch.dtype, of_loss: torch.dtype) -> None:
    total, grad_hidden, grad_weight = gradients(IMPLEMENTATIONS[name].build(vocab_size=V), dtype=dtype)
    assert (total.dtype, grad_hidden.dtype, grad_weight.dtype) == (of_loss, dtype, dtype)


def test_chunks_in_bfloat16_lose_no_more_than_the_whole() -> None:
    # Reference: the same rounded inputs in float64.
    torch.manual_seed(0)
    # All chunks pull the same way, so a sum kept in bfloat16 would stop growing long before the last.
    hidden, head = torch.rand(1, 4000, D).bfloat16(), nn.Linear(D, V, bias=False).bfloat16()
    labels = torch.zeros(1, 4000, dtype=torch.int64)

    def run(loss: BaseLoss, dtype: torch.dtype) -> list[torch.Tensor]:
        h = hidden.clone().to(dtype).requires_grad_()
        weight = nn.Linear(D, V, bias=False, dtype=dtype)
        weight.load_state_dict(head.state_dict())
        total = loss(h, weight, labels)
        (total / 4000).backward()
        return [total.double(), h.grad.double(), weight.weight.grad.double()]

    exact = run(CrossEntropyLoss.Config().build(vocab_size=V), torch.float64)
    whole = run(CrossEntropyLoss.Config().build(vocab_size=V), torch.bfloat16)
    chunked = run(ChunkedCELoss.Config(chunk_tokens=4).build(vocab_size=V), torch.bfloat16)
    for a, b, c in zip(exact, whole, chunked, strict=True):
        assert (c - a).norm() <= 2 * (b - a).norm() + 1e-6 * a.norm()


def test_token_weighted_and_rank_average_from_the_sums() -> None:
    # Logits that make the loss of every token exactly 2 (3 tokens) and 4 (1 token).
    class Logits(nn.Module):
        def forward(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
            return hidden_BTD

    def sum_of(token_loss: float, labels: list[int]) -> tuple[float, int]:
        first = -torch.log(torch.expm1(torch.tensor(token_loss, dtype=torch.float64)))
        logits = torch.stack([first, torch.zeros((), dtype=torch.float64)]).expand(1, len(labels), 2)
        labels_BT = torch.tensor([labels])
        total = CrossEntropyLoss.Config().build(vocab_size=2)(logits, Logits(), labels_BT)
        return total.item(), int((labels_BT != -100).sum())

    (a, n), (b, m), (c, k) = sum_of(2.0, [0, 0, 0]), sum_of(4.0, [0, -100, -100]), sum_of(9.0, [-100])
    assert (a, b, c) == pytest.approx((6.0, 4.0, 0.0))
    assert (a + b + c) / (n + m + k) == pytest.approx(2.5)
    assert (a / n + b / m) / 2 == pytest.approx(3.0)


class CountMatmuls(TorchDispatchMode):
    matmuls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.matmuls += func._schema.name in ("aten::mm", "aten::addmm", "aten::addmm_")
        return func(*args, **(kwargs or {}))


def test_gradients_are_not_computed_where_none_is_wanted() -> None:
    loss = ChunkedCELoss.Config(chunk_tokens=4).build(vocab_size=V)
    hidden_BTD, head, labels_BT = case()
    head.requires_grad_(False)
    loss(hidden_BTD, head, labels_BT).backward()
    assert head.weight.grad is None
    _, expected, _ = gradients(CrossEntropyLoss.Config().build(vocab_size=V))
    assert (hidden_BTD.grad - expected).abs().max() < 1e-14

    hidden_BTD, head, labels_BT = case()
    loss(hidden_BTD.detach(), head, labels_BT).backward()
    assert head.weight.grad is not None

    with torch.no_grad(), CountMatmuls() as count:
        assert not loss(*case()).requires_grad
    assert count.matmuls == -(-B * T // 4)  # the logits of each chunk, and nothing else


def test_a_graph_that_is_kept_gives_the_same_gradients_again() -> None:
    """A pipeline takes gradients of inputs and of weights in two passes."""
    loss = ChunkedCELoss.Config().build(vocab_size=V)
    hidden_BTD, head, labels_BT = case()
    total = loss(hidden_BTD, head, labels_BT) / 7
    (first,) = torch.autograd.grad(total, hidden_BTD, retain_graph=True)
    again, weight = torch.autograd.grad(total, (hidden_BTD, head.weight))
    whole = CrossEntropyLoss.Config().build(vocab_size=V)(hidden_BTD, head, labels_BT) / 7
    expected, expected_weight = torch.autograd.grad(whole, (hidden_BTD, head.weight))
    for gradient in (first, again):
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(weight, expected_weight, rtol=0, atol=1e-12)


def test_a_second_derivative_is_refused_not_wrong() -> None:
    loss = ChunkedCELoss.Config().build(vocab_size=V)
    hidden_BTD, head, labels_BT = case()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss(hidden_BTD, head, labels_BT), hidden_BTD, create_graph=True)


def test_a_head_with_bias_is_refused() -> None:
    hidden_BTD, _, labels_BT = case()
    with pytest.raises(ValueError, match="use CrossEntropyLoss for a head with bias"):
        ChunkedCELoss.Config().build(vocab_size=V)(hidden_BTD, nn.Linear(D, V).double(), labels_BT)


def test_chunks_keep_to_their_bytes() -> None:
    cpu, accelerator = torch.device("cpu"), torch.device("meta")
    half_a_mib = ChunkedCELoss.Config(chunk_bytes=2**19).build(vocab_size=1024)
    assert half_a_mib.chunk_tokens(cpu) == half_a_mib.chunk_tokens(accelerator) == 128
    large = ChunkedCELoss.Config(chunk_bytes=2**22).build(vocab_size=1024)
    assert large.chunk_tokens(accelerator) == 1024
    assert large.chunk_tokens(cpu) == 256  # more logits would not stay in the caches
    assert ChunkedCELoss.Config(chunk_bytes=1).build(vocab_size=1024).chunk_tokens(cpu) == 1
    assert ChunkedCELoss.Config(chunk_bytes=1, chunk_tokens=700).build(vocab_size=1024).chunk_tokens(cpu) == 700


def test_large_vocabularies_are_chunked_by_default() -> None:
    assert type(AutoCELoss.Config().build(vocab_size=151_936).implementation) is ChunkedCELoss
    assert type(AutoCELoss.Config().build(vocab_size=4095).implementation) is CrossEntropyLoss
    assert type(AutoCELoss.Config(chunk_from_vocab=4095).build(vocab_size=4095).implementation) is ChunkedCELoss


def test_impossible_settings() -> None:
    assert [f.path for f in ChunkedCELoss.Config(chunk_tokens=0, chunk_bytes=0).faults()] == [
        "chunk_tokens",
        "chunk_bytes",
    ]
    assert [f.path for f in AutoCELoss.Config(chunk_from_vocab=0).faults()] == ["chunk_from_vocab"]


def test_large_vocabulary_in_float64() -> None:
    torch.manual_seed(0)
    weight = torch.randn(151_936, 8, dtype=torch.float64)
    hidden = torch.randn(1, 48, 8, dtype=torch.float64)
    labels = torch.randint(151_936, (1, 48))
    results = []
    for config in (CrossEntropyLoss.Config(), ChunkedCELoss.Config(chunk_tokens=20)):
        head = nn.Linear(1, 1, bias=False)
        head.weight = nn.Parameter(weight.clone())
        h = hidden.clone().requires_grad_()
        total = config.build(vocab_size=151_936)(h, head, labels)
        (total / 48).backward()
        results.append((total.detach(), h.grad, head.weight.grad))
    for a, b in zip(*results, strict=True):
        assert (a - b).abs().max() < 1e-10


class Tiny(nn.Module):
    """Embedding tied to the head or not, in the root's own group, and the loss inside the root's forward."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.block = nn.Linear(D, D)
        self.head = nn.Linear(D, V, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids_BT: torch.Tensor, labels_BT: torch.Tensor, loss: BaseLoss) -> torch.Tensor:
        return loss(self.block(self.embed(ids_BT)), self.head, labels_BT)


def tiny_gradients(loss: BaseLoss, tied: bool, rank: int, ranks: int, mixed: bool = False) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Tiny(tied) if mixed else Tiny(tied).double()
    ids_BT = torch.arange(4 * T).remainder(V).view(4, T)
    labels_BT = ids_BT.roll(-1, 1).where(ids_BT % 3 > 0, -100)
    if ranks > 1:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh("cpu", (ranks,))
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
        for module in (model.block, model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    rows = slice(rank * 4 // ranks, (rank + 1) * 4 // ranks)
    (model(ids_BT[rows], labels_BT[rows], loss) / 11).backward()
    return {n: p.grad.full_tensor() if ranks > 1 else p.grad for n, p in model.named_parameters()}


def sharded_cases() -> list[dict[str, torch.Tensor]]:
    import torch.distributed as dist

    place = dist.get_rank(), dist.get_world_size()
    chunked = ChunkedCELoss.Config(chunk_tokens=5).build(vocab_size=V)
    whole = CrossEntropyLoss.Config().build(vocab_size=V)
    exact = [tiny_gradients(chunked, tied, *place) for tied in (False, True)]
    return [
        *exact,
        tiny_gradients(chunked, False, *place, mixed=True),
        tiny_gradients(whole, False, *place, mixed=True),
    ]


def test_chunks_under_fsdp() -> None:
    whole = CrossEntropyLoss.Config().build(vocab_size=V)
    for untied, tied, chunked_mixed, whole_mixed in run_world(2, sharded_cases):
        for got, is_tied in ((untied, False), (tied, True)):
            for name, expected in tiny_gradients(whole, is_tied, 0, 1).items():
                assert (got[name] - expected).abs().max() < 1e-13, name
        for name, expected in whole_mixed.items():
            assert chunked_mixed[name].dtype == torch.float32
            assert (chunked_mixed[name] - expected).norm() < 0.01 * expected.norm(), name


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/status is Linux's")
def test_chunks_peak_under_a_quarter_of_the_whole() -> None:
    def peak(name: str) -> int:
        script = Path(__file__).with_name("loss_peak_memory.py")
        command = [sys.executable, str(script), name, "151936", "4096", "64"]
        root = str(Path(__file__).parents[2])
        done = subprocess.run(command, cwd=root, env={"PYTHONPATH": root}, capture_output=True, text=True, check=True)
        return int(done.stdout)

    chunked, whole = peak("ChunkedCELoss"), peak("CrossEntropyLoss")
    print(f"peak of ChunkedCELoss {chunked / 2**30:.2f} GiB, of CrossEntropyLoss {whole / 2**30:.2f} GiB")
    assert whole > 3 * 4 * 151_936 * 4096 * 0.9  # logits, their logarithms and their gradient: it was measured at all
    assert chunked < whole / 4
