from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from hyper_parallel.components.data.collate import collate
from hyper_parallel.components.data.order import epoch_permutation
from hyper_parallel.components.data.packing import IGNORE_INDEX, ConcatPacking, PadPacking
from tests.components.data.numbers import EOS, PAD, counted_documents, tokenized

PACKINGS = {"concat": ConcatPacking, "pad": PadPacking}


def pack(kind: str, documents: list[list[int]], seq_len: int, seed: int | None = None):
    return PACKINGS[kind](tokenized(documents), seq_len=seq_len, pad_id=PAD, seed=seed)


def batch_of(packing, *samples: int) -> dict:
    return collate(packing.take(np.array(samples)))


def test_two_documents_of_three_and_four_tokens_in_one_row():
    batch = batch_of(pack("concat", [[1, 2], [4, 5, 6], [7]], seq_len=7), 0)
    assert batch["input_ids"].tolist() == [[1, 2, EOS, 4, 5, 6, EOS]]
    assert batch["cu_seqlens"] == [0, 3, 7]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3]]
    # The first token of a document, 4 and then 7, is not predicted from the end of the one before.
    assert batch["labels"].tolist() == [[2, EOS, -100, 5, 6, EOS, -100]]
    assert {batch[name].dtype for name in ("input_ids", "labels", "position_ids")} == {torch.int64}


def test_without_a_document_mask_a_row_is_one_segment_with_the_same_labels():
    packing = pack("concat", [[1, 2], [4, 5, 6], [7, 8, 9, 10]], seq_len=4)
    rows = packing.take(np.array([0, 1]))
    masked, whole = collate(rows), collate(rows, document_mask=False)
    assert masked["cu_seqlens"] == [0, 3, 4, 7, 8]
    assert whole["cu_seqlens"] == [0, 4, 8]
    assert whole["position_ids"].tolist() == [[0, 1, 2, 3]] * 2
    assert whole["labels"].tolist() == masked["labels"].tolist() == [[2, EOS, -100, 5], [6, EOS, -100, 8]]
    assert whole["input_ids"].tolist() == masked["input_ids"].tolist()


@pytest.mark.parametrize("kind", ["concat", "pad"])
def test_only_what_is_trained_has_a_label(kind):
    """Prompt 1 2 3, answer 4 5 and EOS; then a document of which all is trained."""
    masks = [[False, False, False, True, True, True], [True] * 3]
    documents = tokenized([[1, 2, 3, 4, 5], [6, 7]], masks)
    packing = PACKINGS[kind](documents, seq_len=8 if kind == "concat" else 5, pad_id=PAD, seed=None)
    labels = batch_of(packing, *range(packing.rows_per_epoch))["labels"].tolist()
    if kind == "concat":
        assert labels == [[-100, -100, 4, 5, EOS, -100, 7, EOS]]
    else:
        assert labels == [[-100, -100, 4, 5, EOS], [7, EOS, -100, -100, -100]]


def test_a_document_cut_by_the_end_of_a_row_goes_on_as_a_new_segment():
    packing = pack("concat", [[1, 2], [4, 5, 6], [7, 8]], seq_len=4)
    assert packing.rows_per_epoch == 2  # (10 tokens - 1) // 4
    batch = batch_of(packing, 0, 1)
    assert batch["input_ids"].tolist() == [[1, 2, EOS, 4], [5, 6, EOS, 7]]
    assert batch["labels"].tolist() == [[2, EOS, -100, 5], [6, EOS, -100, 8]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0], [0, 1, 2, 0]]
    assert batch["cu_seqlens"] == [0, 3, 4, 7, 8]


def test_padding_is_known_by_length_and_never_by_id():
    batch = batch_of(pack("pad", [[5, PAD, 6], [1, 2, 3, 4, 5]], seq_len=5), 0, 1)
    assert batch["input_ids"].tolist() == [[5, 0, 6, 0, 0], [1, 2, 3, 4, 5]]
    assert batch["labels"].tolist() == [[0, 6, EOS, -100, -100], [2, 3, 4, 5, EOS]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]]
    assert batch["cu_seqlens"] == [0, 3, 5, 10]


