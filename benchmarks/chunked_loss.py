"""Peak memory of ChunkedCELoss against CrossEntropyLoss: one forward and backward pass at Qwen3's vocabulary."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.report import Gate, Report

SHARE = 0.25
VOCABULARY, TOKENS, HIDDEN = 151_936, 4096, 64


def measure(folder: Path, *, quick: bool) -> Report:
    """Each in a process of its own, above what that process held before."""
    tokens = TOKENS // 8 if quick else TOKENS
    gate = Gate(
        what=f"peak memory of ChunkedCELoss / CrossEntropyLoss, {tokens:,} tokens, {VOCABULARY:,} entries",
        unit="bytes",
        ours=[_peak_bytes("ChunkedCELoss", tokens)],
        theirs=[_peak_bytes("CrossEntropyLoss", tokens)],
        relation="<=",
        bound=SHARE,
    )
    return Report("chunked_loss", [gate])


def _peak_bytes(loss: str, tokens: int) -> int:
    command = [
        sys.executable,
        "-m",
        "tests.components.loss_peak_memory",
        loss,
        str(VOCABULARY),
        str(tokens),
        str(HIDDEN),
    ]
    return int(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
