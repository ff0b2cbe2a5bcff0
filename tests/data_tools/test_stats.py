from __future__ import annotations

import json
import sys

import pytest
import yaml

from hyper_parallel.data_tools.__main__ import main

CHAT_FREE = {"training": {"seq_len": 8, "global_batch_size": 1, "micro_batch_size": 1}}


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A YAML file whose dataloader reads two files of token ids."""
    monkeypatch.chdir(tmp_path)
    for name, documents in {"one": [[1, 2, 3], [4] * 9, []], "two": [[5, 6]] * 4}.items():
        lines = [json.dumps({"text": " ".join(map(str, ids))}) for ids in documents]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    groups = {
        **CHAT_FREE,
        "model": {"_target_": "hyper_parallel.models.qwen3_moe.create_model_spec", "flavor": "debug"},
        "tokenizer": {"_target_": "hyper_parallel.components.tokenizer.TokenIdTokenizer.Config", "vocab_size": 50},
        "dataloader": {
            "_target_": "hyper_parallel.components.data.TextDataLoader.Config",
            "sources": [
                {"_target_": "hyper_parallel.components.data.sources.JsonLinesSource.Config", "path": f"{name}.jsonl"}
                for name in ("one", "two")
            ],
            "weights": [0.5, 0.5],
            "packing": "pad",
        },
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(groups))
    return str(tmp_path / "run.yaml")


def cells(line: str) -> list[str]:
    return line.split()


def test_the_table(config, tmp_path, capsys):
    assert main(["stats", config]) == 0
    lines = capsys.readouterr().out.splitlines()
    # Documents of 3 and 9 ids and EOS fill rows of 3, 8 and 1; each of four documents of 2 ids and EOS fills 2 of 8.
    assert cells(lines[1]) == ["one.jsonl", "2", "14", "12", "4", "7", "7.0", "10", "10", "3", "50.00%", "42.86%"]
    assert cells(lines[2])[:9] == ["two.jsonl", "4", "12", "8", "3", "3", "3.0", "3", "3"]
    assert cells(lines[2])[10] == "25.00%"
    assert "one.jsonl: 1 empty texts left out" in lines
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")


def test_flags_and_the_name_of_the_drawing(config, tmp_path, capsys):
    assert (
        main(["stats", "--png", "other.png", config, "--dataloader.packing", "best_fit", "--training.seq_len", "12"])
        == 0
    )
    line = capsys.readouterr().out.splitlines()[1]
    assert cells(line)[:4] == ["one.jsonl", "2", "14", "12"]
    assert cells(line)[10] == "100.00%"
    assert (tmp_path / "other.png").exists()


def test_a_recipe(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = main(["stats", "recipes.qwen3_moe.debug", "--dataloader.documents", "3"])
    assert code == 0
    assert capsys.readouterr().out.splitlines()[1].split()[1] == "3"


def test_without_matplotlib_the_table_comes_and_says_what_is_missing(config, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["stats", config]) == 0
    out = capsys.readouterr().out
    assert "one.jsonl" in out
    assert "no histogram: matplotlib is not installed; pip install 'hyper_parallel[plot]'" in out
    assert main(["stats", "--png", "a.png", config]) == 2
    assert capsys.readouterr().err == (
        "--png: matplotlib is not installed; pip install 'hyper_parallel[plot]', or leave it out\n"
    )


def test_a_configuration_that_cannot_be_read(tmp_path, capsys):
    assert main(["stats", str(tmp_path / "gone.yaml")]) == 2
    assert "gone.yaml" in capsys.readouterr().err
