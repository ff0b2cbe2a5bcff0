"""Models that do more than a base model and an output matrix are told from the operators of their own forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from hyper_parallel.config.errors import ConfigError
from hyper_parallel.config.sections import TrainingConfig
from hyper_parallel.models.auto import HyperAutoModelForCausalLM
from hyper_parallel.models.auto.causal_lm import AutoCausalLM
from hyper_parallel.models.auto.composition import strange_composition
from hyper_parallel.models.auto.layout import layout_of
from tests.models.auto.folders import FAMILIES

SIZES = FAMILIES["qwen3"][1] | {"vocab_size": 64, "pad_token_id": 0}


def strangeness(config: Any) -> str | None:
    model: Any = AutoCausalLM.Config(content=config.to_dict()).construct()
    return strange_composition(model, layout_of(model))


@pytest.mark.parametrize(
    ("config", "step"),
    [
        (transformers.GraniteConfig(**SIZES, logits_scaling=8.0), "from div(8.0) on"),
        (transformers.CohereConfig(**SIZES, logit_scale=0.25), "from mul(0.25) on"),
        (transformers.NanoChatConfig(**SIZES), "from div(15.0) on"),  # and tanh
    ],
)
def test_logits_that_are_changed_behind_the_output_matrix_are_refused(config: Any, step: str) -> None:
    with pytest.raises(ConfigError) as caught:
        HyperAutoModelForCausalLM.from_config(config)
    family = type(config).__name__.removesuffix("Config")
    assert str(caught.value) == (
        f"model_spec: module {family}ForCausalLM makes logits of token ids in another way than by model and lm_head "
        f"alone: {step}; choose another model: this one is not understood"
    )


def test_what_a_family_refused_for_more_than_one_reason_does() -> None:
    assert "from div(30.0) on" in str(strangeness(transformers.Gemma2Config(**SIZES)))
    routed_by_ids = transformers.DeepseekV4Config(num_hidden_layers=2)
    assert "from DeepseekV4DecoderLayer on" in str(strangeness(routed_by_ids))


@pytest.mark.parametrize("family", FAMILIES)
def test_others_are_understood_though_norms_round(family: str) -> None:
    config_class, sizes = FAMILIES[family]
    training = TrainingConfig(dtype="bfloat16")
    model = HyperAutoModelForCausalLM.from_config(config_class(vocab_size=64, **sizes), training=training)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    hooked = {type(module).__name__ for module in model.modules() if module._forward_hooks}
    assert hooked <= {"Qwen3MoeTopKRouter"}, "the look at the model left hooks"  # ours, for the balance


def test_a_scale_of_1_changes_nothing() -> None:
    """So the family trains as transformers' does, its other scales included."""
    config = transformers.GraniteConfig(**SIZES, logits_scaling=1.0, embedding_multiplier=3.0, residual_multiplier=0.5)
    ours = HyperAutoModelForCausalLM.from_config(config, training=TrainingConfig(dtype="float64"))
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    theirs.load_state_dict(ours.state_dict())
    ids = torch.arange(32).view(2, 16)
    torch.testing.assert_close(ours(ids).logits, theirs(input_ids=ids).logits, rtol=1e-13, atol=1e-15)


def masked_in_place(out: Any) -> None:
    out.logits[:].zero_()  # a view of them, in the same memory


def widened(out: Any) -> None:
    out.logits = (out.logits.double().contiguous() / 1.0)[:, :, :]


def rounded(out: Any) -> None:
    out.logits = out.logits.half().float()


@pytest.mark.parametrize(
    ("change", "step"),
    [(masked_in_place, "zero_()"), (rounded, "_to_copy()"), (widened, None)],
)
def test_of_what_follows_the_output_matrix_that_alone_counts_which_changes_numbers(
    change: Callable[[Any], None], step: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    original: Any = transformers.LlamaForCausalLM.forward

    def forward(self: Any, **given: Any) -> Any:
        out = original(self, **given)
        change(out)
        return out

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", forward)
    found = strangeness(transformers.LlamaConfig(**SIZES))
    assert found == (
        step and f"makes logits of token ids in another way than by model and lm_head alone: from {step} on"
    )


@pytest.mark.parametrize(("scaled", "step"), [("input_ids", "mul(3)"), ("inputs_embeds", "view(6, 32)")])
def test_a_base_model_that_takes_ids_in_another_way_than_their_vectors_is_refused(
    scaled: str, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here it is given vectors. Some scale the vectors of ids alone."""
    original: Any = transformers.LlamaModel.forward

    def forward(self: Any, **given: Any) -> Any:
        out = original(self, **given)
        if given.get(scaled) is not None:
            out.last_hidden_state = out.last_hidden_state * 3
        return out

    monkeypatch.setattr(transformers.LlamaModel, "forward", forward)
    assert str(strangeness(transformers.LlamaConfig(**SIZES))).endswith(f"by model and lm_head alone: from {step} on")


def test_a_forward_that_cannot_be_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, **given: Any) -> Any:
        raise KeyError("cache")

    monkeypatch.setattr(transformers.LlamaModel, "forward", forward)
    found = strangeness(transformers.LlamaConfig(**SIZES))
    assert found == "cannot be followed from token ids to logits (KeyError: 'cache')"


def test_what_transformers_cannot_make_with_an_attention_of_ours() -> None:
    neo = transformers.GPTNeoConfig(hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global"], 2]])
    fact = r"^model_spec: transformers makes no causal model of it, to which .* can be given \(KeyError: 'hyper_paralle"
    with pytest.raises(ConfigError, match=fact):
        HyperAutoModelForCausalLM.from_config(neo)
