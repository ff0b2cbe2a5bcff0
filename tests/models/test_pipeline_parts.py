"""A model taken apart is the same model: parts called one after the other against the whole, in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hyper_parallel.components.loss import CrossEntropyLoss
from hyper_parallel.config.sections import ParallelismConfig
from hyper_parallel.distributed.parallel_dims import ParallelDims
from hyper_parallel.models.common.decoder import Decoder
from hyper_parallel.models.common.pipeline import part, pipeline_decoder
from hyper_parallel.models.qwen3_moe import create_model_spec
from hyper_parallel.protocols.model import ModelOutput
from hyper_parallel.trainer.config import TrainerConfig
from tests.trainer.runs import TINY

CUTS = ([0], [1, 2], [3])
ROWS, TOKENS, VOCAB = 2, 12, 64


def whole_model(**fields: Any) -> Decoder:
    spec = create_model_spec("debug", **(TINY | {"num_hidden_layers": 4, "vocab_size": VOCAB} | fields))
    assert spec.model is not None
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        model = spec.model.build()
    finally:
        torch.set_default_dtype(before)
    model.init_weights(7)
    return model


def parts_of(model: Decoder) -> list[Decoder]:
    last = len(CUTS) - 1
    return [part(model, layers, is_first=i == 0, is_last=i == last) for i, layers in enumerate(CUTS)]


def run(parts: list[Decoder]) -> list[ModelOutput]:
    generator = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(VOCAB, (ROWS, TOKENS), generator=generator) for _ in range(2))
    arguments = {
        "cu_seqlens": (0, 5, 12, 24),
        "labels_BT": labels,
        "loss_fn": CrossEntropyLoss.Config().build(vocab_size=VOCAB),
    }
    outputs: list[ModelOutput] = []
    for model in parts:
        received = outputs[-1].sent if outputs else ()
        outputs.append(model(ids, received=received, **arguments))
    last = outputs[-1]
    assert last.loss_sum is not None and last.aux_loss_sum is not None
    (last.loss_sum + 3 * last.aux_loss_sum).backward()
    return outputs


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dense_layers", [(), (0,), (1, 2), (3,)])
def test_parts_in_a_row_are_the_whole(tied: bool, dense_layers: tuple[int, ...]) -> None:
    """The auxiliary loss multiplies what all layers' routers did, wherever the layers are."""
    model = whole_model(tie_word_embeddings=tied, mlp_only_layers=dense_layers)
    parts = parts_of(model)
    (expected,) = run([model])
    outputs = run(parts)
    for loss, whole, tolerance in zip(outputs[-1][1:3], expected[1:3], (1e-11, 1e-14), strict=True):
        torch.testing.assert_close(loss, whole, rtol=0, atol=tolerance)
    counts = torch.stack([output.tokens_per_expert for output in outputs])
    assert torch.equal(counts.sum(0), expected.tokens_per_expert) and ((counts > 0).any(-1).sum(0) == 1).all()
    gradients: dict[str, torch.Tensor] = {}
    for made in parts:
        for name, parameter in made.named_parameters():
            assert parameter.grad is not None, name
            gradients[name] = gradients.get(name, torch.zeros(())) + parameter.grad
    assert gradients.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("tied", [True, False])
def test_each_part_has_its_own_parameters_under_their_full_names(tied: bool) -> None:
    first, middle, last = (dict(made.named_parameters()) for made in parts_of(whole_model(tie_word_embeddings=tied)))
    assert {name.split(".")[1] for name in middle} == {"1", "2"} and all(n.startswith("layers.") for n in middle)
    assert {name for name in first if not name.startswith("layers.0.")} == {"embed_tokens.weight"}
    head = "embed_tokens.weight" if tied else "lm_head.weight"
    assert {name for name in last if not name.startswith("layers.3.")} == {"norm.weight", head}


def test_initial_weights_do_not_depend_on_the_cut() -> None:
    model = whole_model()
    expected = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for made in parts_of(model):
        for parameter in made.parameters():
            parameter.data.zero_()
        made.init_weights(7)
        assert all(torch.equal(parameter, expected[name]) for name, parameter in made.named_parameters())


SPLIT = ParallelismConfig(pp=3, tp=2, sequence_parallel=True)


def split_model() -> Decoder:
    """A model with a tensor-parallel plan, which nothing has applied yet."""
    model = whole_model()
    config = TrainerConfig(parallelism=SPLIT)
    model.config.update_from_config(config)
    return model


def test_each_part_has_the_plans_of_its_own_modules() -> None:
    model = split_model()
    parts = parts_of(model)
    for made in parts:
        made.check_plan()
    first, middle, last = (made.config.sharding.keys() for made in parts)
    assert first | middle | last == model.config.sharding.keys()
    assert {"embed_tokens", "norm", "lm_head"} & first == {"embed_tokens"}
    assert not {"embed_tokens", "norm", "lm_head"} & middle
    assert {name for name in middle if name.startswith("layers.1.")} and "layers.3.mlp.experts" not in middle
    assert {"handed_in", "handed_on"} <= middle


def test_a_plan_is_compared_with_the_whole_model() -> None:
    """A part cannot tell a wrong name from one of another part."""
    model = split_model()
    plan = model.config.sharding
    plan["layers.9.mlp"] = plan["layers.0.mlp"]
    del plan["lm_head"]
    with pytest.raises(TypeError, match=r"parameter lm_head.weight is in no plan; 'layers\.9\.mlp' names no module$"):
        pipeline_decoder(model, ParallelDims(dp_replicate=1, dp_shard=1, pp=3, tp=2), parallelism=SPLIT)


def test_a_rank_sends_its_own_tokens() -> None:
    hidden, *_ = split_model().boundary(ROWS, TOKENS, torch.float64, SPLIT)
    assert hidden.shape == (ROWS, TOKENS // 2, 32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rounding", ["none", "transformers"])
def test_the_boundary_is_what_is_sent(dtype: torch.dtype, rounding: str) -> None:
    model = whole_model(float64_rounding=rounding).to(dtype)
    sent = parts_of(model)[1](
        torch.zeros(ROWS, TOKENS, dtype=torch.int64),
        received=[
            torch.zeros_like(meta, device="cpu", requires_grad=meta.requires_grad)
            for meta in model.boundary(ROWS, TOKENS, dtype, ParallelismConfig())
        ],
    ).sent
    declared = model.boundary(ROWS, TOKENS, dtype, ParallelismConfig())
    assert [(t.shape, t.dtype, t.requires_grad) for t in sent] == [
        (t.shape, t.dtype, t.requires_grad) for t in declared
    ]
