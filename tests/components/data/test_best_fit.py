from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.components.data.best_fit import BestFitPacking, balanced, best_fit
from hyper_parallel.components.data.collate import collate
from tests.components.data.numbers import EOS, PAD, counted_documents, tokenized


def pack(documents, seq_len: int, *, trained=None, **options) -> BestFitPacking:
    options = {"seed": None} | options
    return BestFitPacking(tokenized(documents, trained), seq_len=seq_len, pad_id=PAD, **options)


def test_the_longest_is_placed_first_where_the_least_room_is():
    # 6 opens a row, 5 another; 3 goes beside 5, where 3 are left of 8, not beside 6, where 2 are; then 2 beside 6.
    assert best_fit(np.array([3, 6, 2, 5, 1]), 8) == [[1, 2], [3, 0], [4]]
    assert best_fit(np.array([], np.int64), 8) == []


def test_rows_of_whole_documents():
    batch = collate(pack([[1, 2, 3, 4], [5], [6, 7]], seq_len=6).take(np.array([0, 1])))
    # Inputs are all but the EOS, which is a label only: 4 and 2 fill a row, 1 stands alone.
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 6, 7], [5, 0, 0, 0, 0, 0]]
    assert batch["labels"].tolist() == [[2, 3, 4, EOS, 7, EOS], [EOS, -100, -100, -100, -100, -100]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1], [0, 0, 1, 2, 3, 4]]
    assert batch["cu_seqlens"] == [0, 4, 6, 7, 12]


@pytest.mark.parametrize("cost", ["total", "trained"])
def test_no_document_is_cut_and_none_lost_or_doubled(cost):
    lengths = np.random.default_rng(0).integers(1, 33, 300)
    documents = counted_documents(lengths.tolist())
    packing = pack(documents, seq_len=32, cost=cost, seed=3)
    batch = collate(packing.take(np.arange(packing.rows_per_epoch)))
    flat, labels = batch["input_ids"].reshape(-1), batch["labels"].reshape(-1)
    found = []
    for start, end in zip(batch["cu_seqlens"], batch["cu_seqlens"][1:], strict=False):
        if labels[start] != -100:  # not padding
            found.append(flat[start:end].tolist())
            assert labels[start:end].tolist() == [*found[-1][1:], EOS]
    assert sorted(found) == sorted(documents)


def test_rows_are_nearly_as_few_as_can_be():
    lengths = np.random.default_rng(1).integers(1, 65, 2000)
    least = -(-lengths.sum() // 64)
    assert len(best_fit(lengths, 64)) <= 1.01 * least


def test_a_document_that_fits_in_no_row_is_cut_into_full_rows_and_a_rest():
    packing = pack([list(range(10, 21)), [3, 4]], seq_len=4)
    rows = packing.take(np.arange(packing.rows_per_epoch))
    assert rows.input_ids_BT.tolist() == [[10, 11, 12, 13], [14, 15, 16, 17], [18, 19, 20, PAD], [3, 4, PAD, PAD]]
    assert rows.labels_BT.tolist() == [[11, 12, 13, 14], [15, 16, 17, 18], [19, 20, EOS, -100], [4, EOS, -100, -100]]


def test_the_dearest_goes_to_the_row_that_is_cheapest_so_far():
    lengths, costs = np.array([4, 4, 4, 4]), np.array([3, 1, 2, 3])
    assert balanced(lengths, costs, 8, rows=2) == [[0, 2], [3, 1]]
    assert balanced(np.array([5, 5, 5]), costs[:3], 8, rows=2) == [[0], [2], [1]]  # a third row is opened


def test_rows_train_about_as_many_tokens_when_that_is_the_cost():
    generator = np.random.default_rng(2)
    lengths = generator.integers(4, 20, 400)
    documents = counted_documents(lengths.tolist())
    prompts = [generator.integers(0, n) for n in lengths]
    trained = [[i > prompt for i in range(n + 1)] for n, prompt in zip(lengths, prompts, strict=True)]
    spread, rows = {}, {}
    for cost in ("total", "trained"):
        packing = pack(documents, seq_len=64, trained=trained, cost=cost)
        labels = packing.take(np.arange(packing.rows_per_epoch)).labels_BT
        spread[cost], rows[cost] = float(np.std((labels != -100).sum(1))), packing.rows_per_epoch
        assert (labels != -100).sum() == sum(sum(mask[1:]) for mask in trained)
    assert spread["trained"] < 0.5 * spread["total"]
    assert rows["trained"] <= rows["total"] * 1.03 + 1


def test_another_epoch_is_another_order_of_the_same_rows():
    packing = pack(counted_documents([3, 5, 2, 8, 4, 7, 1, 6, 3, 3]), seq_len=8, seed=1)
    n = packing.rows_per_epoch
    first, second = (packing.take(np.arange(e * n, e * n + n)).input_ids_BT.tolist() for e in (0, 1))
    assert first != second
    assert sorted(first) == sorted(second)
