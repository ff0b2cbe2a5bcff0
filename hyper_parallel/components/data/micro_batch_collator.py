"""MakeMicroBatchCollator: the samples of one step on one rank, as its micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hyper_parallel.config.errors import ConfigError, RunError


class MakeMicroBatchCollator:
    """Stacks samples of equal lengths: ``[{"input_ids": [T], ...}, ...]`` to micro-batches of [B, T] each."""

    def __init__(self, num_micro_batch: int) -> None:
        """`num_micro_batch`: micro-batches in one step.

        Raises:
            ConfigError: it is below 1.
        """
        if num_micro_batch < 1:
            raise ConfigError.one("collate_fn.num_micro_batch", f"{num_micro_batch} is below 1", "give 1 or more")
        self.num_micro_batch = num_micro_batch

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """
        Raises:
            RunError: the samples do not divide into the micro-batches, or differ in length or in their fields.
        """
        from torch.utils.data import default_collate

        size, rest = divmod(len(samples), self.num_micro_batch)
        if rest or not size:
            raise RunError(
                f"{len(samples)} samples of a step do not divide into {self.num_micro_batch} micro-batches; "
                "give a multiple of that, as training.global_batch_size / (micro_batch_size x data-parallel size) is"
            )
        parts = [list(samples[begin : begin + size]) for begin in range(0, len(samples), size)]
        try:
            return [default_collate(part) for part in parts]
        except (RuntimeError, KeyError, TypeError) as error:
            shapes = "; ".join(", ".join(f"{k} {_length(v)}" for k, v in s.items()) for s in samples[:4])
            raise RunError(
                f"samples cannot be stacked ({' '.join(str(error).split())[:120]}): the first ones are {shapes}; "
                "give samples of one length, or a collate_fn that pads"
            ) from error


def _length(value: Any) -> str:
    return f"of {len(value)}" if hasattr(value, "__len__") else type(value).__name__
