"""Peak memory of one forward and backward pass of a loss, in a process of its own: prints bytes above the start.

python tests/components/loss_peak_memory.py LOSS VOCAB TOKENS HIDDEN
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

from hyper_parallel.components import loss as losses


def peak_bytes() -> int:
    """Largest resident size of this process so far. ru_maxrss would begin with that of the process that started it."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def run(loss: losses.BaseLoss, vocab_size: int, tokens: int, hidden_size: int) -> None:
    hidden = torch.randn(1, tokens, hidden_size, requires_grad=True)
    head = nn.Linear(hidden_size, vocab_size, bias=False)
    loss(hidden, head, torch.randint(vocab_size, (1, tokens))).backward()


if __name__ == "__main__":
    name, vocab_size, tokens, hidden_size = sys.argv[1], *map(int, sys.argv[2:])
    loss = getattr(losses, name).Config().build(vocab_size=vocab_size)
    run(loss, vocab_size, 2, hidden_size)  # what torch itself loads and keeps
    before = peak_bytes()
    run(loss, vocab_size, tokens, hidden_size)
    print(peak_bytes() - before)
