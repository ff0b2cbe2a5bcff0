from __future__ import annotations

import pytest
import torch

from hyper_parallel.components.data.indexed import IndexedWriter
from hyper_parallel.components.data.reading import read_documents
from hyper_parallel.components.data.sources import ParquetSource
from hyper_parallel.components.data.sources.source import Record
from hyper_parallel.components.data.transforms import TokenIdsTransform
from hyper_parallel.components.tokenizer import TokenIdTokenizer
from hyper_parallel.config.errors import ConfigError
from tests.components.data.numbers import build_loader, rows_of

TOKENIZER = TokenIdTokenizer.Config(vocab_size=100).build()


def documents_of(*records: dict, **config):
    transform = TokenIdsTransform.Config(**config).build(tokenizer=TOKENIZER, seq_len=8)
    source = [Record(record, f"data row {i}") for i, record in enumerate(records)]
    return read_documents(source, iter(source), transform, vocab_size=100)


def refusal(record: dict, **config) -> str:
    with pytest.raises(ConfigError) as caught:
        documents_of(record, **config)
    return str(caught.value)


def test_ids_stand_as_they_are_and_empty_documents_are_counted():
    documents = documents_of({"input_ids": [5, 0, 6]}, {"input_ids": []}, {"input_ids": [99]})
    assert documents.token_ids.tolist() == [5, 0, 6, 99]
    assert documents.offsets.tolist() == [0, 3, 4]
    assert documents.trained is None
    assert documents.counts == {"empty documents left out": 1}


def test_labels_say_what_is_trained():
    """Prompt 1 2 3, answer 4 5, EOS 6: three targets, whether the labels are shifted already or not."""
    ids = [1, 2, 3, 4, 5, 6]
    beside = documents_of({"ids": ids, "y": [-100, -100, -100, 4, 5, 6]}, field="ids", labels_field="y")
    before = documents_of(
        {"ids": ids, "y": [-100, -100, 4, 5, 6, -100]}, field="ids", labels_field="y", labels_shifted=True
    )
    beyond = documents_of(
        {"ids": ids[:-1], "y": [-100, -100, 4, 5, 6]}, field="ids", labels_field="y", labels_shifted=True
    )
    for documents in (beside, before, beyond):
        assert documents.token_ids.tolist() == ids
        assert documents.trained.tolist() == [False, False, False, True, True, True]


def test_labels_are_found_by_their_name_and_padding_by_the_mask():
    """Pad id 0 is also a token: 5 0 6 with padding on either side; what is real says the mask, never an id."""
    left = {"input_ids": [0, 0, 5, 0, 6], "labels": [-100, -100, 5, 0, 6], "attention_mask": [0, 0, 1, 1, 1]}
    right = {"input_ids": [5, 0, 6, 0, 0], "labels": [-100, 0, 6, -100, -100], "attention_mask": [1, 1, 1, 0, 0]}
    documents = documents_of(left, right, {"input_ids": [7, 8]})
    assert documents.token_ids.tolist() == [5, 0, 6, 5, 0, 6, 7, 8]
    assert documents.trained.tolist() == [True] * 3 + [False, True, True] + [True] * 2
    assert refusal({"input_ids": [1, 2], "attention_mask": [1]}) == (
        "dataloader.path: data row 0 has 2 token ids or labels, but an attention_mask of 1; mend the data"
    )


def test_labels_that_do_not_repeat_the_ids_are_refused():
    record = {"input_ids": [1, 2, 3, 4], "labels": [-100, 3, 4, -100]}
    assert refusal(record, labels_field="labels") == (
        "dataloader.transform.labels_shifted: data row 0 has the label 3 for the token id 2 at 1; "
        "set it True, or mend the data"
    )
    assert refusal({"input_ids": [1, 2], "labels": [1]}, labels_field="labels") == (
        "dataloader.transform.labels_field: data row 0 has 2 token ids, but 1 labels; mend the data"
    )


@pytest.mark.parametrize("bad", [100, -1, 2**40])
def test_an_id_beyond_the_vocabulary_is_refused_before_training(bad):
    assert refusal({"input_ids": [1, bad]}) == (
        f"dataloader.path: data row 0 holds the token id {bad}, and the tokenizer's go from 0 to 99; "
        "give the tokenizer that made the ids"
    )


@pytest.mark.parametrize("value", ["1 2 3", [1.5], [[1], [2, 3]], [[1, 2]], ["1"], 7, None])
def test_what_is_no_list_of_ids_is_refused(value):
    message = refusal({"input_ids": value})
    assert message.startswith("dataloader.transform.field: 'input_ids' in data row 0 is ")
    assert message.endswith(", not a list of whole numbers; name a field that holds token ids")


