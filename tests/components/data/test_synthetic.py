from __future__ import annotations

import math

import numpy as np
import pytest

from hyper_parallel.components.data import TextDataLoader
from hyper_parallel.components.data.sources.synthetic import synthetic_documents
from hyper_parallel.components.tokenizer import TokenIdTokenizer
from hyper_parallel.config.errors import ConfigError
from tests.components.data.numbers import build_loader, rows_of, write_documents


def tokenizer(vocab_size: int = 50) -> TokenIdTokenizer:
    return TokenIdTokenizer.Config(vocab_size=vocab_size).build()


def synthetic(**arguments) -> TextDataLoader:
    defaults = {"source": "synthetic", "tokenizer": tokenizer(), "seq_len": 8, "micro": 2, "batch": 4}
    return build_loader(None, **defaults | arguments)


def faults_of(**config) -> list[str]:
    return [str(fault) for fault in TextDataLoader.Config(**config).faults()]


def test_ids_are_those_of_the_generator_and_every_id_is_drawn():
    documents = synthetic_documents(100, tokens=40, tokenizer=tokenizer(7), seed=3, split="train")
    table = documents.token_ids.reshape(100, 41)
    raw = np.random.Philox(key=np.array([3, 0], np.uint64)).random_raw(4000).reshape(100, 40)
    assert (table[:, :40] == raw % 7).all()
    assert (table[:, 40] == 6).all()  # EOS
    assert documents.lengths.tolist() == [41] * 100
    counts = np.bincount(table[:, :40].reshape(-1), minlength=7)
    assert abs(counts - 4000 / 7).max() < 5 * math.sqrt(4000 / 7)
    assert documents.token_ids.dtype == np.uint8


def test_seed_and_split_decide_the_ids():
    def ids(**key) -> bytes:
        key = {"seed": 1, "split": "train"} | key
        return synthetic_documents(4, tokens=16, tokenizer=tokenizer(), **key).token_ids.tobytes()

    assert ids() == ids()
    assert len({ids(), ids(seed=2), ids(split="validation")}) == 3


def test_padded_rows_are_full_and_every_document_is_a_row():
    loader = synthetic(documents=12, packing="pad")
    assert loader.rows_per_epoch == 12
    steps = [next(loader) for _ in range(3)]
    loader.close()
    for micro_batch in [m for step in steps for m in step]:
        assert micro_batch["labels"].shape == (2, 8)
        assert (micro_batch["labels"] != -100).all()
        assert (micro_batch["labels"][:, :-1] == micro_batch["input_ids"][:, 1:]).all()
        assert micro_batch["labels"][:, -1].tolist() == [49, 49]
    assert len({row for step in steps for row in rows_of(step)}) == 12


@pytest.mark.parametrize("packing", ["concat", "pad"])
def test_interrupted_and_resumed(packing):
    options = {"documents": 6, "packing": packing}
    straight = synthetic(**options)
    expected, states = [], []
    for _ in range(5):  # into the second and third epoch
        states.append(straight.state_dict())
        expected.append(rows_of(next(straight)))
    straight.close()
    for step, state in enumerate(states):
        resumed = synthetic(**options)
        resumed.load_state_dict(state)
        assert [rows_of(next(resumed)) for _ in range(step, 5)] == expected[step:]
        resumed.close()


def test_a_position_in_other_data_is_refused():
    state = synthetic(documents=8).state_dict()
    with pytest.raises(ConfigError) as caught:
        synthetic(documents=9).load_state_dict(state)
    assert [fault.path for fault in caught.value.faults] == ["dataloader.path"]
    with pytest.raises(ConfigError) as caught:
        synthetic(documents=8, seed=7).load_state_dict(state)
    assert [fault.path for fault in caught.value.faults] == ["dataloader.path", "training.seed"]


def test_default_number_of_documents():
    assert synthetic(packing="pad").rows_per_epoch == 1024


def test_a_text_takes_its_first_documents(tmp_path):
    path = write_documents(tmp_path / "three.jsonl", [[1, 2], [3, 4], [5, 6]])
    options = {"seq_len": 2, "packing": "pad", "shuffle": False, "prefetch": 0}
    loader = build_loader(path, documents=2, **options)
    assert loader.rows_per_epoch == 2
    assert [rows_of(next(loader)) for _ in range(3)] == [[(1, 2)], [(3, 4)], [(1, 2)]]
    assert build_loader(path, documents=5, **options).rows_per_epoch == 3


def test_settings_that_have_no_effect_are_refused():
    assert faults_of(source="synthetic") == []
    assert faults_of(source="synthetic", path="some.jsonl", documents=0, text_field="body") == [
        "documents: 0 is below 1; give 1 or more",
        "path: some.jsonl is given, but source is synthetic; remove one of the two",
    ]
    assert faults_of(source="synthetic", text_field="body") == [
        "text_field: 'body' is given, but synthetic data has no such fields; remove it"
    ]


def test_fewer_rows_than_a_step_are_refused():
    with pytest.raises(ConfigError) as caught:
        synthetic(documents=3, packing="pad")
    assert str(caught.value) == (
        "dataloader.documents: synthetic data (3 documents, 27 tokens) gives 3 rows of training.seq_len 8, "
        "fewer than training.global_batch_size 4; give more documents or smaller sizes"
    )
