"""A run that is stopped on two ranks goes on with the same rows on four and then on one, however its data are read."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hyper_parallel.components.data import TextDataLoader
from hyper_parallel.components.data.sources import JsonLinesSource
from hyper_parallel.components.tokenizer import HuggingFaceTokenizer
from tests.trainer.runs import small_corpus

STREAM_STEPS = 50


@pytest.fixture(scope="module")
def tokenizer():
    return HuggingFaceTokenizer.Config().build()


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder, lines = tmp_path_factory.mktemp("mixture"), Path(small_corpus()).read_text().splitlines(keepends=True)
    for name, part in (("a", lines[:120]), ("b", lines[120:])):
        (folder / f"{name}.jsonl").write_text("".join(part))
    sources = tuple(JsonLinesSource.Config(path=str(folder / f"{name}.jsonl")) for name in "ab")
    return {"sources": sources, "weights": (0.3, 0.7), "weigh_by": "tokens", "stopping": "repeat"}


def step_of(loaders: list[Any]) -> np.ndarray:
    """The rows of the next step, in their order over ranks and micro-batches."""
    items = [next(loader) for loader in loaders]
    return np.concatenate([item[m]["input_ids"].numpy() for m in range(len(items[0])) for item in items])


@pytest.mark.parametrize("reading", ["ahead", "stream"])
@pytest.mark.parametrize(("packing", "num_workers"), [("concat", 0), ("best_fit", 0), ("pad", 0), ("best_fit", 2)])
@pytest.mark.parametrize("data", ["one source", "mixture"])
def test_two_ranks_then_four_then_one(tokenizer, mixture, data, packing, reading, num_workers) -> None:
    chosen = mixture if data == "mixture" else {"path": small_corpus()}
    config = TextDataLoader.Config(packing=packing, reading=reading, num_workers=num_workers, **chosen)

    def loaders(dp_size: int) -> list[Any]:
        sizes = {"seq_len": 32, "micro_batch_size": 2, "global_batch_size": 8, "dp_size": dp_size}
        return [config.build(tokenizer=tokenizer, dp_rank=rank, seed=3, **sizes) for rank in range(dp_size)]

    (whole,) = loaders(1)
    rows = whole.rows_per_epoch
    steps = rows // 8 + 3 if rows else STREAM_STEPS  # beyond the end of the first pass
    straight = [step_of([whole]) for _ in range(steps)]
    whole.close()

    resumed: list[np.ndarray] = []
    state = None
    for dp_size, until in ((2, steps // 3), (4, steps - 2), (1, steps)):
        ranks = loaders(dp_size)
        for loader in ranks if state else ():
            loader.load_state_dict(pickle.loads(state))
        while len(resumed) < until:
            resumed.append(step_of(ranks))
        (state,) = {pickle.dumps(loader.state_dict()) for loader in ranks}  # the same on every rank
        for loader in ranks:
            loader.close()
    for step, (wanted, got) in enumerate(zip(straight, resumed, strict=True)):
        assert np.array_equal(wanted, got), step
