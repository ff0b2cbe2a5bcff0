"""Tokenising into bin/idx: against the tokenizers library alone, against `datasets.map`, and how soon it begins."""

from __future__ import annotations

import gzip
import json
import shutil
import sys
from pathlib import Path

from benchmarks import cpu_seconds
from benchmarks.report import Gate, Report
from benchmarks.start_up import clock_seconds
from hyper_parallel.assets import CORPUS_FILES, TOKENIZER_FOLDER
from hyper_parallel.components.data.indexed import IndexedDataset

TIMES_RAW = 0.9
TIMES_DATASETS = 1.1
START_SECONDS = 1.5
COPIES = 6
ROUNDS = 3

PREPARE = (sys.executable, "-m", "hyper_parallel.data_tools", "prepare", "--tokenizer", TOKENIZER_FOLDER, "--input")
PEER = (sys.executable, "-m", "benchmarks.tokenising_peers")


def measure(folder: Path, *, quick: bool) -> Report:
    """All in turns, each with its start; every process counts."""
    work = folder / "prepare_data"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    corpus, line = work / "corpus.jsonl", work / "line.jsonl"
    with gzip.open(CORPUS_FILES["train"], "rt", encoding="utf-8") as file:
        corpus.write_text(file.read() * (1 if quick else COPIES), encoding="utf-8")
    line.write_text(json.dumps({"text": "one"}) + "\n", encoding="utf-8")
    seconds: dict[str, list[float]] = {"prepare": [], "raw": [], "datasets_map": []}
    starts = []
    for number in range(1 if quick else ROUNDS):
        log = work / "log.txt"
        seconds["prepare"].append(cpu_seconds.of_command([*PREPARE, corpus, "--output-prefix", work / "pair"], log))
        for peer in ("raw", "datasets_map"):
            command = [*PEER, peer, corpus, TOKENIZER_FOLDER, work / f"cache{number}"]
            seconds[peer].append(cpu_seconds.of_command(command, log))
        starts.append(clock_seconds([*PREPARE, line, "--output-prefix", work / "line"]))
    tokens = len(IndexedDataset(work / "pair").tokens)
    rates = {name: [tokens / value for value in values] for name, values in seconds.items()}
    return Report(
        "prepare_data",
        [
            Gate(
                what=f"data_tools prepare / {what}",
                unit="tokens/CPU-s",
                ours=rates["prepare"],
                theirs=rates[peer],
                relation=">=",
                bound=bound,
            )
            for peer, what, bound in (
                ("raw", "tokenizers alone", TIMES_RAW),
                ("datasets_map", "datasets.map", TIMES_DATASETS),
            )
        ]
        + [
            Gate(
                what="data_tools prepare of one line",
                unit="seconds",
                ours=starts,
                relation="<=",
                bound=START_SECONDS,
            )
        ],
        [f"{tokens:,} tokens of Shakespeare; rates are by processor time of all processes, their start included"],
    )
