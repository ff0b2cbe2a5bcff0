"""Logits, losses and gradients against transformers, from the same weights."""

from __future__ import annotations

import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hyper_parallel.models import load_hf
from hyper_parallel.models.common.attention import causal_attention
from hyper_parallel.models.common.decoder import Decoder
from tests.models.reference import transformers_model, widened

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "moe": ("qwen3_moe", {}),
    "moe_tied": ("qwen3_moe", {"tie_word_embeddings": True}),
    "moe_norm_topk_prob": ("qwen3_moe", {"norm_topk_prob": True}),
    "moe_mlp_only_layers": ("qwen3_moe", {"mlp_only_layers": [1]}),
    "moe_decoder_sparse_step": ("qwen3_moe", {"decoder_sparse_step": 2, "num_hidden_layers": 4}),
    "moe_bias": ("qwen3_moe", {"attention_bias": True}),
    "moe_odd_sizes": ("qwen3_moe", {"hidden_size": 30, "moe_intermediate_size": 21}),
    "dense": ("qwen3", {}),
    "dense_tied": ("qwen3", {"tie_word_embeddings": True}),
    "dense_heads_4_1": ("qwen3", {"num_key_value_heads": 1}),
    "dense_heads_4_4": ("qwen3", {"num_key_value_heads": 4}),
    "rope_linear": ("qwen3", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0}}),
    "rope_dynamic": ("qwen3", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    "rope_yarn": ("qwen3", {"rope_parameters": YARN}),
    "rope_yarn_mscale": (
        "qwen3",
        {
            "rope_parameters": {
                **YARN,
                "beta_fast": 8.0,
                "beta_slow": 2.0,
                "mscale": 0.7,
                "mscale_all_dim": 0.4,
                "truncate": False,
            }
        },
    ),
    "rope_yarn_attention_factor": ("qwen3", {"rope_parameters": {**YARN, "attention_factor": 1.3}}),
    "rope_llama3": (
        "qwen3",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
}


def sum_cross_entropy(hidden_BTD: torch.Tensor, lm_head: Any, labels_BT: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(lm_head(hidden_BTD).flatten(0, 1), labels_BT.flatten(), reduction="sum")


def tokens(rows: int = 1, length: int = 48) -> torch.Tensor:
    return torch.randint(0, 64, (rows, length), generator=torch.Generator().manual_seed(5))


def pair(case: str, folder: Path, dtype: torch.dtype) -> tuple[Decoder, Any]:
    family, changes = CASES[case]
    theirs = transformers_model(family, dtype, **changes)
    theirs.save_pretrained(folder)
    return load_hf(folder, dtype), theirs


def unrounded(model: Decoder) -> Decoder:
    """`model` with the same weights, rounding nothing to float32."""
    config = copy.deepcopy(model.config)
    config.float64_rounding = "none"
    with torch.device("meta"):
        other = config.build()
    other.load_state_dict(model.state_dict(), assign=True)
    return other


@pytest.mark.parametrize("case", CASES)
def test_float64_logits_and_losses_of_transformers_as_it_is(case: str, tmp_path: Path) -> None:
    ours, theirs = pair(case, tmp_path, torch.float64)
    input_ids, labels = tokens(), tokens().roll(-1, 1)
    expected = theirs(input_ids, use_cache=False)
    assert (ours(input_ids).logits - expected.logits).abs().max() < 1e-9
    output = ours(input_ids, labels_BT=labels, loss_fn=sum_cross_entropy)
    loss = F.cross_entropy(expected.logits[0], labels[0], reduction="sum").item()
    assert output.loss_sum.item() == pytest.approx(loss, abs=1e-9)
    if ours.balance_coefficient:
        assert output.aux_loss_sum.item() == pytest.approx(0.01 * expected.aux_loss.item(), rel=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_float64_logits_losses_and_gradients(case: str, tmp_path: Path) -> None:
    ours, theirs = pair(case, tmp_path, torch.float64)
    ours = unrounded(ours)
    input_ids, labels = tokens(), tokens().roll(-1, 1)
    logits = ours(input_ids).logits
    with widened(theirs):
        expected = theirs(input_ids, use_cache=False)
        assert (logits - expected.logits).abs().max() < 1e-9
        assert expected.logits.abs().max() > 0.5, "the model's output is too small for the tolerance to mean anything"

        theirs_loss = F.cross_entropy(expected.logits[0], labels[0], reduction="sum")
        if ours.balance_coefficient:
            theirs_loss = theirs_loss + 0.01 * expected.aux_loss.double()
        theirs_loss.backward()
    output = ours(input_ids, labels_BT=labels, loss_fn=sum_cross_entropy)
    loss = output.loss_sum if output.aux_loss_sum is None else output.loss_sum + output.aux_loss_sum
    # The reference sums the balance loss in float32, which is worth 1e-9 at this coefficient.
    assert loss.item() == pytest.approx(theirs_loss.item(), abs=2e-9, rel=1e-12)
    if ours.balance_coefficient:
        assert output.aux_loss_sum.item() == pytest.approx(0.01 * expected.aux_loss.item(), rel=1e-6)
    loss.backward()

    from hyper_parallel.models.common.state_dict_adapter import DecoderStateDictAdapter

    adapter = DecoderStateDictAdapter(ours.config)
    gradients = {n: g for name, p in ours.named_parameters() for n, g in adapter.to_hf(name, p.grad)}
    for name, gradient in _hub_layout(theirs).items():
        assert (gradients.pop(name) - gradient).abs().max() < 1e-9 * max(1, gradient.abs().max()), name
    assert not gradients


@pytest.mark.parametrize("case", CASES)
def test_float32_logits(case: str, tmp_path: Path) -> None:
    ours, theirs = pair(case, tmp_path, torch.float32)
    input_ids = tokens(2)
    with torch.no_grad():
        difference = ours(input_ids).logits - theirs(input_ids).logits
    assert difference.abs().max() < 2e-5


def test_the_balance_loss_is_that_of_each_row(tmp_path: Path) -> None:
    ours, theirs = pair("moe", tmp_path, torch.float32)
    input_ids = tokens(3)
    output = ours(input_ids)
    with torch.no_grad():
        expected = sum(theirs(row[None]).aux_loss for row in input_ids) * 0.01
    assert output.aux_loss_sum.item() == pytest.approx(expected.item(), rel=1e-5)
    whole_batch = theirs(input_ids).aux_loss.item() * 3 * 0.01
    assert abs(output.aux_loss_sum.item() - whole_batch) > 1e-4, "rows must not be pooled"


def test_no_coefficient_no_balance_loss_but_counts(tmp_path: Path) -> None:
    theirs = transformers_model("qwen3_moe", torch.float32, router_aux_loss_coef=0.0, mlp_only_layers=[0])
    theirs.save_pretrained(tmp_path)
    output = load_hf(tmp_path)(tokens(2))
    assert output.aux_loss_sum is None
    assert output.tokens_per_expert.shape == (2, 8)
    assert output.tokens_per_expert.sum(1).tolist() == [2 * 48 * 2] * 2


def test_packed_documents_equal_separate_ones(tmp_path: Path) -> None:
    ours, _ = pair("moe", tmp_path, torch.float64)
    input_ids = tokens(2, 16)
    cu_seqlens = [0, 3, 7, 11, 16, 20, 32]
    labels = tokens(2, 16).roll(-1, 1)
    packed = ours(input_ids, cu_seqlens=cu_seqlens).logits.flatten(0, 1)
    flat = input_ids.flatten()
    for start, end in pairwise(cu_seqlens):
        alone = ours(flat[None, start:end]).logits[0]
        assert (packed[start:end] - alone).abs().max() < 1e-12, (start, end)

    # Positions given by the loader are the same ones.
    positions = torch.cat([torch.arange(b - a) for a, b in pairwise(cu_seqlens)]).view(2, 16)
    again = ours(input_ids, cu_seqlens=cu_seqlens, position_ids_BT=positions).logits.flatten(0, 1)
    assert torch.equal(again, packed)

    def gradients(runs: list[tuple[torch.Tensor, torch.Tensor, list[int] | None]]) -> list[torch.Tensor]:
        ours.zero_grad()
        for ids, targets, boundaries in runs:
            ours(ids, cu_seqlens=boundaries, labels_BT=targets, loss_fn=sum_cross_entropy).loss_sum.backward()
        return [p.grad.clone() for p in ours.parameters()]

    together = gradients([(input_ids, labels, cu_seqlens)])
    spans = list(pairwise(cu_seqlens))
    apart = gradients([(flat[None, a:b], labels.flatten()[None, a:b], None) for a, b in spans])
    for one, other in zip(together, apart, strict=True):
        assert (one - other).abs().max() < 1e-12 * max(1.0, other.abs().max().item())


@pytest.mark.parametrize("tokens_per_row", [40, 600])  # either side of the length up to which scores are kept
def test_bfloat16_attention_is_within_its_rounding(tokens_per_row: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, tokens_per_row, h, 16, generator=generator, dtype=torch.float64) for h in (4, 2, 2))
    narrow = [x.bfloat16().requires_grad_() for x in (q, k, v)]
    wide = [x.detach().double().requires_grad_() for x in narrow]
    upstream = torch.randn(q.shape, generator=generator, dtype=torch.float64)
    results = []
    for q_BTHD, k_BTKD, v_BTKD in (narrow, wide):
        out = causal_attention(q_BTHD, k_BTKD, v_BTKD)
        out.backward(upstream.to(out.dtype))
        results.append([out, q_BTHD.grad, k_BTKD.grad, v_BTKD.grad])
    for name, got, expected in zip(("out", "q", "k", "v"), *results, strict=True):
        assert (got.double() - expected).abs().max() < 0.02 * expected.abs().max(), name


@pytest.mark.parametrize(
    ("cu_seqlens", "message"),
    [
        ([0, 8], "end with B*T = 2*8 = 16"),
        ([0, 5, 5, 8, 16], "rise"),
        ([0, 5, 12, 16], "runs over the end of a row at 8"),
        ([1, 8, 16], "start with 0"),
    ],
)
def test_impossible_boundaries_are_refused(cu_seqlens: list[int], message: str, tmp_path: Path) -> None:
    ours, _ = pair("dense", tmp_path, torch.float32)
    with pytest.raises(ValueError) as error:
        ours(tokens(2, 8), cu_seqlens=cu_seqlens)
    assert message in str(error.value)


def test_rows_above_the_limit_are_refused(tmp_path: Path) -> None:
    ours, _ = pair("dense", tmp_path, torch.float32)
    with pytest.raises(ValueError, match="65 tokens are above max_position_embeddings 64"):
        ours(tokens(1, 65))


def _hub_layout(model: Any) -> dict[str, torch.Tensor]:
    """Gradients of a transformers model under the names of its checkpoint, experts one by one."""
    gradients: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if name.endswith(".experts.gate_up_proj"):
            for e, both in enumerate(parameter.grad):
                gate, up = both.chunk(2)
                gradients[name.replace("gate_up_proj", f"{e}.gate_proj.weight")] = gate
                gradients[name.replace("gate_up_proj", f"{e}.up_proj.weight")] = up
        elif name.endswith(".experts.down_proj"):
            for e, down in enumerate(parameter.grad):
                gradients[name.replace("down_proj", f"{e}.down_proj.weight")] = down
        else:
            gradients[name] = parameter.grad
    return gradients
