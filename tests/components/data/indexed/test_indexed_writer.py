from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.components.data.indexed import IndexedDataset, IndexedWriter, indexed_writer
from tests.components.data.indexed.pairs import counted_documents, random_documents, write_pair


def documents_of(prefix) -> list[list[int]]:
    return [document.tolist() for document in IndexedDataset(prefix)]


def files_of(folder) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


def test_nothing_stands_under_the_final_names_before_the_end(tmp_path):
    writer = IndexedWriter(tmp_path / "data")
    writer.add_document([1, 2])
    writer.checkpoint()
    assert files_of(tmp_path) == {}
    writer.finalize()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.bin", "data.idx"]
    assert documents_of(tmp_path / "data") == [[1, 2]]


def test_an_error_leaves_the_older_pair(tmp_path):
    write_pair(tmp_path / "data", [[1, 2]])
    before = files_of(tmp_path)
    with pytest.raises(ValueError, match="does not fit"), IndexedWriter(tmp_path / "data", np.uint8) as writer:
        writer.add_document([1])
        writer.add_document([256])
    assert files_of(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


@pytest.mark.parametrize(
    ("ids", "dtype", "message"),
    [
        ([5, 70000], np.uint16, "70000 at place 1 does not fit uint16"),
        (np.array([5, 70000]), np.uint16, "70000 at place 1 does not fit uint16"),
        ([-1], np.uint16, "-1 at place 0 does not fit uint16"),
        ([2**31], np.int32, "2147483648 at place 0 does not fit int32"),
        ([1.5], np.int32, "1.5 at place 0 does not fit int32"),
        ([float("nan")], np.int32, "nan at place 0 does not fit int32"),
        ([[1, 2]], np.int32, r"a document is one list of token ids, not an array \[1, 2\] of int64"),
        (["1"], np.int32, r"a document is one list of token ids, not an array \[1\] of <U1"),
    ],
)
def test_ids_that_the_dtype_cannot_hold_are_refused(tmp_path, ids, dtype, message):
    with pytest.raises(ValueError, match=message), IndexedWriter(tmp_path / "data", dtype) as writer:
        writer.add_document(ids)


def test_a_dtype_without_code_is_refused(tmp_path):
    with pytest.raises(ValueError, match="uint32 cannot be written; choose one of uint8, int8, int16, int32"):
        IndexedWriter(tmp_path / "data", np.uint32)


def test_lengths_and_modes_must_fit_the_document(tmp_path):
    writer = IndexedWriter(tmp_path / "data")
    with pytest.raises(ValueError, match=r"sequence_lengths \[1, 1\] do not add up to a document of 3 tokens"):
        writer.add_document([1, 2, 3], [1, 1])
    with pytest.raises(ValueError, match="1 modes for 2 sequences"):
        writer.add_document([1, 2, 3], [1, 2], [0])
    with pytest.raises(ValueError, match="lengths add up to 4, but there are 3 tokens"):
        writer.add_documents([1, 2, 3], [2, 2])
    writer.add_document([1, 2, 3])
    with pytest.raises(ValueError, match="modes are given for some documents and not for others"):
        writer.add_document([4], modes=[1])


def test_many_documents_at_once_are_the_same_bytes(tmp_path):
    documents = [document for document in random_documents(300) if document]
    write_pair(tmp_path / "one", documents, np.uint16)
    with IndexedWriter(tmp_path / "many", np.uint16) as writer:
        for start in (0, 100):
            part = documents[start : start + 100]
            writer.add_documents(np.concatenate(part), list(map(len, part)))
        write_pair(tmp_path / "rest", documents[200:], np.uint16)
        writer.add_dataset(IndexedDataset(tmp_path / "rest"))
    for ending in ("bin", "idx"):
        assert (tmp_path / f"many.{ending}").read_bytes() == (tmp_path / f"one.{ending}").read_bytes()


def test_a_pair_of_another_dtype_is_not_added(tmp_path):
    other = IndexedDataset(write_pair(tmp_path / "other", [[1]], np.int64))
    with pytest.raises(ValueError, match="other holds int64 tokens or modes; only plain int32 is added"):
        IndexedWriter(tmp_path / "data").add_dataset(other)


def test_it_goes_on_from_a_checkpoint_whatever_came_after(tmp_path):
    documents = counted_documents([5, 0, 3, 7])
    write_pair(tmp_path / "straight", documents)
    writer = IndexedWriter(tmp_path / "data")
    for document in documents[:2]:
        writer.add_document(document)
    state = writer.checkpoint()
    writer.add_document([99] * 1000)
    writer.checkpoint()  # and then it is killed
    resumed = IndexedWriter(tmp_path / "data", state=state)
    for document in documents[2:]:
        resumed.add_document(document)
    resumed.finalize()
    for ending in ("bin", "idx"):
        assert (tmp_path / f"data.{ending}").read_bytes() == (tmp_path / f"straight.{ending}").read_bytes()


def test_a_state_of_more_than_there_is_is_refused(tmp_path):
    writer = IndexedWriter(tmp_path / "data")
    writer.add_document([1, 2])
    state = writer.checkpoint()
    writer.discard()
    with pytest.raises(ValueError, match="tokens has 0 bytes, fewer than the 8 of the state"):
        IndexedWriter(tmp_path / "data", state=state)


@pytest.mark.parametrize("steps", range(4))
def test_killed_between_the_last_steps_it_is_finished_by_the_next(tmp_path, monkeypatch, steps):
    write_pair(tmp_path / "data", [[9, 9, 9]])

    def killed(*_, **__):
        raise KeyboardInterrupt

    writer = IndexedWriter(tmp_path / "data")
    writer.add_document([1, 2])
    # The steps: the older index goes, the tokens come, the index comes, the folder goes.
    done = []
    for owner, name in (
        (indexed_writer.Path, "unlink"),
        (indexed_writer.Path, "replace"),
        (indexed_writer.shutil, "rmtree"),
    ):
        original = getattr(owner, name)

        def step(*arguments, original=original, **options):
            if len(done) == steps:
                killed()
            done.append(original)
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, step)
    with pytest.raises(KeyboardInterrupt):
        writer.finalize()
    monkeypatch.undo()
    assert len(done) == steps
    if (tmp_path / "data.idx").exists():  # whichever pair it is, it is whole
        assert documents_of(tmp_path / "data") == ([[9, 9, 9]] if steps == 0 else [[1, 2]])
    IndexedWriter(tmp_path / "data").discard()
    assert documents_of(tmp_path / "data") == [[1, 2]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.bin", "data.idx"]
