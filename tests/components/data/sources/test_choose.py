from __future__ import annotations

import itertools
import json

import pytest
from datasets import Dataset

from hyper_parallel.components.data.indexed import IndexedWriter
from hyper_parallel.components.data.sources import JsonLinesSource, choose_source
from hyper_parallel.config.errors import ConfigError


def kind(path, **options) -> str:
    return type(choose_source(str(path), **options)).owner.__name__


def refusal(path, **options) -> str:
    with pytest.raises(ConfigError) as caught:
        choose_source(str(path), **options)
    return str(caught.value)


@pytest.fixture
def folder(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "deep/c.jsonl.gz", "README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"text": name}) + "\n")
    return tmp_path


def test_a_file_by_the_end_of_its_name(tmp_path):
    kinds = {
        "a.txt": "TextSource",
        "a.jsonl": "JsonLinesSource",
        "a.jsonl.gz": "JsonLinesSource",
        "a.jsonl.zst": "JsonLinesSource",
        "a.parquet": "ParquetSource",
        "a.arrow": "ArrowSource",
        "a.csv": "CsvSource",
        "a.idx": "IndexedSource",
    }
    for name in kinds:
        (tmp_path / name).touch()
    assert {name: kind(tmp_path / name) for name in kinds} == kinds


def test_a_folder_or_pattern_holds_all_files_of_its_kind_by_name(folder):
    (folder / "deep/c.jsonl.gz").unlink()
    (folder / "deep/c.jsonl").write_text('{"text": "deep"}\n')
    assert [r["text"] for r in choose_source(str(folder)).build()] == ["a.jsonl", "b.jsonl", "deep"]
    assert [r["text"] for r in choose_source(str(folder / "*.jsonl")).build()] == ["a.jsonl", "b.jsonl"]
    assert [r["text"] for r in choose_source(str(folder / "**/*.jsonl")).build()] == ["a.jsonl", "b.jsonl", "deep"]


def test_positions_in_several_files(folder):
    (folder / "deep/c.jsonl.gz").unlink()
    for taken in range(3):
        source = choose_source(str(folder)).build()
        list(itertools.islice(source, taken))
        again = choose_source(str(folder)).build()
        again.load_state_dict(source.state_dict())
        assert [r["text"] for r in again] == ["a.jsonl", "b.jsonl"][taken:]


def test_several_kinds_in_a_folder_need_a_word(folder):
    (folder / "x.csv").write_text("text\nhello\n")
    assert refusal(folder) == (
        f"dataloader.path: {folder} holds files of several kinds (csv, jsonl); "
        "say which to read with source, or give a pattern"
    )
    assert [r["text"] for r in choose_source(str(folder), kind="csv").build()] == ["hello"]


def test_a_folder_beside_a_pair_of_its_name_needs_a_word(folder):
    for suffix in (".bin", ".idx"):
        folder.with_name(folder.name + suffix).write_bytes(b"")
    assert refusal(folder) == (
        f"dataloader.path: {folder} is a folder and the prefix of {folder}.bin; "
        "say which to read with source, indexed for the pair"
    )
    assert choose_source(str(folder), kind="jsonl") == JsonLinesSource.Config(path=str(folder))


def test_a_pair_by_its_prefix_its_folder_or_its_files(tmp_path):
    with IndexedWriter(tmp_path / "pair", dtype="uint16") as writer:
        writer.add_document([5, 6, 7])
    for path in (tmp_path / "pair", tmp_path, tmp_path / "pair.bin", tmp_path / "pair.idx"):
        source = choose_source(str(path)).build()
        assert [(r["input_ids"].tolist(), r.where) for r in source] == [([5, 6, 7], f"{tmp_path}/pair document 0")]


def test_names_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert kind("Salesforce/wikitext", subset="wikitext-2-raw-v1") == kind("squad") == "HuggingFaceSource"
    for gone in ("data/part.jsonl", "./squad", "/data/squad", "part.txt", "a/b/c"):
        assert refusal(gone).startswith(f"dataloader.path: {gone} does not exist; give a file of text")


def test_a_saved_data_set(tmp_path):
    Dataset.from_list([{"text": "a"}]).save_to_disk(tmp_path / "saved")
    assert kind(tmp_path / "saved") == "HuggingFaceSource"


def test_the_fingerprint_tells_other_data(folder):
    (folder / "deep/c.jsonl.gz").unlink()
    first = choose_source(str(folder)).build().fingerprint
    assert choose_source(str(folder)).build().fingerprint == first
    (folder / "b.jsonl").write_text('{"text": "B.jsonl"}\n')
    assert choose_source(str(folder)).build().fingerprint != first