def test_an_unknown_field_lists_those_that_there_are():
    assert refusal({"ids": [1], "text": "a"}) == (
        "dataloader.transform.field: 'input_ids' is not in data row 0, which has 'ids', 'text'; "
        "name the field with the token ids"
    )


def test_a_column_of_ids(tmp_path):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"input_ids": [[1, 2, 3], [4, 5, 6]]}), tmp_path / "ids.parquet")
    source = ParquetSource.Config(path=str(tmp_path / "ids.parquet"))
    loader = build_loader(
        None, seq_len=2, sources=(source,), transform=TokenIdsTransform.Config(), packing="pad", shuffle=False
    )
    assert [rows_of(next(loader)) for _ in range(2)] == [[(1, 2)], [(4, 5)]]
    loader.close()


def test_files_of_torch(tmp_path):
    torch.save([{"input_ids": torch.tensor([1, 2, 3])}, {"input_ids": [4, 5, 6]}], tmp_path / "list.pt")
    torch.save({"input_ids": torch.tensor([[1, 2, 3], [4, 5, 6]])}, tmp_path / "columns.pt")
    for name in ("list.pt", "columns.pt"):
        for reading in ("ahead", "stream"):
            loader = build_loader(str(tmp_path / name), seq_len=2, packing="pad", shuffle=False, reading=reading)
            assert [rows_of(next(loader)) for _ in range(3)] == [[(1, 2)], [(4, 5)], [(1, 2)]]
            loader.close()
    torch.save({"input_ids": [[1]], "labels": []}, tmp_path / "columns.pt")
    torch.save([[1, 2]], tmp_path / "list.pt")
    (tmp_path / "text.pt").write_text("hello")
    for name, fact in {
        "columns.pt": "has columns of 0, 1 documents; save columns of equal length",
        "list.pt": "document 0 is a list, not a mapping of fields; save a list of mappings",
        "text.pt": r"cannot be read \(",
    }.items():
        with pytest.raises(ConfigError, match=rf"^dataloader\.path: {tmp_path / name} {fact}"):
            build_loader(str(tmp_path / name), seq_len=2)


# Pairs of .bin and .idx


@pytest.fixture
def pair(tmp_path):
    with IndexedWriter(tmp_path / "pair", dtype="int32") as writer:
        for document in ([1000, 1001, 1002, 9], [], [1003, 9], [1004, 1005, 1006, 1007, 1008, 9]):
            writer.add_document(document)
    return str(tmp_path / "pair")


@pytest.mark.parametrize("packing", ["concat", "pad", "best_fit"])
@pytest.mark.parametrize("reading", ["ahead", "stream"])
def test_a_pair_is_trained_as_its_documents_are(pair, tmp_path, packing, reading):
    from tests.components.data.numbers import write_documents

    documents = [[1000, 1001, 1002], [1003], [1004, 1005, 1006, 1007, 1008]]
    text = write_documents(tmp_path / "same.jsonl", documents)
    options = {"seq_len": 3, "batch": 2, "packing": packing, "shuffle": False, "reading": reading}
    loaders = [build_loader(path, **options) for path in (pair, text)]
    for _ in range(6):
        items = [next(loader) for loader in loaders]
        for name in ("input_ids", "labels", "position_ids"):
            assert items[0][0][name].tolist() == items[1][0][name].tolist()
    for loader in loaders:
        loader.close()


def test_a_pair_is_mapped_and_not_copied(pair):
    loader = build_loader(pair, seq_len=3, packing="pad")
    assert not loader._numbered._documents.token_ids.flags.owndata
    assert not loader._numbered._documents.token_ids.flags.writeable
    cut = build_loader(pair, seq_len=3, packing="pad", documents=3, shuffle=False)
    assert cut.rows_per_epoch == 2


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_id_of_a_pair_beyond_the_vocabulary_is_never_trained(tmp_path, num_workers):
    with IndexedWriter(tmp_path / "wide", dtype="int32") as writer:
        writer.add_document([5, 100_000, 9])
    loader = build_loader(str(tmp_path / "wide"), seq_len=2, packing="pad", num_workers=num_workers)
    with pytest.raises(
        ConfigError, match=r"^dataloader\.path: the data holds the token id 100000, and the tokenizer's go "
    ):
        next(loader)
    loader.close()
