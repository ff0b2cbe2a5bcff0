from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hyper_parallel.components.data.indexed.blend import Blend, blend_order, places_within
from hyper_parallel.config.errors import ConfigError
from tests.components.data.indexed.pairs import write_pair


@pytest.mark.parametrize(
    ("spec", "prefixes", "weights"),
    [
        ("one", ["one"], None),
        (Path("one"), ["one"], None),
        ("one two", ["one", "two"], None),
        (["one", "two"], ["one", "two"], None),
        ("30 one 10 two", ["one", "two"], [0.75, 0.25]),
        (["0.75", "one", ".25", "two"], ["one", "two"], [0.75, 0.25]),
        ([(3, "one"), (1, Path("two"))], ["one", "two"], [0.75, 0.25]),
        ([["one", 3], ["two", 1.0]], ["one", "two"], [0.75, 0.25]),
        ("1 one", ["one"], [1.0]),
    ],
)
def test_a_blend_is_read_however_it_is_written(spec, prefixes, weights):
    assert Blend.parse(spec) == (prefixes, weights)


def test_a_prefix_may_hold_blanks(tmp_path):
    prefix = write_pair(tmp_path / "1 my data", [[1]])
    assert Blend.parse(prefix) == ([prefix], None)


@pytest.mark.parametrize(
    ("spec", "fact"),
    [
        ("0.5 one two", "weights and prefixes do not alternate"),
        ("one 0.5 two 0.5", "weights and prefixes do not alternate"),
        ("0.5 one x two", "'x' stands where a weight should"),
        ("0 one 1 two", "the weight 0 is not a positive number"),
        ("nan one 1 two", "the weight nan is not a positive number"),
        ([(1, "one", 2)], "(1, 'one', 2) is no pair of a weight and a prefix"),
        ("", "weights and prefixes do not alternate"),
    ],
)
def test_what_is_no_blend_is_refused(spec, fact):
    with pytest.raises(ConfigError) as caught:
        Blend.parse(spec)
    assert str(caught.value) == (
        f'prefix: {fact} in {spec!r}; give "prefix", "0.7 prefix 0.3 prefix" or a list of pairs (weight, prefix)'
    )


def test_the_one_furthest_behind_comes_next():
    order = blend_order([0.7, 0.3], None, 10)
    assert order.tolist() == [0, 1, 0, 0, 1, 0, 0, 1, 0, 0]
    assert places_within(order, 2).tolist() == [0, 0, 1, 2, 1, 3, 4, 2, 5, 6]


def test_a_data_set_that_has_given_all_gives_no_more():
    order = blend_order([0.5, 0.5], [2, 6], 8)
    assert np.bincount(order).tolist() == [2, 6]
    assert order[4:].tolist() == [1, 1, 1, 1]
