"""The items of a loader whose rows are numbered: any step by the number of its first row."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch.utils.data import DataLoader, Dataset

from hyper_parallel.components.data.collate import collate
from hyper_parallel.components.data.packing import PackedRows
from hyper_parallel.components.data.worker_processes import iterate, worker_options
from hyper_parallel.config.errors import ConfigError
from hyper_parallel.platform import get_platform

MicroBatches = list[dict[str, Any]]


class NumberedRows(Protocol):
    """What takes rows by their number: a packing or a mixture of them."""

    rows_per_epoch: int

    def take(self, samples_B: npt.NDArray[np.int64]) -> PackedRows: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """Which rows of a step are this rank's, and how they are handed out."""

    micro_batch_size: int
    global_batch_size: int
    dp_rank: int
    dp_size: int
    document_mask: bool
    vocab_size: int

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """See `rows_of_rank`."""
        return rows_of_rank(self.micro_batch_size, self.global_batch_size, self.dp_rank, self.dp_size)

    def collate(self, rows: PackedRows) -> dict[str, Any]:
        """One micro-batch.

        Raises:
            ConfigError: a token id is none of the tokenizer's.
        """
        for ids in (rows.input_ids_BT, rows.labels_BT):
            highest = int(ids.max())
            if highest >= self.vocab_size:
                raise ConfigError.one(
                    "dataloader.path",
                    f"the data holds the token id {highest}, and the tokenizer's go from 0 to {self.vocab_size - 1}",
                    "give the tokenizer that made the ids",
                )
        return collate(rows, self.document_mask)


def rows_of_rank(micro_batch_size: int, global_batch_size: int, dp_rank: int, dp_size: int) -> npt.NDArray[np.int64]:
    """[micro-batches, B]: numbers of a rank's rows within a step. Micro-batch m of data-parallel rank r begins with
    number ``(m * dp_size + r) * micro_batch_size``."""
    return np.arange(global_batch_size).reshape(-1, dp_size, micro_batch_size)[:, dp_rank]


def numbered_steps(
    rows: NumberedRows, shape: BatchShape, first_sample: int, *, num_workers: int, prefetch: int
) -> Iterator[MicroBatches]:
    """This rank's items from the step that begins with row `first_sample` on, without end."""
    loader = DataLoader(
        _Steps(rows, shape),
        batch_size=None,
        sampler=itertools.count(first_sample, shape.global_batch_size),
        collate_fn=as_it_is,
        pin_memory=get_platform().pin_memory,
        **worker_options(num_workers, prefetch),
    )
    return map(raise_errors, iterate(loader))


def as_it_is(item: Any) -> Any:
    """Instead of a collate function: torch's own would make tensors of whatever it finds."""
    return item


def raise_errors(item: Any) -> Any:
    """The item, unless it is a worker's error: torch cannot carry those of more than a message between processes."""
    if isinstance(item, ConfigError):
        raise item
    return item


class _Steps(Dataset[MicroBatches | ConfigError]):
    """The micro-batches of one rank for the step that begins with a given row."""

    def __init__(self, rows: NumberedRows, shape: BatchShape) -> None:
        self._rows = rows
        self._shape = shape
        self._own_rows = shape.rows

    def __getitem__(self, first_sample: int) -> MicroBatches | ConfigError:
        try:
            return [self._shape.collate(self._rows.take(first_sample + rows)) for rows in self._own_rows]
        except ConfigError as error:
            return error
