"""What is held in memory, and in the state, does not grow with the data."""

from __future__ import annotations

import pickle
import tracemalloc

import numpy as np
import pytest

from tests.components.data.numbers import build_loader, rows_of

TOKENS, BYTES_PER_TOKEN = 200, 4
OVERHEAD_PER_DOCUMENT = 100
"""Bytes: where a document starts, its length, and its places in the orders of documents and of rows, at their peak."""


def write(path, documents: int) -> str:
    with path.open("w") as file:
        for i in range(documents):
            numbers = " ".join(map(str, np.random.default_rng(i).integers(1000, 99_999, TOKENS)))
            file.write(f'{{"text": "{numbers}"}}\n')
    return str(path)


def peak_bytes(path: str, steps: int, **options) -> int:
    tracemalloc.start()
    try:
        loader = build_loader(path, seq_len=256, batch=4, prefetch=0, **options)
        for _ in range(steps):
            next(loader)
        loader.close()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_documents_read_ahead_lie_in_a_file(tmp_path):
    small, large = 200, 1600
    peaks = [peak_bytes(write(tmp_path / f"{n}.jsonl", n), steps=20) for n in (small, large)]
    token_bytes = (large - small) * TOKENS * BYTES_PER_TOKEN
    assert peaks[1] - peaks[0] < (large - small) * OVERHEAD_PER_DOCUMENT < token_bytes / 7


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_a_stream_holds_one_window(tmp_path, packing):
    options = {"reading": "stream", "shuffle_window": 64, "packing": packing}
    small = peak_bytes(write(tmp_path / "small.jsonl", 200), steps=30, **options)
    large = peak_bytes(write(tmp_path / "large.jsonl", 1600), steps=240, **options)
    assert large < 1.1 * small


def test_the_state_is_as_large_after_a_million_rows_and_in_any_data(tmp_path):
    sizes = set()
    for documents in (20, 400):
        loader = build_loader(write(tmp_path / f"{documents}.jsonl", documents), seq_len=64, batch=4)
        state = loader.state_dict()
        loader.load_state_dict(state | {"samples_consumed": 1_000_000})
        next(loader)
        after = loader.state_dict()
        loader.close()
        assert after["samples_consumed"] == 1_000_004
        sizes.add(len(pickle.dumps(after)))
        sizes.add(len(pickle.dumps(state | {"samples_consumed": 1_000_004})))
    assert len(sizes) == 1
    assert sizes.pop() < 500


def test_a_stream_keeps_what_is_left_over_and_no_window(tmp_path):
    loader = build_loader(
        write(tmp_path / "some.jsonl", 300), seq_len=256, batch=4, reading="stream", shuffle_window=64, prefetch=0
    )
    largest = 0
    for _ in range(100):
        assert len(rows_of(next(loader))) == 4
        largest = max(largest, len(pickle.dumps(loader.state_dict())))
    loader.close()
    assert largest < 2000 + 2 * (256 + TOKENS) * 8
