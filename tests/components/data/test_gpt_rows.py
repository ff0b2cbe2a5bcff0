"""Megatron's samples through the loader."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.components.data import TextDataLoader
from hyper_parallel.components.data.indexed import GPTDataset, IndexedWriter
from hyper_parallel.components.data.sources import IndexedSource
from hyper_parallel.config.errors import ConfigError
from tests.components.data.numbers import EOS, build_loader, counted_documents, rows_of, write_documents

LENGTHS = [5, 7, 3, 9, 1, 12, 4, 6]


def write_pair(path, lengths=LENGTHS, first=1000) -> str:
    with IndexedWriter(path, dtype="int32") as writer:
        for document in counted_documents(lengths, first):
            writer.add_document([*document, EOS])
    return str(path)


def samples(prefix, seed: int, **flags) -> GPTDataset:
    return GPTDataset(
        prefix, seq_len=4, seed=seed, split="1,0,0", split_name="train", eod_token_id=EOS, pad_token_id=0, **flags
    )


@pytest.mark.parametrize("num_workers", [0, 2])
def test_rows_are_the_samples_epoch_by_epoch(tmp_path, num_workers):
    prefix = write_pair(tmp_path / "pair")
    loader = build_loader(prefix, seq_len=4, batch=3, packing="megatron", document_mask=False, num_workers=num_workers)
    n = loader.rows_per_epoch
    assert n == (sum(LENGTHS) + len(LENGTHS) - 1) // 4
    items = [item for _ in range(2 * n // 3 + 1) for item in next(loader)]
    loader.close()
    expected = [samples(prefix, 42 + epoch)[place] for epoch in range(3) for place in range(n)]
    for item, sample in zip(items, expected, strict=False):
        assert item["input_ids"][0].tolist() == sample["input_ids"].tolist()
        assert item["labels"][0].tolist() == sample["labels"].tolist()
        assert item["position_ids"][0].tolist() == [0, 1, 2, 3]
        assert item["cu_seqlens"] == [0, 4]


def test_with_a_document_mask_nothing_reaches_over_the_end_of_a_document(tmp_path):
    prefix = write_pair(tmp_path / "pair")
    loader = build_loader(prefix, seq_len=4, packing="megatron")
    reference = samples(prefix, 42, reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True)
    cut = 0
    for sample in (reference[place] for place in range(loader.rows_per_epoch)):
        (item,) = next(loader)
        for name in ("input_ids", "labels", "position_ids"):
            assert item[name][0].tolist() == sample[name].tolist()
        assert item["cu_seqlens"] == [*np.flatnonzero(sample["segment_starts"].numpy()).tolist(), 4]
        ends = item["input_ids"][0] == EOS
        assert (item["labels"][0][ends] == -100).all()
        cut += int(ends.sum())
    loader.close()
    assert cut > 4


def test_a_blend_of_pairs(tmp_path):
    pairs = [write_pair(tmp_path / "a", first=1000), write_pair(tmp_path / "b", first=5000)]
    sources = tuple(IndexedSource.Config(path=path) for path in pairs)
    loader = build_loader(None, seq_len=4, packing="megatron", sources=sources, weights=(0.7, 0.3))
    whole = sum(len(samples(path, 42)) for path in pairs)
    blend = samples(["0.7", pairs[0], "0.3", pairs[1]], 42, num_samples=whole)
    rows = [rows_of(next(loader))[0] for _ in range(loader.rows_per_epoch)]
    loader.close()
    assert rows == [tuple(blend[place]["input_ids"].tolist()) for place in range(len(blend))]
    assert sum(max(row) >= 5000 for row in rows) == pytest.approx(0.3 * len(rows), abs=1)


def test_interrupted_and_resumed(tmp_path):
    prefix = write_pair(tmp_path / "pair")
    options = {"seq_len": 4, "batch": 4, "packing": "megatron"}
    straight, expected, states = build_loader(prefix, **options), [], []
    for _ in range(8):
        states.append(straight.state_dict())
        expected.append(rows_of(next(straight)))
    straight.close()
    for step, state in enumerate(states):
        resumed = build_loader(prefix, **options)
        resumed.load_state_dict(state)
        assert [rows_of(next(resumed)) for _ in range(step, 8)] == expected[step:]
        resumed.close()


def test_mistakes(tmp_path):
    text = write_documents(tmp_path / "text.jsonl", [[1, 2, 3]])
    with pytest.raises(ConfigError, match=r"^dataloader\.packing: megatron is given, but .+text\.jsonl is no pair of "):
        build_loader(text, seq_len=4, packing="megatron")
    prefix = write_pair(tmp_path / "pair")
    faults = TextDataLoader.Config(path=prefix, packing="megatron", shuffle=False, documents=3).faults()
    assert [str(fault) for fault in faults] == [
        "shuffle: False is given, but packing is megatron; set True, or choose another packing",
        "documents: 3 is given, but packing is megatron; set None, or choose another packing",
    ]
    with pytest.raises(
        ConfigError, match=r"gives 13 rows of training\.seq_len 4, fewer than training\.global_batch_size"
    ):
        build_loader(prefix, seq_len=4, batch=14, packing="megatron")
