from __future__ import annotations

import gzip
import json

from hyper_parallel.assets import CORPUS_FILES, TOKENIZER_FOLDER
from hyper_parallel.assets.build_tokenizer import build_tokenizer


def read(split: str) -> list[dict[str, str]]:
    with gzip.open(CORPUS_FILES[split], "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def test_no_document_is_in_both_splits():
    train, validation = read("train"), read("validation")
    assert (len(train), len(validation)) == (805, 175)
    assert {document["work"] for document in validation} == {"hamlet", "sonnets"}
    assert not {document["work"] for document in train} & {"hamlet", "sonnets"}
    assert not {document["text"] for document in train} & {document["text"] for document in validation}


def test_the_tokenizer_is_made_again_to_the_byte(tmp_path):
    build_tokenizer(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["tokenizer.json", "tokenizer_config.json"] == sorted(f.name for f in TOKENIZER_FOLDER.iterdir())
    for name in names:
        assert (tmp_path / name).read_bytes() == (TOKENIZER_FOLDER / name).read_bytes(), name


def test_the_vocabulary_is_full_and_eos_is_not_pad():
    vocabulary = json.loads((TOKENIZER_FOLDER / "tokenizer.json").read_text())["model"]["vocab"]
    config = json.loads((TOKENIZER_FOLDER / "tokenizer_config.json").read_text())
    assert sorted(vocabulary.values()) == list(range(4096))
    assert (vocabulary[config["eos_token"]], vocabulary[config["pad_token"]]) == (0, 1)
