from __future__ import annotations

import gc
import pickle
import shutil
import struct
import tracemalloc

import numpy as np
import pytest

from hyper_parallel.components.data.indexed import IndexedDataset, IndexedWriter
from hyper_parallel.config.errors import ConfigError
from tests.components.data.indexed.pairs import counted_documents, write_pair


def test_documents_are_read_by_number(tmp_path):
    documents = counted_documents([5, 0, 3])
    dataset = IndexedDataset(write_pair(tmp_path / "data", documents, np.uint16))
    assert len(dataset) == 3
    assert [document.tolist() for document in dataset] == documents
    assert dataset[-1].tolist() == dataset[np.int64(2)].tolist() == [6, 7, 8]
    assert [document.tolist() for document in dataset[1:]] == documents[1:]
    assert dataset.tokens.tolist() == list(range(1, 9))
    assert dataset.document_offsets.tolist() == [0, 5, 5, 8]
    assert dataset.sequence_lengths.tolist() == [5, 3]  # an empty document is no sequence
    assert dataset.document_bounds.tolist() == [0, 1, 1, 2]
    assert dataset.dtype == np.uint16
    assert dataset.sequence_modes is None
    for number in (3, -4):
        with pytest.raises(IndexError, match=rf"document {number} of 3 in .*data"):
            dataset[number]


def test_a_pair_without_documents(tmp_path):
    dataset = IndexedDataset(write_pair(tmp_path / "data", []))
    assert len(dataset) == len(dataset.tokens) == 0
    assert dataset.document_offsets.tolist() == [0]


def test_what_was_read_outlives_the_dataset(tmp_path):
    document = IndexedDataset(write_pair(tmp_path / "data", [[1, 2, 3]]))[0]
    gc.collect()
    assert document.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        document[0] = 9


def test_pickled_it_is_its_prefix(tmp_path):
    dataset = IndexedDataset(write_pair(tmp_path / "data", [[1] * 100_000]))
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 1000
    assert pickle.loads(pickled)[0].tolist() == [1] * 100_000


def test_the_fingerprint_is_that_of_the_content(tmp_path):
    documents = counted_documents([700, 40_000, 3])
    prefix = write_pair(tmp_path / "data", documents)
    fingerprint = IndexedDataset(prefix).fingerprint
    for ending in ("bin", "idx"):
        shutil.copy(f"{prefix}.{ending}", tmp_path / f"copy.{ending}")
    assert IndexedDataset(tmp_path / "copy").fingerprint == fingerprint
    others = {
        "last token": [*documents[:2], [*documents[2][:-1], 1]],
        "bounds": [documents[0] + documents[1], documents[2]],
        "order": documents[::-1],
    }
    for name, other in others.items():
        assert IndexedDataset(write_pair(tmp_path / "other", other)).fingerprint != fingerprint, name
    assert IndexedDataset(write_pair(tmp_path / "other", documents, np.int64)).fingerprint != fingerprint


def test_memory_does_not_grow_with_the_data(tmp_path):
    peaks = {"write": [], "read": []}
    for millions in (3, 6):
        prefix = tmp_path / f"{millions}"
        tracemalloc.start()
        with IndexedWriter(prefix, np.uint16) as writer:
            for _ in range(millions):
                writer.add_documents(np.ones(1_000_000, np.uint16), np.ones(1_000_000, np.int32))
        peaks["write"].append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        tracemalloc.start()
        dataset = IndexedDataset(prefix)
        assert dataset.fingerprint
        assert dataset[millions * 1_000_000 - 1].tolist() == [1]
        peaks["read"].append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    for small, large in peaks.values():
        assert large < small + 100_000, peaks


