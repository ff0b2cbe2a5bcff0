"""The replacements that ship, against the modules of transformers that they replace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.qwen3_moe import modeling_qwen3_moe as theirs

from hyper_parallel.models.common.documents import WholeRows
from hyper_parallel.models.qwen3_moe.adapter import replacements
from hyper_parallel.protocols.module_replacement import ReplacementContext
from tests.models.reference import transformers_model, widened

ALONE = ReplacementContext()


@pytest.fixture
def model() -> nn.Module:
    return transformers_model("qwen3_moe", torch.float64)


def gradients(module: nn.Module, inputs: list[torch.Tensor], *others: Any, **kwargs: Any) -> list[torch.Tensor]:
    """The output of `module`, and the gradients of its inputs and parameters, for one random gradient."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    output = module(*leaves, *others, **kwargs)
    output = output[0] if isinstance(output, tuple) else output
    wanted = [*leaves, *(p for p in module.parameters() if p.requires_grad)]
    torch.manual_seed(1)
    return [output, *torch.autograd.grad(output, wanted, torch.randn_like(output))]


def check_equal(old: nn.Module, new: nn.Module, *arguments: Any, **kwargs: Any) -> None:
    assert [name for name, _ in new.named_parameters()] == [name for name, _ in old.named_parameters()]
    for expected, got in zip(gradients(old, *arguments, **kwargs), gradients(new, *arguments, **kwargs), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-11)


def hidden(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def test_rms_norm(model: Any) -> None:
    norm = model.model.layers[0].input_layernorm
    with widened(model):
        check_equal(norm, replacements.replace_rms_norm(norm, "", ALONE), [hidden(2, 5, 32)])


def test_experts(model: Any) -> None:
    experts = model.model.layers[1].mlp.experts
    assert type(experts) is theirs.Qwen3MoeExperts
    index = torch.tensor([[0, 3], [3, 5], [0, 1], [7, 3], [5, 0]])  # experts 2, 4 and 6 get nothing
    weights = hidden(5, 2).softmax(-1)
    new = replacements.replace_experts(experts, "", ALONE)
    check_equal(experts, new, [hidden(5, 32)], index, weights)


def test_attention_of_whole_rows_is_that_of_sdpa(model: Any) -> None:
    attention = model.model.layers[0].self_attn
    assert attention.config._attn_implementation == "sdpa"
    positions = torch.arange(9)[None].expand(2, 9)
    rope = tuple(x.double() for x in model.model.rotary_emb(hidden(2, 9, 32), positions))
    with widened(model):
        check_equal(
            attention,
            replacements.replace_attention(attention, "", ALONE),
            [hidden(2, 9, 32)],
            rope,
            attention_mask=None,
        )


def test_attention_within_documents_is_that_of_each(model: Any) -> None:
    """A row of two documents, against transformers' attention on one after the other."""
    attention = replacements.replace_attention(model.model.layers[0].self_attn, "", ALONE)
    x_BTC = hidden(1, 9, 32)
    rows = WholeRows.Config().build()(torch.zeros(1, 9, dtype=torch.int64), None, [0, 4, 9], None)
    rope = tuple(x.double() for x in model.model.rotary_emb(x_BTC, rows.position_ids_BT))
    with widened(model):
        packed = attention(x_BTC, rope, None, documents=rows.documents)[0]
        for part in (slice(0, 4), slice(4, 9)):
            alone = model.model.layers[0].self_attn(
                x_BTC[:, part], tuple(x[:, part] for x in rope), attention_mask=None
            )[0]
            torch.testing.assert_close(packed[:, part], alone, rtol=0, atol=1e-11)
