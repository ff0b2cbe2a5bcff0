"""Weights that come in, go out, and are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hyper_parallel.config.errors import ConfigError
from hyper_parallel.models import load_hf, qwen3, qwen3_moe, save_hf
from tests.models.reference import MOE_SIZES, SIZES, transformers_model

OURS = {k: v for k, v in MOE_SIZES.items() if k != "output_router_logits"}


@pytest.mark.parametrize("shard", ["100GB", "20KB"])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3_moe", {"mlp_only_layers": [1]}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("qwen3", {"attention_bias": True}),
    ],
)
def test_out_and_in_again(family: str, changes: dict, shard: str, tmp_path: Path) -> None:
    import transformers

    theirs = transformers_model(family, torch.float32, **changes)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size=shard)
    ours = load_hf(tmp_path / "theirs")
    save_hf(ours, tmp_path / "ours", max_shard_bytes=10**9 if shard == "100GB" else 20_000)
    files = sorted((tmp_path / "ours").glob("*.safetensors"))
    assert (len(files) == 1) == (shard == "100GB")
    if len(files) > 1:
        index = json.loads((tmp_path / "ours/model.safetensors.index.json").read_text())
        stored = [load_file(file) for file in files]
        sizes = [sum(t.nbytes for t in shard.values()) for shard in stored]
        assert index["metadata"]["total_size"] == sum(sizes)
        assert max(sizes) <= 20_000
        assert index["weight_map"] == {n: f.name for f, s in zip(files, stored, strict=True) for n in s}

    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(again) is type(theirs)
    for (name, before), after in zip(theirs.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(before, after), name
    for name in SIZES:
        assert getattr(again.config, name) == getattr(theirs.config, name), name
    back = load_hf(tmp_path / "ours")
    assert back.config == ours.config


def test_dtype_and_rope_scaling_survive(tmp_path: Path) -> None:
    import transformers

    yarn = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 16}
    model = qwen3.create_model_spec(**{**SIZES, "rope_parameters": yarn}).model.build().to(torch.bfloat16)
    model.init_weights(0)
    save_hf(model, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert theirs.dtype == torch.bfloat16
    assert theirs.config.rope_parameters == yarn
    wide = load_hf(tmp_path, dtype=torch.float64)
    assert {p.dtype for p in wide.parameters()} == {torch.float64}
    assert torch.equal(wide.norm.weight, model.norm.weight.double())


def saved(tmp_path: Path) -> Path:
    model = qwen3_moe.create_model_spec(**OURS).model.build()
    model.init_weights(0)
    save_hf(model, tmp_path / "model")
    return tmp_path / "model"


def change_weights(folder: Path, change: object) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_all_weights_that_do_not_fit_are_named_at_once(tmp_path: Path) -> None:
    folder = saved(tmp_path)

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
        del tensors["model.norm.weight"]
        tensors["model.layers.0.mlp.shared_expert.weight"] = torch.zeros(2)
        tensors["model.layers.0.mlp.gate.weight"] = torch.zeros(8, 31)

    change_weights(folder, spoil)
    with pytest.raises(ValueError) as error:
        load_hf(folder)
    assert str(error.value).splitlines()[1:] == [
        "missing: model.layers.1.mlp.experts.3.up_proj.weight (24, 32)",
        "missing: model.norm.weight (32,)",
        "unexpected: model.layers.0.mlp.shared_expert.weight (2,)",
        "misshapen: model.layers.0.mlp.gate.weight is (8, 31), the model has (8, 32)",
    ]


def test_a_tied_model_may_store_its_output_matrix_if_it_is_the_same(tmp_path: Path) -> None:
    model = qwen3.create_model_spec(**{**SIZES, "tie_word_embeddings": True}).model.build()
    model.init_weights(0)
    save_hf(model, tmp_path)
    change_weights(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert torch.equal(load_hf(tmp_path).embed_tokens.weight, model.embed_tokens.weight)
    change_weights(tmp_path, lambda t: t["lm_head.weight"].add_(1))
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        load_hf(tmp_path)


def test_absent_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: there is no such file"):
        load_hf(tmp_path)
    folder = saved(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"no weights at .*model\.safetensors"):
        load_hf(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        load_hf(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match="model_type 'llama' is not implemented"):
        load_hf(folder)


def test_older_weights_are_never_mixed_with_new_ones(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    with pytest.raises(FileExistsError, match=r"already holds weights \(model\.safetensors\)"):
        save_hf(load_hf(folder), folder)