def test_a_long_document_fills_several_padded_rows():
    packing = pack("pad", [[1, 2, 3, 4, 5, 6, 7], [8]], seq_len=4)
    assert packing.rows_per_epoch == 3
    batch = batch_of(packing, 0, 1, 2)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4], [5, 6, 7, 0], [8, 0, 0, 0]]
    assert batch["labels"].tolist() == [[2, 3, 4, 5], [6, 7, EOS, -100], [EOS, -100, -100, -100]]
    assert batch["cu_seqlens"] == [0, 4, 7, 8, 9, 12]


def test_labels_are_shifted_exactly_once():
    """Prompt and answer 1 2 3 4 5 with EOS: five targets for six tokens, each the token that follows."""
    batch = batch_of(pack("pad", [[1, 2, 3, 4, 5]], seq_len=6), 0)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, PAD]]
    assert batch["labels"].tolist() == [[2, 3, 4, 5, EOS, IGNORE_INDEX]]


@pytest.mark.parametrize("seed", [None, 0, 7])
@pytest.mark.parametrize("seq_len", [1, 3, 8, 50])
def test_concat_agrees_with_lists(seq_len, seed):
    lengths = [1, 7, 2, 30, 1, 1, 12, 5, 3]
    documents = counted_documents(lengths)
    packing = pack("concat", documents, seq_len, seed)
    for epoch in (0, 1):
        order = epoch_permutation("documents", len(documents), seed, epoch)
        stream = [(token, d, i) for d in order for i, token in enumerate([*documents[d], EOS])]
        rows = epoch_permutation("rows", packing.rows_per_epoch, seed, epoch)
        first = epoch * packing.rows_per_epoch
        batch = batch_of(packing, *range(first, first + packing.rows_per_epoch))
        cu_seqlens = []
        for place, row in enumerate(rows):
            window = stream[row * seq_len : (row + 1) * seq_len + 1]
            assert len(window) == seq_len + 1
            positions = []
            for i, (_, document, _) in enumerate(window[:-1]):
                new = i == 0 or window[i - 1][1] != document
                positions.append(0 if new else positions[-1] + 1)
                cu_seqlens += [place * seq_len + i] if new else []
            labels = [b[0] if a[1] == b[1] else -100 for a, b in pairwise(window)]
            assert batch["input_ids"][place].tolist() == [token for token, _, _ in window[:-1]]
            assert batch["labels"][place].tolist() == labels
            assert batch["position_ids"][place].tolist() == positions
        assert batch["cu_seqlens"] == [*cu_seqlens, packing.rows_per_epoch * seq_len]


@pytest.mark.parametrize("seed", [None, 3])
def test_pad_trains_every_token_of_every_document_once_an_epoch(seed):
    documents = counted_documents([1, 7, 2, 30, 1, 12, 4, 8])
    packing = pack("pad", documents, seq_len=4, seed=seed)
    assert packing.rows_per_epoch == 1 + 2 + 1 + 8 + 1 + 3 + 1 + 2
    pairs = sorted(pair for ids in documents for pair in zip(ids, [*ids[1:], EOS], strict=True))
    for epoch in (0, 1):
        first = epoch * packing.rows_per_epoch
        batch = batch_of(packing, *range(first, first + packing.rows_per_epoch))
        trained = batch["labels"] != IGNORE_INDEX
        inputs, labels = batch["input_ids"][trained].tolist(), batch["labels"][trained].tolist()
        assert sorted(zip(inputs, labels, strict=True)) == pairs


def test_documents_of_unequal_length_train_unequal_numbers_of_tokens():
    documents = counted_documents([1, 1, 1, 9, 2, 3, 11])
    concat, pad = pack("concat", documents, seq_len=8), pack("pad", documents, seq_len=8)
    assert (batch_of(concat, 0, 1, 2)["labels"] >= 0).sum(1).tolist() == [5, 7, 6]
    assert (batch_of(pad, *range(9))["labels"] >= 0).sum(1).tolist() == [1, 1, 1, 8, 1, 2, 3, 8, 3]


def test_samples_of_two_epochs_in_one_batch():
    packing = pack("concat", counted_documents([3, 4, 5, 6, 7]), seq_len=4, seed=1)
    edge = packing.rows_per_epoch
    both = packing.take(np.arange(edge - 2, edge + 2))
    apart = [packing.take(np.array([sample])) for sample in range(edge - 2, edge + 2)]
    for name in both._fields:
        np.testing.assert_array_equal(getattr(both, name), np.concatenate([getattr(one, name) for one in apart]))
