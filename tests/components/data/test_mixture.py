from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.components.data.mixture import Mixture
from hyper_parallel.components.data.packing import PadPacking
from hyper_parallel.components.data.sources import JsonLinesSource
from hyper_parallel.config.errors import ConfigError
from tests.components.data.numbers import build_loader, counted_documents, rows_of, tokenized, write_documents


def packing(rows: int, first: int, seed: int | None = None) -> PadPacking:
    """Rows of one token each: `first`, `first` + 1, ..."""
    return PadPacking(tokenized([[first + i] for i in range(rows)]), seq_len=1, pad_id=0, seed=seed)


def mixture(rows=(6, 3), shares=(0.5, 0.5), stopping="repeat", seed: int | None = None) -> Mixture:
    packings = [packing(n, 1000 * (i + 1), seed) for i, n in enumerate(rows)]
    return Mixture(packings, shares, stopping=stopping, seed=seed)


def drawn(mix: Mixture, start: int, end: int) -> list[int]:
    return mix.take(np.arange(start, end)).input_ids_BT[:, 0].tolist()


def test_seven_and_three_of_ten():
    for seed in (None, 0, 1, 2):
        sources, _ = mixture((70, 30), (0.7, 0.3), seed=seed).sources_of(np.arange(100))
        assert [np.count_nonzero(sources[i : i + 10] == 0) for i in range(0, 100, 10)] == [7] * 10


def test_repeat_goes_on_where_each_source_stood():
    mix = mixture((6, 3), (0.5, 0.5), "repeat")
    assert mix.rows_per_epoch == 9  # five and four of them, as ties go to the first
    rows = drawn(mix, 0, 27)
    assert [r for r in rows if r < 2000] == [1000 + i % 6 for i in range(15)]
    assert [r for r in rows if r >= 2000] == [2000 + i % 3 for i in range(12)]


def test_first_exhausted_ends_with_the_shorter_and_begins_all_anew():
    mix = mixture((6, 3), (0.5, 0.5), "first_exhausted")
    assert mix.rows_per_epoch == 6
    for epoch in range(3):
        assert sorted(drawn(mix, 6 * epoch, 6 * epoch + 6)) == [1000, 1001, 1002, 2000, 2001, 2002]


def test_all_exhausted_ends_with_the_longer_and_repeats_the_shorter():
    mix = mixture((6, 3), (0.5, 0.5), "all_exhausted")
    assert mix.rows_per_epoch == 12
    for epoch in range(2):
        rows = drawn(mix, 12 * epoch, 12 * epoch + 12)
        assert sorted(rows) == [*range(1000, 1006), 2000, 2000, 2001, 2001, 2002, 2002]


def test_what_comes_next_depends_on_the_seed_and_the_number_of_rows_alone():
    rows = drawn(mixture(seed=7), 0, 40)
    assert [drawn(mixture(seed=7), i, i + 1)[0] for i in range(40)] == rows
    assert drawn(mixture(seed=8), 0, 40) != rows
    assert rows[:9] != rows[9:18]


def test_every_prefix_has_the_shares():
    shares = np.array([0.6, 0.3, 0.1])
    sources, _ = mixture((60, 60, 60), tuple(shares), seed=3).sources_of(np.arange(180))
    for n in range(1, 181):
        counts = np.bincount(sources[:n], minlength=3)
        assert abs(counts - n * shares).max() <= 1.5


def test_a_share_of_less_than_a_row_is_refused():
    with pytest.raises(ConfigError) as caught:
        mixture((20, 1), (0.999, 0.001))
    assert str(caught.value) == (
        "dataloader.weights: an epoch of 21 rows holds none of source 1, whose share is 0.001; "
        "give it more weight, or leave it out"
    )


# In the loader


def sources(tmp_path, *lengths: list[int]) -> tuple[JsonLinesSource.Config, ...]:
    return tuple(
        JsonLinesSource.Config(path=write_documents(tmp_path / f"{i}.jsonl", counted_documents(each, 10_000 * (i + 1))))
        for i, each in enumerate(lengths)
    )


def steps_of(loader, count: int) -> list[list[tuple[int, ...]]]:
    steps = [rows_of(next(loader)) for _ in range(count)]
    loader.close()
    return steps


@pytest.mark.parametrize("reading", ["ahead", "stream"])
@pytest.mark.parametrize(("weigh_by", "share"), [("tokens", 0.75), ("samples", 0.75 * 12 / (0.75 * 12 + 0.25 * 3))])
def test_weights_are_of_tokens_or_of_documents(tmp_path, reading, weigh_by, share):
    """Documents of 3 and of 12 tokens, EOS included: as many documents are a quarter of the tokens."""
    pair = sources(tmp_path, [2] * 80, [11] * 20)
    loader = build_loader(
        None, seq_len=6, batch=4, sources=pair, weights=(1.0, 3.0), weigh_by=weigh_by, reading=reading
    )
    rows = [row for step in steps_of(loader, 100) for row in step]
    assert sum(max(row) >= 20_000 for row in rows) / 400 == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize("reading", ["ahead", "stream"])
def test_interrupted_at_every_step_and_resumed_in_other_worlds(tmp_path, reading):
    options = {"sources": sources(tmp_path, [5, 3, 8, 2, 6], [4, 4, 9]), "weights": (0.3, 0.7), "seq_len": 4}
    options |= {"batch": 4, "reading": reading} | ({"shuffle_window": 2} if reading == "stream" else {})
    straight = build_loader(None, micro=2, **options)
    expected, states = [], []
    for _ in range(15):
        states.append(straight.state_dict())
        expected.append(rows_of(next(straight)))
    straight.close()
    assert len({row for step in expected for row in step}) > 15
    for step, state in enumerate(states):
        resumed = build_loader(None, micro=4, **options)
        resumed.load_state_dict(state)
        assert steps_of(resumed, 15 - step) == expected[step:]
    world = [build_loader(None, micro=1, rank=rank, size=4, **options) for rank in range(4)]
    for loader in world:
        loader.load_state_dict(states[7])
    assert [[row for loader in world for row in rows_of(next(loader))] for _ in range(8)] == expected[7:]
    for loader in world:
        loader.close()


def test_a_position_in_another_mixture_is_refused(tmp_path):
    pair = sources(tmp_path, [5, 3, 8], [4, 4, 9])
    state = build_loader(None, seq_len=4, sources=pair, weights=(0.3, 0.7)).state_dict()
    with pytest.raises(ConfigError) as caught:
        build_loader(None, seq_len=4, sources=pair, stopping="all_exhausted").load_state_dict(state)
    assert [fault.path for fault in caught.value.faults] == ["dataloader.weights", "dataloader.stopping"]


def test_mistakes_are_told_at_the_source(tmp_path):
    good, bad = sources(tmp_path, [5], [5])
    (tmp_path / "1.jsonl").write_text("broken\n")
    with pytest.raises(ConfigError, match=rf"^dataloader\.sources\.1: {tmp_path}/1\.jsonl:1 is not JSON"):
        build_loader(None, seq_len=4, sources=(good, bad))
