"""Reading bin/idx: samples and documents a second of processor time, against the package megatron-core."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import cpu_seconds
from benchmarks.report import Gate, Report
from hyper_parallel.components.data.indexed import GPTDataset, IndexedDataset, IndexedWriter

TIMES_MEGATRON = 1.0
SEQ_LEN = 1024
TOKENS = 20_000_000
MEAN_LENGTHS = (100, 1000)
READS = 100_000
ROUNDS = 5


def measure(folder: Path, *, quick: bool) -> Report:
    """All in turns, in this process: both read the same maps of the same file."""
    gates = []
    for mean in MEAN_LENGTHS:
        work = folder / "indexed_samples" / str(mean)
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        prefix = _write(work / "data", TOKENS // 10 if quick else TOKENS, mean)
        ours, theirs = _samples(prefix, work)
        reads = np.random.default_rng(1).integers(0, len(ours), len(ours)).tolist()
        gates.append(_gate(f"samples of {SEQ_LEN} tokens, documents of {mean}", "samples/CPU-s", ours, theirs, reads))
    ours, theirs = IndexedDataset(prefix), _documents(prefix)
    reads = np.random.default_rng(2).integers(0, len(ours), READS // 10 if quick else READS).tolist()
    gates.append(_gate("random documents", "documents/CPU-s", ours, theirs, reads))
    return Report("indexed_samples", gates)


def _gate(what: str, unit: Any, ours: Any, theirs: Any, reads: list[int]) -> Gate:
    rates: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        for dataset, into in zip((ours, theirs), rates, strict=True):
            into.append(len(reads) / cpu_seconds.of_call(functools.partial(_read, dataset, reads)))
    return Gate(
        what=f"{what} / megatron-core", unit=unit, ours=rates[0], theirs=rates[1], relation=">=", bound=TIMES_MEGATRON
    )


def _read(dataset: Any, reads: list[int]) -> None:
    for i in reads:
        dataset[i]


def _write(prefix: Path, tokens: int, mean: int) -> str:
    random = np.random.default_rng(0)
    lengths = np.maximum(1, random.exponential(mean, tokens // mean)).astype(np.int32)
    with IndexedWriter(prefix, np.uint16) as writer:
        writer.add_documents(random.integers(1, 1000, lengths.sum(), np.uint16), lengths)
    return str(prefix)


def _samples(prefix: str, work: Path) -> tuple[GPTDataset, Any]:
    from tests.components.data.indexed import megatron

    ours = GPTDataset(prefix, seq_len=SEQ_LEN, seed=1, split="1", split_name="train", eod_token_id=0, pad_token_id=-1)
    theirs = megatron.build([prefix], work / "cache", seq_len=SEQ_LEN, seed=1, create_attention_mask=False)
    return ours, theirs


def _documents(prefix: str) -> Any:
    from megatron.core.datasets.indexed_dataset import IndexedDataset as MegatronDataset

    return MegatronDataset(prefix)
