"""Models of transformers behind our protocol: the same losses, gradients and names, or a refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers

from hyper_parallel.components.loss import ChunkedCELoss
from hyper_parallel.config.errors import ConfigError
from hyper_parallel.config.sections import ParallelismConfig, TrainingConfig
from hyper_parallel.config.target import Target
from hyper_parallel.distributed.distributed_setup import DistributedSetup
from hyper_parallel.distributed.hf_weights import HFWeightsError, save_hf_weights
from hyper_parallel.distributed.parallel_dims import ParallelDims
from hyper_parallel.models.auto import HyperAutoModelForCausalLM
from hyper_parallel.models.auto.state_dict_adapter import AutoStateDictAdapter
from hyper_parallel.protocols.initializer import Constant, Normal
from hyper_parallel.protocols.plan_override import PlanOverride
from tests.models.auto.folders import FAMILIES, balance, save, tiny_model
from tests.models.auto.override_parts import chunked

FLOAT64 = TrainingConfig(dtype="float64")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("documents", [None, [0, 5, 32, 33, 64]])
def test_loss_and_gradients_are_those_of_transformers(tmp_path: Path, family: str, documents: list[int] | None) -> None:
    theirs = tiny_model(family)
    ours = HyperAutoModelForCausalLM.from_pretrained(save(theirs, tmp_path), training=FLOAT64)
    ids = torch.randint(0, 64, (2, 33), generator=torch.Generator().manual_seed(1))
    labels = ids[:, 1:].clone()
    labels[0, 7:9] = -100
    loss = ChunkedCELoss.Config(chunk_tokens=24).build(vocab_size=64)
    out = ours(ids[:, :-1], labels_BT=labels, loss_fn=loss, cu_seqlens=documents)
    own = out.loss_sum + (0 if out.aux_loss_sum is None or documents else out.aux_loss_sum)
    own.backward()

    bounds = documents or [0, 32, 64]
    pieces = zip(
        ids[:, :-1].flatten().tensor_split(bounds[1:-1]), labels.flatten().tensor_split(bounds[1:-1]), strict=True
    )
    expected = torch.zeros((), dtype=torch.float64)
    for ids_T, labels_T in pieces:
        # One pass for both losses: gradients pass through float32 in its norms.
        row = theirs(input_ids=ids_T[None])
        expected = expected + F.cross_entropy(row.logits[0], labels_T, reduction="sum")
        if family == "qwen3_moe" and not documents:
            expected = expected + balance(row.router_logits)
    expected.backward()
    assert abs(own.item() - expected.item()) <= 1e-9
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    assert gradients.keys() == {name for name, _ in ours.named_parameters()}
    for name, parameter in ours.named_parameters():
        assert parameter.grad.abs().max() > 1e-3, name
        expected_grad = gradients[name].view_as(parameter)  # matrices side by side have a dim of their own here
        torch.testing.assert_close(parameter.grad, expected_grad, rtol=0, atol=1e-9, msg=name)
    assert (out.tokens_per_expert is not None) == (family == "qwen3_moe")
    if out.tokens_per_expert is not None:
        assert out.tokens_per_expert.sum(1).tolist() == [2 * 64] * 2  # two layers with experts, two experts a token


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_that_go_out_come_back(tmp_path: Path, family: str) -> None:
    theirs = tiny_model(family)
    ours = HyperAutoModelForCausalLM.from_pretrained(save(theirs, tmp_path / "in"), training=FLOAT64)
    assert ours.training
    save_hf_weights([ours], AutoStateDictAdapter(ours.config), tmp_path / "out")
    again, told = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float64, output_loading_info=True
    )
    assert not any(told.values()), told
    for name, parameter in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[name], parameter), name


def test_a_folder_of_the_base_model_is_read(tmp_path: Path) -> None:
    theirs = tiny_model("gpt2")
    theirs.transformer.save_pretrained(tmp_path)
    ours = HyperAutoModelForCausalLM.from_pretrained(tmp_path, training=FLOAT64)
    assert torch.equal(ours.transformer.h[1].attn.c_attn.weight.flatten(1), theirs.transformer.h[1].attn.c_attn.weight)


def test_weights_of_another_size_are_refused(tmp_path: Path) -> None:
    save(tiny_model("qwen3"), tmp_path)
    with pytest.raises(HFWeightsError, match=r"misshapen: model.layers.0.mlp.up_proj.weight is \(48, 32\), the model"):
        HyperAutoModelForCausalLM.from_pretrained(tmp_path, intermediate_size=40)


def test_draws_what_transformers_draws() -> None:
    config_class, sizes = FAMILIES["gpt2"]
    model = HyperAutoModelForCausalLM.from_config(config_class(vocab_size=4096, **sizes), initializer_range=0.04)
    assert model.param_init["transformer.wte.weight"] == Normal(0.04)
    assert model.param_init["transformer.h.1.mlp.c_proj.weight"] == Normal(0.02)  # 0.04 / sqrt(2 x 2 layers)
    assert model.param_init["transformer.h.0.ln_1.weight"] == Constant(1.0)
    assert model.transformer.wte.weight.std().item() == pytest.approx(0.04, rel=0.02)
    assert model.transformer.ln_f.bias.abs().max() == 0


def test_buffers_are_computed_anew(tmp_path: Path) -> None:
    theirs = tiny_model("llama", rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4})
    ours = HyperAutoModelForCausalLM.from_pretrained(save(theirs, tmp_path), training=FLOAT64)
    assert torch.equal(ours.model.rotary_emb.inv_freq, theirs.model.rotary_emb.inv_freq)


def test_flops_count_what_a_token_meets() -> None:
    config_class, sizes = FAMILIES["qwen3_moe"]
    model = HyperAutoModelForCausalLM.from_config(config_class(vocab_size=64, **sizes))
    attention = 32 * (32 + 16 + 16 + 32) + 2 * 8
    experts, dense = 2 * 3 * 32 * 16, 3 * 32 * 48  # two of four experts
    weights = 3 * (attention + 2 * 32) + 2 * (experts + 4 * 32) + dense + 64 * 32
    assert model.flops_per_token(100) == 6 * weights + 12 * 3 * 4 * 8 * 100


@pytest.mark.parametrize(
    ("config", "fact"),
    [
        (
            transformers.MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, state_size=4),
            "MambaForCausalLM is no decoder whose attention can be chosen",
        ),
        (
            transformers.GPT2Config(vocab_size=64, n_embd=8, n_layer=1, n_head=2, attn_pdrop=0.1),
            "module transformer.h.0.attn (GPT2Attention) drops 0.1 of its weights, which is not implemented",
        ),
        (
            transformers.MistralConfig(**FAMILIES["llama"][1], vocab_size=64, sliding_window=16),
            "MistralForCausalLM has a sliding window of 16 tokens",
        ),
        (
            transformers.MixtralConfig(**FAMILIES["qwen3"][1], vocab_size=64, num_local_experts=2),
            "module model.layers.0.mlp.experts (MixtralExperts) has another layout in checkpoints than Qwen's",
        ),
        (
            transformers.GptOssConfig(**FAMILIES["qwen3"][1], vocab_size=64, num_local_experts=2),
            "module model.layers.0.self_attn (GptOssAttention)",
        ),
        (
            transformers.BertConfig(vocab_size=64, hidden_size=8, num_hidden_layers=1, num_attention_heads=1),
            "BertLMHeadModel consists of bert, cls, not of a base model and an output matrix",
        ),
    ],
)
def test_a_model_that_is_not_understood_is_refused_with_the_module(config: Any, fact: str) -> None:
    with pytest.raises(ConfigError) as caught:
        HyperAutoModelForCausalLM.from_config(config)
    assert fact in str(caught.value)


def test_a_pipeline_is_refused() -> None:
    config_class, sizes = FAMILIES["qwen3"]
    parallelism = ParallelismConfig(dp_shard=1, pp=2)
    setup = DistributedSetup(parallel_dims=ParallelDims.from_config(parallelism, 2), parallelism=parallelism)
    with pytest.raises(ConfigError, match=r"distributed_setup.pp: 2, but there are no stages of it; set 1"):
        HyperAutoModelForCausalLM.from_config(config_class(vocab_size=64, **sizes), distributed_setup=setup)


def test_ranks_without_a_mesh_are_refused() -> None:
    """They would not share anything."""
    config_class, sizes = FAMILIES["qwen3"]
    for parallelism in (ParallelismConfig(dp_shard=2), ParallelismConfig(dp_shard=1, tp=2)):
        setup = DistributedSetup(parallel_dims=ParallelDims.from_config(parallelism, 2), parallelism=parallelism)
        with pytest.raises(
            RuntimeError, match=r"dp_shard=\d, .* has no mesh; call init_distributed, then its build_mesh"
        ):
            HyperAutoModelForCausalLM.from_config(config_class(vocab_size=64, **sizes), distributed_setup=setup)


def test_sizes_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"parallelism.tp: dp_replicate 1 x tp 2 = 2 does not divide the world size 1"
    ):
        DistributedSetup(parallelism=ParallelismConfig(tp=2))
    with pytest.raises(ConfigError) as caught:
        DistributedSetup(parallel_dims=ParallelDims(dp_replicate=1, dp_shard=2, ep=2))
    assert str(caught.value) == (
        "distributed_setup: parallel_dims is ParallelDims(dp_replicate=1, dp_shard=2, cp=1, tp=1, pp=1, ep=2), but "
        "parallelism asks for ParallelDims(dp_replicate=1, dp_shard=2, cp=1, tp=1, pp=1, ep=1); make parallel_dims by "
        "ParallelDims.from_config(parallelism, world_size)"
    )


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"local_compute_fn": Target.of(chunked)}, "region_dispatch: is missing beside what is injected"),
        ({"when": "tp", "params": {}}, "when: expected one of cp, ep, low_precision or None, got text 'tp'"),
        ({"out_src": ("partail",)}, "out_src.0: 'partail' is no placement"),
        ({"out_src": "partial"}, "out_src: expected"),
        ({"in_src": "replicate"}, "in_src: expected"),
        ({"local_compute_fn": chunked, "region_dispatch": False}, "local_compute_fn: expected"),
        ({"local_compute_fn": Target.of(tiny_model), "region_dispatch": False}, "local_compute_fn.family: "),
    ],
)
def test_overrides_that_are_wrong_are_refused(fields: dict[str, Any], fault: str) -> None:
    good, wrong = (PlanOverride(match="model.layers.*.mlp", **each) for each in ({"params": {}}, fields))
    with pytest.raises(ConfigError) as caught:
        DistributedSetup(plan_overrides=(good, wrong))
    assert str(caught.value).startswith(f"plan_overrides.1.{fault}") and "\n" not in str(caught.value)


def test_changes_that_the_model_has_not_and_names_that_are_no_folder_are_refused(tmp_path: Path) -> None:
    folder = save(tiny_model("qwen3"), tmp_path)
    with pytest.raises(ConfigError, match=r"model_spec.changes.n_layers: qwen3 has no such field"):
        HyperAutoModelForCausalLM.from_pretrained(folder, n_layers=3)
    with pytest.raises(ConfigError, match=r"Qwen/Qwen3-0.6B is no folder; download it: hf download Qwen/Qwen3-0.6B"):
        HyperAutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")