def damage(tmp_path, change_idx=None, change_bin=None) -> str:
    """What is said of a pair of documents [5, 0, 3] of int32 after a change to its files."""
    prefix = write_pair(tmp_path / "data", counted_documents([5, 0, 3]))
    for ending, change in (("idx", change_idx), ("bin", change_bin)):
        if change is not None:
            file = tmp_path / f"data.{ending}"
            file.write_bytes(change(file.read_bytes()))
    with pytest.raises(ConfigError) as caught:
        IndexedDataset(prefix)
    return str(caught.value).replace(str(tmp_path), "")


def put(offset: int, kind: str, value: int):
    """A change of one number."""
    return lambda data: data[:offset] + struct.pack(f"<{kind}", value) + data[offset + struct.calcsize(kind) :]


# The index: 34 bytes of header, lengths from 34, pointers from 42, bounds from 58, 90 bytes in all.
AGAIN = "; prepare the data anew, or copy both files again"
DAMAGES = {
    "empty": (lambda data: b"", "/data.idx: has 0 bytes, and its header alone takes 34" + AGAIN),
    "magic": (
        lambda data: b"TNTIDX\0\0\0" + data[9:],
        "/data.idx: begins with b'TNTIDX\\x00\\x00\\x00', not with b'MMIDIDX\\x00\\x00'; give an index of Megatron's "
        "format",
    ),
    "version": (put(9, "Q", 2), "/data.idx: has version 2, and only 1 is known; prepare the data anew"),
    "code": (put(17, "B", 9), "/data.idx: has the unknown dtype code 9" + AGAIN),
    "other dtype": (
        put(17, "B", 8),
        "/data.idx: puts sequence 1 at byte 20, but the uint16 tokens before it end at byte 10" + AGAIN,
    ),
    "no bounds": (put(26, "Q", 0), "/data.idx: has no document bounds, not even that of 0 documents" + AGAIN),
    "truncated": (
        lambda data: data[:-1],
        "/data.idx: has 89 bytes, but its header says 2 sequences and 3 documents, which take 90 bytes (92 with modes)"
        + AGAIN,
    ),
    "negative length": (put(38, "i", -3), "/data.idx: gives sequence 1 a length of -3" + AGAIN),
    "wrong length": (
        put(34, "i", 4),
        "/data.idx: puts sequence 1 at byte 20, but the int32 tokens before it end at byte 16" + AGAIN,
    ),
    "wrong pointer": (
        put(42, "q", 4),
        "/data.idx: puts sequence 0 at byte 4, but the int32 tokens before it end at byte 0" + AGAIN,
    ),
    "last bound": (put(82, "q", 1), "/data.idx: has documents from sequence 0 to 1, but 2 sequences" + AGAIN),
    "falling bounds": (put(66, "q", 2), "/data.idx: ends document 1 before it begins" + AGAIN),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_index_is_refused(tmp_path, name):
    change, message = DAMAGES[name]
    assert damage(tmp_path, change_idx=change) == message


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"\0", lambda data: b""])
def test_data_of_another_length_are_refused(tmp_path, change):
    found = len(change(bytes(32)))
    assert damage(tmp_path, change_bin=change) == (
        f"/data.bin: has {found} bytes, but /data.idx says 32 bytes of int32" + AGAIN
    )


def test_missing_files_are_named(tmp_path):
    remedy = "does not exist; give the prefix of a pair PREFIX.bin, PREFIX.idx, without the endings"
    with pytest.raises(ConfigError) as caught:
        IndexedDataset(tmp_path / "data")
    assert str(caught.value) == f"{tmp_path}/data.idx: {remedy}"
    write_pair(tmp_path / "data", [[1]])
    (tmp_path / "data.bin").unlink()
    with pytest.raises(ConfigError) as caught:
        IndexedDataset(tmp_path / "data")
    assert str(caught.value) == f"{tmp_path}/data.bin: {remedy}"


def test_modes_are_found_without_being_told(tmp_path):
    with IndexedWriter(tmp_path / "data") as writer:
        writer.add_document([1, 2, 3], [1, 2], [0, 1])
    assert IndexedDataset(tmp_path / "data").sequence_modes.tolist() == [0, 1]
