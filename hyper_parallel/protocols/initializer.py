"""Initial values that depend on (seed, parameter name, position in the whole tensor) and on nothing else.

Every element is a function of its own index, so any shard of a tensor can be drawn alone and a model starts from the
same numbers under every topology.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from hyper_parallel.protocols.local_block import local_block

_CHUNK = 1 << 16  # elements drawn at a time: intermediate arrays stay in the cache


class Initializer(Protocol):
    """Fills a block of a parameter."""

    def fill(self, block: torch.Tensor, *, seed: int, name: str, shape: Sequence[int], offset: Sequence[int]) -> None:
        """Writes the initial values of `block`, which starts at `offset` in the whole tensor of `shape`."""


@dataclass(frozen=True, slots=True)
class Constant:
    """Every element the same."""

    value: float

    def fill(self, block: torch.Tensor, *, seed: int, name: str, shape: Sequence[int], offset: Sequence[int]) -> None:
        block.fill_(self.value)


@dataclass(frozen=True, slots=True)
class Normal:
    """Normal distribution of mean 0: the inverse normal distribution function of a uniform hash of the position."""

    std: float

    def fill(self, block: torch.Tensor, *, seed: int, name: str, shape: Sequence[int], offset: Sequence[int]) -> None:
        if block.numel() == 0:
            return
        drawn = block if block.is_contiguous() else torch.empty_like(block, memory_format=torch.contiguous_format)
        # Rows of consecutive positions: all dims but the last count rows; a vector is one column.
        width = block.shape[-1] if block.dim() > 1 else 1
        rows_flat = drawn.view(-1, width)
        row_starts = _row_starts(block.shape, shape, offset)
        columns = np.arange(width, dtype=np.uint64)
        key = np.uint64(_key(seed, name))
        step = max(1, _CHUNK // width)
        for first in range(0, len(row_starts), step):
            positions = row_starts[first : first + step, None] + columns
            values = torch.special.ndtri(torch.from_numpy(_uniform(key, positions))).mul_(self.std)
            rows_flat[first : first + step].copy_(values)
        if drawn is not block:
            block.copy_(drawn)


@torch.no_grad()
def initialize_(parameter: torch.Tensor, initializer: Initializer, *, seed: int, name: str) -> None:
    """Writes the initial values of `parameter`, of a DTensor those of this rank's block only.

    `name` is the parameter's name in the whole, unwrapped model.
    """
    block, offset = local_block(parameter)
    initializer.fill(block, seed=seed, name=name, shape=tuple(parameter.shape), offset=offset)


def _key(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little")


def _row_starts(block_shape: Sequence[int], shape: Sequence[int], offset: Sequence[int]) -> np.ndarray:
    """Positions in the whole tensor of the first element of each row of the block, in order."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    starts = np.zeros(1, dtype=np.uint64)
    last = len(shape) - 1 if len(shape) > 1 else len(shape)
    for dim in range(last):
        along = np.arange(offset[dim], offset[dim] + block_shape[dim], dtype=np.uint64) * np.uint64(strides[dim])
        starts = (starts[:, None] + along).reshape(-1)
    if len(shape) > 1:
        starts += np.uint64(offset[-1])
    return starts


def _uniform(key: np.uint64, positions: np.ndarray) -> np.ndarray:
    """Uniform float64 values in (0, 1), never 0 or 1: the finaliser of splitmix64 (Steele, Lea and Flood 2014, "Fast
    splittable pseudorandom number generators") over `key` + position x golden gamma, upper 53 bits."""
    z = positions * np.uint64(0x9E3779B97F4A7C15)
    z += key
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    z >>= np.uint64(11)
    uniform = z.astype(np.float64)
    uniform += 0.5
    uniform *= 2.0**-53
    return uniform
