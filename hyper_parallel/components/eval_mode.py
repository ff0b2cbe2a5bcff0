"""Eval mode for a while."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn


@contextmanager
def eval_mode(modules: Sequence[nn.Module]) -> Iterator[None]:
    """`modules` and all within are in eval mode, and behind it each by itself as it was: part may be frozen in it."""
    was_training = [(each, each.training) for module in modules for each in module.modules()]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for each, training in was_training:
            each.training = training
