from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.components.data.indexed.pair_format import smallest_dtype
from hyper_parallel.components.data.indexed.sample_indices import SamplePlan


def plan_of(lengths, *, seq_len=4, num_samples=None, drop_last=True, seed=7) -> SamplePlan:
    lengths = np.asarray(lengths, np.int32)
    return SamplePlan.of(
        lengths, 0, len(lengths), seq_len=seq_len, seed=seed, num_samples=num_samples, drop_last=drop_last
    )


@pytest.mark.parametrize(
    ("lengths", "num_samples", "epochs", "samples"),
    [
        ([5, 7, 3], None, 1, 3),
        ([5, 7, 3], 3, 1, 3),
        ([5, 7, 3], 4, 2, 7),  # (2 * 15 - 1) // 4
        ([17], 4, 1, 4),  # 4 * 4 + 1 tokens are just enough
        ([16], 4, 2, 7),
        ([1], 1, 5, 1),
    ],
)
def test_the_fewest_epochs_that_give_the_samples(lengths, num_samples, epochs, samples):
    plan = plan_of(lengths, num_samples=num_samples)
    assert (plan.epochs, plan.num_samples) == (epochs, samples)


def test_a_last_epoch_of_which_little_is_needed_is_shuffled_by_itself():
    # 9 samples an epoch; of the second one 7.2 is the bound.
    assert plan_of([37], num_samples=9 + 6).separate_last_epoch
    assert not plan_of([37], num_samples=9 + 7).separate_last_epoch
    indices = plan_of([5] * 100, num_samples=130).build(np.full(100, 5, np.int32))
    assert sorted(indices.document_index[:100].tolist()) == list(range(100))
    assert sorted(indices.shuffle_index[:124].tolist()) == list(range(124))


def test_the_number_of_short_samples_is_exact_beyond_single_precision():
    # 2 ** 24 + 1 is no float32.
    assert plan_of([2**24 + 2], seq_len=2, drop_last=False).num_samples == 8_388_609


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_499, np.uint16), (65_500, np.int32), (65_536, np.int32)])
def test_the_dtype_is_that_of_megatrons_tools(vocab_size, dtype):
    assert smallest_dtype(vocab_size) == dtype


def test_windows_overlap_by_one_token_and_skip_empty_sequences():
    lengths = np.array([0, 5, 0, 7, 3, 0], np.int32)
    plan = SamplePlan.of(lengths, 0, 6, seq_len=4, seed=1, num_samples=None, drop_last=True)
    index = plan._sample_index(lengths)
    assert index.tolist() == [[1, 0], [1, 4], [3, 3], [4, 0]]


def test_a_short_last_window_ends_with_the_data():
    plan = plan_of([5, 7, 3], drop_last=False)
    assert plan._sample_index(np.array([5, 7, 3])).tolist() == [[0, 0], [0, 4], [1, 3], [2, 0], [2, 2]]
