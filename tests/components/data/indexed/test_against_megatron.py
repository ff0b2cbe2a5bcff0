"""Files and samples, token for token, against the package megatron-core."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from hyper_parallel.components.data.indexed import IndexedDataset, IndexedWriter
from tests.components.data.indexed import megatron
from tests.components.data.indexed.pairs import random_documents, samples, write_pair

DTYPES = [np.uint8, np.int8, np.int16, np.int32, np.int64, np.float64, np.float32, np.uint16]


def assert_same_files(ours: Path, theirs: Path) -> None:
    for ending in ("bin", "idx"):
        assert Path(f"{ours}.{ending}").read_bytes() == Path(f"{theirs}.{ending}").read_bytes(), ending


def assert_same_samples(ours, theirs) -> None:
    assert len(ours) == len(theirs)
    for k in range(len(ours)):
        for name, expected in megatron.as_ours(theirs[k]).items():
            assert torch.equal(ours[k][name], expected), (k, name)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
def test_the_same_documents_are_the_same_bytes(tmp_path, dtype):
    documents = random_documents(50, ids=127)
    write_pair(tmp_path / "ours", documents, dtype)
    megatron.write_pair(tmp_path / "theirs", documents, dtype)
    assert_same_files(tmp_path / "ours", tmp_path / "theirs")


def test_documents_of_several_sequences_and_modes_are_the_same_bytes(tmp_path):
    documents = [[1, 2, 3, 4, 5], [], [6], [7, 8]]
    lengths = [[2, 3], [], [1], [0, 2]]
    modes = [[0, 1], [], [1], [1, 0]]
    for name, own_modes in (("plain", None), ("modes", modes)):
        writer = IndexedWriter(tmp_path / name)
        for number, document in enumerate(documents):
            writer.add_document(document, lengths[number], own_modes and own_modes[number])
        writer.finalize()
        megatron.write_pair(tmp_path / f"{name}-theirs", documents, lengths=lengths, modes=own_modes)
        assert_same_files(tmp_path / name, tmp_path / f"{name}-theirs")
        dataset = IndexedDataset(tmp_path / f"{name}-theirs")
        assert [document.tolist() for document in dataset] == documents
        assert [dataset.sequence(s).tolist() for s in range(5)] == [[1, 2], [3, 4, 5], [6], [], [7, 8]]
        assert dataset.document_bounds.tolist() == [0, 2, 2, 3, 5]
        assert (dataset.sequence_modes is None) is (own_modes is None)
    assert dataset.sequence_modes.tolist() == [0, 1, 1, 1, 0]


def test_their_files_are_read(tmp_path):
    documents = random_documents(50)
    dataset = IndexedDataset(megatron.write_pair(tmp_path / "theirs", documents, np.uint16))
    assert [document.tolist() for document in dataset] == documents
    assert dataset.dtype == np.uint16


@pytest.mark.parametrize("seq_len", [1, 7, 64, 1000])
@pytest.mark.parametrize("num_samples", [None, 1, 30, 2500])
def test_samples_and_their_order_are_the_same(tmp_path, seq_len, num_samples):
    prefix = write_pair(tmp_path / "data", random_documents(200))
    for seed in (1, 1234):
        sizes = {"seq_len": seq_len, "seed": seed, "num_samples": num_samples}
        assert_same_samples(samples(prefix, **sizes), megatron.build([prefix], tmp_path / "cache", **sizes))


@pytest.mark.parametrize(
    ("split", "split_name"),
    [
        ("98,1,1", "train"), ("98,1,1", "valid"), ("98,1,1", "test"), ("969, 30, 1", "valid"), ("50,50", "train"),
        ("50,50", "valid"), ("0,1,2", "valid"), ("0,1,2", "test"),
    ],
)  # fmt: skip
def test_splits_are_the_same(tmp_path, split, split_name):
    prefix = write_pair(tmp_path / "data", random_documents(2001, longest=20))
    sizes = {"split": split, "split_name": split_name, "num_samples": 100}
    assert_same_samples(samples(prefix, **sizes), megatron.build([prefix], tmp_path / "cache", **sizes))


@pytest.mark.parametrize("flags", list(itertools.product([False, True], repeat=2)))
def test_ends_of_documents_are_handled_the_same(tmp_path, flags):
    prefix = write_pair(tmp_path / "data", random_documents(100, longest=9))
    chosen = dict(zip(("reset_position_ids", "eod_mask_loss"), flags, strict=True))
    sizes = {"seq_len": 24, **chosen}
    assert_same_samples(samples(prefix, **sizes), megatron.build([prefix], tmp_path / "cache", **sizes))


def test_attention_begins_anew_at_the_same_tokens(tmp_path):
    prefix = write_pair(tmp_path / "data", random_documents(100, longest=9))
    ours = samples(prefix, seq_len=24, reset_attention_mask=True)
    theirs = megatron.build([prefix], tmp_path / "cache", seq_len=24, reset_attention_mask=True)
    assert len(ours) == len(theirs) > 10
    for k in range(len(ours)):
        segments = ours[k]["segment_starts"].cumsum(0)
        attends = (segments[:, None] == segments) & torch.ones(24, 24).tril().bool()
        assert torch.equal(attends, ~theirs[k]["attention_mask"][0])


def test_a_last_short_sample_is_the_same(tmp_path):
    prefix = write_pair(tmp_path / "data", [list(range(1, 13))] * 3 + [[20]])
    ours = samples(prefix, drop_last=False, seq_len=5, split="0,1", split_name="valid")
    theirs = megatron.build(
        [prefix], tmp_path / "cache", seq_len=5, split="0,1", split_name="valid",
        drop_last_partial_validation_sequence=False,
    )  # fmt: skip
    short = [k for k in range(len(ours)) if (ours[k]["labels"] == -100).any()]
    assert len(short) == 1
    # Theirs is read last where it is short: reading it first spoils the loss mask of all others.
    for k in sorted(range(len(theirs)), key=lambda k: k in short):
        for name, expected in megatron.as_ours(theirs[k]).items():
            assert torch.equal(ours[k][name], expected), (k, name)
    assert len(ours) == len(theirs) == 8


@pytest.mark.parametrize("weights", [(0.7, 0.3), (1, 1, 1), (0.999, 0.001), (5, 0.25, 13)])
@pytest.mark.parametrize("num_samples", [10, 777])
def test_blends_are_the_same(tmp_path, weights, num_samples):
    prefixes = [write_pair(tmp_path / f"data{i}", random_documents(30 + 40 * i, seed=i)) for i, _ in enumerate(weights)]
    ours = samples(list(zip(weights, prefixes, strict=True)), num_samples=num_samples)
    assert_same_samples(ours, megatron.build(prefixes, tmp_path, weights=weights, num_samples=num_samples))


def test_the_surplus_that_a_blend_builds_is_the_same(tmp_path):
    # Each pair has the 100 samples that are taken of it, but half a percent more is a second epoch.
    prefixes = [
        write_pair(tmp_path / name, [list(range(first, first + 5)) for first in range(1, 400, 5)] + [[401]])
        for name in ("one", "two")
    ]
    ours = samples([(1, prefix) for prefix in prefixes], num_samples=200)
    assert [member.plan.epochs for member in ours._members] == [2, 2]
    assert_same_samples(ours, megatron.build(prefixes, tmp_path, weights=(1, 1), num_samples=200))


@pytest.mark.parametrize("num_samples", [None, 100, 10**6])
def test_blends_by_size_are_the_same(tmp_path, num_samples):
    prefixes = [write_pair(tmp_path / f"data{i}", random_documents(20 + 90 * i, seed=i)) for i in range(3)]
    ours = samples(" ".join(prefixes), num_samples=num_samples)
    assert_same_samples(ours, megatron.build(prefixes, tmp_path, num_samples=num_samples))
