"""Flavors, overrides, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hyper_parallel.config.errors import ConfigError
from hyper_parallel.config.sections import CompileConfig, ParallelismConfig, TrainingConfig
from hyper_parallel.models import qwen3, qwen3_moe
from hyper_parallel.models.common.rope import RopeParameters
from hyper_parallel.protocols.model import BaseModel

PUBLISHED_PARAMETERS = {
    (qwen3_moe, "30b_a3b"): 30_532_122_624,
    (qwen3_moe, "235b_a22b"): 235_093_634_560,
    (qwen3, "0.6b"): 596_049_920,
    (qwen3, "1.7b"): 1_720_574_976,
    (qwen3, "4b"): 4_022_468_096,
    (qwen3, "8b"): 8_190_735_360,
    (qwen3, "14b"): 14_768_307_200,
    (qwen3, "32b"): 32_762_123_264,
}


def on_meta(model: BaseModel.Config) -> BaseModel:
    with torch.device("meta"):
        return model.build()


@pytest.mark.parametrize(("family", "flavor"), PUBLISHED_PARAMETERS, ids=lambda value: str(value))
def test_published_sizes_are_built_on_meta(family: object, flavor: str) -> None:
    start = time.process_time()
    model = on_meta(family.create_model_spec(flavor).model)
    seconds = time.process_time() - start
    assert all(p.is_meta for p in model.parameters()), "nothing may be allocated"
    assert not list(model.buffers())
    assert sum(p.numel() for p in model.parameters()) == PUBLISHED_PARAMETERS[family, flavor]
    assert seconds < 30, "a model of this size was filled, not only described"
    model.verify_module_protocol()


@pytest.mark.parametrize("family", [qwen3, qwen3_moe])
def test_debug_is_small_and_takes_the_grouped_product(family: object) -> None:
    from hyper_parallel.models.common.grouped_linear import grouped_mm_applies
    from hyper_parallel.models.common.moe import Experts

    model = on_meta(family.create_model_spec().model)
    count = sum(p.numel() for p in model.parameters())
    assert 4e6 < count < 20e6
    assert model.vocab_size == 4096
    for module in model.modules():
        if isinstance(module, Experts):
            for dtype in (torch.float32, torch.bfloat16):
                hidden = torch.empty(4, module.config.hidden_size, device="meta", dtype=dtype)
                assert grouped_mm_applies(hidden, module.gate_up_proj.to(dtype))


def test_flops_count_active_weights_and_attention() -> None:
    config = qwen3_moe.create_model_spec(
        vocab_size=100,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
    ).model
    attention = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 2 * 4  # q, k and v, o, norms of q and k
    experts = 2 * 3 * 8 * 16
    layer = attention + experts + 4 * 8 + 2 * 8  # router, two norms
    assert on_meta(config).flops_per_token(10) == 6 * (2 * layer + 100 * 8) + 12 * 2 * 2 * 4 * 10


@pytest.mark.parametrize(
    ("flavor", "message"),
    [
        ("debgu", "did you mean 'debug'?"),
        ("30b-a3b", "its flavors are debug, 30b_a3b, 235b_a22b; did you mean '30b_a3b'?"),
        ("/nowhere", "no such folder exists"),
    ],
)
def test_unknown_flavors_are_answered(flavor: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        qwen3_moe.create_model_spec(flavor)
    assert error.value.faults[0].path == "model_spec"
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "path", "message"),
    [
        ({"num_layers": 2}, "model_spec.num_layers", "no such field"),
        ({"num_experts": 2}, "model_spec.num_experts_per_tok", "4 is above num_experts 2"),
        ({"num_key_value_heads": 3}, "model_spec.num_key_value_heads", "3 does not divide num_attention_heads 4"),
        ({"mlp_only_layers": [0, 9]}, "model_spec.mlp_only_layers", "[9] are not among layers 0 to 3"),
        ({"hidden_size": "wide"}, "model_spec.hidden_size", "whole number"),
        ({"head_dim": 33}, "model_spec.head_dim", "33 is odd"),
        ({"rope_parameters": {"rope_type": "linear"}}, "model_spec.rope_parameters.factor", "linear needs it"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "model_spec.rope_parameters.rope_type", "longrope"),
        ({"rope_parameters": {"rope_tehta": 1.0}}, "model_spec.rope_parameters.rope_tehta", "rope_theta"),
    ],
)
def test_impossible_overrides_are_refused(overrides: dict, path: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        qwen3_moe.create_model_spec(**overrides)
    assert path in [fault.path for fault in error.value.faults]
    assert message in str(error.value)


def test_a_spec_is_its_factory_its_flavor_and_what_differs() -> None:
    plain = qwen3_moe.create_model_spec("30b_a3b")
    target = {"_target_": "hyper_parallel.models.qwen3_moe.create_model_spec", "flavor": "30b_a3b"}
    assert plain.to_dict() == target
    changed = qwen3_moe.create_model_spec(
        "30b_a3b", num_hidden_layers=2, mlp_only_layers=[1], rope_parameters={"rope_type": "linear", "factor": 2}
    )
    content = json.loads(json.dumps(changed.to_dict()))
    assert content["num_hidden_layers"] == 2
    assert set(content) == {*target, "num_hidden_layers", "mlp_only_layers", "rope_parameters"}
    arguments = {name: value for name, value in content.items() if name != "_target_"}
    assert qwen3_moe.create_model_spec(**arguments) == changed


def test_what_the_model_cannot_do_in_a_run_is_refused() -> None:
    config = qwen3.create_model_spec(max_position_embeddings=128).model
    config.update_from_config(run_with(seq_len=128, fullgraph=False))
    with pytest.raises(ConfigError, match=r"^training\.seq_len: 129 is above the model's max_position_embeddings 128"):
        config.update_from_config(run_with(seq_len=129, fullgraph=False))
    with pytest.raises(ConfigError, match=r"^compile\.fullgraph: True, but attention within packed documents"):
        config.update_from_config(run_with(seq_len=128, fullgraph=True))


def run_with(*, seq_len: int, fullgraph: bool) -> SimpleNamespace:
    return SimpleNamespace(
        training=TrainingConfig(seq_len=seq_len),
        compile=CompileConfig(enable=True, fullgraph=fullgraph),
        parallelism=ParallelismConfig(),
    )


def folder_with(tmp_path: Path, **changes: object) -> str:
    content = {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "rope_theta": 1000000.0,
        "hidden_act": "silu",
        "sliding_window": 4096,
        "use_sliding_window": False,
        **changes,
    }
    content = {name: value for name, value in content.items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(content))
    return str(tmp_path)


def test_a_folder_means_what_it_means_to_transformers(tmp_path: Path) -> None:
    import transformers

    folder = folder_with(tmp_path, rope_scaling={"type": "yarn", "factor": 4.0}, num_local_experts=16)
    ours = qwen3_moe.create_model_spec(folder).model
    theirs = transformers.AutoConfig.from_pretrained(folder)
    # None, a type of our own, or unknown to transformers; the first three are seen below.
    differing = {"head_dim", "mlp_only_layers", "rope_parameters", "float64_rounding"}
    for field in dataclasses.fields(ours):
        if field.name not in differing:
            assert getattr(ours, field.name) == getattr(theirs, field.name), field.name
    assert ours.num_experts == 16
    assert ours.head_size == 16
    assert ours.rope_parameters == RopeParameters(rope_type="yarn", rope_theta=1e6, factor=4.0)


def test_what_would_change_the_numbers_is_refused_all_at_once(tmp_path: Path) -> None:
    folder = folder_with(
        tmp_path,
        hidden_act="gelu",
        attention_dropout=0.1,
        use_sliding_window=True,
        layer_types=["full_attention", "sliding_attention"],
        quantization_config={"quant_method": "fp8"},
        shared_expert_intermediate_size=128,
    )
    with pytest.raises(ConfigError) as error:
        qwen3_moe.create_model_spec(folder)
    named = {fault.path.removeprefix(f"{tmp_path}/config.json.") for fault in error.value.faults}
    assert named == {
        "hidden_act",
        "attention_dropout",
        "use_sliding_window",
        "layer_types",
        "quantization_config",
        "shared_expert_intermediate_size",
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"model_type": "qwen3"}, "model_type is 'qwen3'"),
        ({"num_experts": 8, "num_local_experts": 16}, "16 differs from num_experts 8"),
        ({"hidden_size": "64 wide"}, "hidden_size"),
    ],
)
def test_folders_that_do_not_fit(changes: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        qwen3_moe.create_model_spec(folder_with(tmp_path, **changes))
    assert message in str(error.value)
    assert "config.json" in str(error.value)


def test_initial_weights_follow_their_declared_distribution_and_the_name() -> None:
    spec = qwen3_moe.create_model_spec(num_hidden_layers=2, tie_word_embeddings=True)
    model = spec.model.build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    model.init_weights(3)
    assert not hasattr(model, "lm_head")
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.05), name
    first, second = model.layers[0].mlp.experts.down_proj, model.layers[1].mlp.experts.down_proj
    assert (first - second).abs().max() > 0.01

    wrapped = spec.model.build()
    wrapped.layers[0] = nn.Sequential()
    wrapped.layers[0]._checkpoint_wrapped_module = spec.model.block(0).build()
    wrapped.init_weights(3)
    inner = wrapped.layers[0]._checkpoint_wrapped_module.mlp.experts.down_proj
    assert torch.equal(inner, first), "a wrapper changed the initial values"


@pytest.mark.parametrize(
    ("sizes", "faults"),
    [
        (
            {"hidden_size": 4, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": None},
            ["num_attention_heads: 8 is above hidden_size 4, and head_dim is None; give fewer heads, or head_dim"],
        ),
        (
            {"rms_norm_eps": 0.0, "initializer_range": -1.0},
            [
                "rms_norm_eps: 0.0 is not above 0 and finite; give a positive number",
                "initializer_range: -1.0 is below 0; give 0 or more",
            ],
        ),
        (
            {"rope_parameters": {"rope_theta": float("nan"), "rope_type": "linear", "factor": 0.0}},
            [
                "rope_parameters.rope_theta: nan is not above 0 and finite; give a positive number",
                "rope_parameters.factor: 0.0 is not above 0 and finite; give a positive number",
            ],
        ),
    ],
)
def test_sizes_that_no_model_can_have_are_refused(sizes: dict[str, object], faults: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        qwen3.create_model_spec(**sizes)
    assert str(error.value).splitlines() == [f"model_spec.{fault}" for fault in faults]
