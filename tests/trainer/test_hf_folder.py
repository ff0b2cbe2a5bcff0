"""`--model_spec family:FOLDER`: sizes and tokenizer of a folder that transformers wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from hyper_parallel import train
from hyper_parallel.assets import TOKENIZER_FOLDER
from tests.trainer.runs import metrics, small_corpus

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "max_position_embeddings": 64,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of a model with 5,000 embeddings and a tokenizer of 4,097 entries."""
    folder = tmp_path / "model"
    Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=5000, **SIZES)).save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(TOKENIZER_FOLDER)
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(folder)
    return folder


def test_trains_with_its_sizes_and_tokenizer(folder: Path, dump_folder: str) -> None:
    flags = ["--training.steps", "2", "--training.seq_len", "64", "--dataloader.path", small_corpus()]
    assert train.main(["--model_spec", f"qwen3_moe:{folder}", "--dump_folder", dump_folder, *flags]) == 0
    assert [line["step"] for line in metrics(dump_folder)] == [1, 2]
    saved = json.loads((Path(dump_folder) / "config.json").read_text())
    assert saved["model"] == {"_target_": "hyper_parallel.models.qwen3_moe.create_model_spec", "flavor": str(folder)}
    assert saved["hf_assets_path"] == str(folder)
    # The first loss is that of a uniform guess over the folder's vocabulary, not over another.
    assert metrics(dump_folder)[0]["loss"] == pytest.approx(8.517, abs=0.02)  # ln 5000


def test_another_family_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["--model_spec", f"qwen3:{folder}"]) == 2
    error = capsys.readouterr().err
    assert error == (
        f"{folder / 'config.json'}: model_type is 'qwen3_moe', not qwen3; "
        f"give --model_spec qwen3_moe:{folder} if that is a family here\n"
    )


def test_rows_longer_than_its_positions_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["--model_spec", f"qwen3_moe:{folder}", "--training.seq_len", "65"]) == 2
    assert capsys.readouterr().err.startswith("training.seq_len: 65 ")
