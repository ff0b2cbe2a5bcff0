from __future__ import annotations

from hyper_parallel.components.data.order import epoch_permutation


def test_the_order_is_the_same_on_every_platform():
    """Written down once: raw Philox output may never change, so neither may these."""
    assert epoch_permutation("rows", 10, 42, 0).tolist() == [0, 2, 6, 9, 3, 5, 4, 8, 7, 1]
    assert epoch_permutation("documents", 10, 42, 0).tolist() == [7, 1, 6, 4, 3, 5, 9, 0, 2, 8]


def test_the_order_differs_by_seed_epoch_and_stream():
    orders = [
        tuple(epoch_permutation(stream, 10, seed, epoch).tolist())
        for stream in ("documents", "rows")
        for seed in (42, 43)
        for epoch in (0, 1)
    ]
    assert len(set(orders)) == 8
    assert all(sorted(order) == list(range(10)) for order in orders)
    assert tuple(epoch_permutation("documents", 10, 42, 0).tolist()) == orders[0]


def test_without_a_seed_the_order_is_that_of_the_file():
    assert epoch_permutation("rows", 5, None, 3).tolist() == [0, 1, 2, 3, 4]


def test_every_place_is_equally_likely():
    counts = [0] * 8
    for epoch in range(4000):
        counts[epoch_permutation("rows", 8, 1, epoch).tolist().index(0)] += 1
    # 500 each are expected, with a standard deviation of 21.
    assert all(abs(count - 500) < 100 for count in counts)
