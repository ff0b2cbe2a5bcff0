"""Rows of sources that are read while training.

A source is read in *windows* of a fixed number of records. The documents of a window are packed among themselves, as
those of a whole data set are otherwise, and its rows are shuffled; what they leave out begins the next window. So the
position is small and exact: where the window begins, what was left over before it, and how many of its rows are taken.
Every rank reads all of the source, and so knows which rows are its own in a world of any size.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from hyper_parallel.components.data.documents import Document, TokenizedDocuments
from hyper_parallel.components.data.packing import PackedRows, Packing
from hyper_parallel.components.data.reading import DocumentReader
from hyper_parallel.components.data.sources.source import OnError, Source
from hyper_parallel.components.data.steps import BatchShape, MicroBatches, as_it_is, raise_errors
from hyper_parallel.components.data.transforms import Transform
from hyper_parallel.components.data.worker_processes import iterate, worker_options
from hyper_parallel.config.errors import ConfigError
from hyper_parallel.platform import get_platform

logger = logging.getLogger(__name__)

MakePacking = Callable[[TokenizedDocuments], Packing]


class Window(NamedTuple):
    """The documents of a window as they were read, and where it begins."""

    documents: list[Document]
    start: dict[str, Any]
    counts: Counter[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSettings:
    """How sources are read."""

    window: int
    """Records in a window."""
    limit: int | None
    """Records of an epoch. None: all that the source has."""
    on_error: OnError
    num_workers: int
    prefetch: int
    by_tokens: bool
    """Whether weights are shares of tokens; of documents otherwise."""


class RowStream:
    """The rows of one source, without end: the source begins again when it is exhausted."""

    def __init__(
        self, source: Source, transform: Transform, settings: StreamSettings, make_packing: MakePacking
    ) -> None:
        self._source = source
        self._transform = transform
        self._settings = settings
        self._make_packing = make_packing
        beginning = copy.deepcopy(source.state_dict())
        self._beginning = beginning
        self._position = {"window": 0, "epoch": 0, "taken": 0, "source": beginning, "row": 0, "left_over": []}
        self._windows: Iterator[Window] | None = None
        self._packing: Packing | None = None
        self._units = 0
        self.counts: Counter[str] = Counter()
        """What was done to documents, or why they were left out -> how many; `tell_counts` begins anew."""

    @property
    def position(self) -> dict[str, Any]:
        """The position after the last row: plain data and arrays of the tokens that were left over."""
        return dict(self._position)

    def go_to(self, position: dict[str, Any]) -> None:
        """Goes to what `position` was."""
        self._position = dict(position)
        self._windows = self._packing = None

    def next_row(self) -> tuple[Packing, int, int, float]:
        """(packing, window, place) of the next row, to `take_in_epoch`, and how much it counts against the weight."""
        epoch = self._position["epoch"]
        while self._packing is None or self._position["row"] >= self._packing.rows_per_epoch:
            self._next_window()
            if self._position["epoch"] > epoch + 1:
                name = type(self._source).__name__
                raise ConfigError.one("dataloader.path", f"all of {name} gives not one row", "give a longer source")
        packing, row = self._packing, self._position["row"]
        self._position = self._position | {"row": row + 1}
        return packing, self._position["window"], row, self._units / packing.rows_per_epoch

    def _next_window(self) -> None:
        """Packs the next window, or at the start the one that the position lies in."""
        if self._windows is None:
            self._windows = self._read()
            window, left_over, row = next(self._windows), self._position["left_over"], self._position["row"]
        else:
            assert self._packing is not None, "windows are open, so one was packed"
            left_over, row = self._packing.left_over(self._position["window"]), 0
            window = next(self._windows)
        self.counts += window.counts
        documents = [*(Document(*document) for document in left_over), *window.documents]
        self._packing = self._make_packing(_joined(documents))
        self._units = sum(len(d.ids) for d in documents) if self._settings.by_tokens else len(documents)
        self._position = window.start | {"row": row, "left_over": [tuple(d)[:2] for d in map(_copied, left_over)]}

    def _read(self) -> Iterator[Window]:
        settings = self._settings
        loader = DataLoader(
            _Windows(self._source, self._transform, settings, self._beginning, self._position),
            batch_size=None,
            collate_fn=as_it_is,
            **worker_options(settings.num_workers, settings.prefetch),
        )
        return map(raise_errors, iterate(loader))


class _Windows(IterableDataset[Window | ConfigError]):
    """The windows of a source from a position on. Of several workers each reads all records, and encodes its share."""

    def __init__(
        self,
        source: Source,
        transform: Transform,
        settings: StreamSettings,
        beginning: dict[str, Any],
        position: dict[str, Any],
    ) -> None:
        self._source = source
        self._transform = transform
        self._settings = settings
        self._beginning = beginning
        self._position = position

    def __iter__(self) -> Iterator[Window | ConfigError]:
        try:
            yield from self._windows()
        except ConfigError as error:
            yield error

    def _windows(self) -> Iterator[Window]:
        worker = get_worker_info()
        share, of = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        position, source, settings = self._position, self._source, self._settings
        epoch, taken = position["epoch"], position["taken"]
        records = self._begin(epoch, position["source"])
        skipped_before = 0
        for number in itertools.count(position["window"]):
            start = {"window": number, "epoch": epoch, "taken": taken, "source": copy.deepcopy(source.state_dict())}
            size = settings.window if settings.limit is None else min(settings.window, settings.limit - taken)
            batch = list(islice(records, size))
            taken += len(batch)
            if (number - position["window"]) % of == share:
                reader = DocumentReader(self._transform, settings.on_error)
                documents = list(reader.read(iter(batch), type(source).__name__))
                skipped = getattr(source, "skipped", 0)
                reader.count_unreadable(skipped - skipped_before)
                skipped_before = skipped
                yield Window(documents, start, reader.counts)
            if len(batch) < settings.window:
                if taken == 0:
                    raise ConfigError.one(
                        "dataloader.path", f"{type(source).__name__} gives no document", "give a source that has some"
                    )
                epoch, taken = epoch + 1, 0
                records = self._begin(epoch, self._beginning)

    def _begin(self, epoch: int, state: dict[str, Any]) -> Iterator[Any]:
        if hasattr(self._source, "set_epoch"):
            self._source.set_epoch(epoch)
        self._source.load_state_dict(copy.deepcopy(state))
        return iter(self._source)


class StreamedRows:
    """Rows of several streams by weight: next is that of the stream which is furthest behind its share."""

    def __init__(self, streams: Sequence[RowStream], weights: Sequence[float]) -> None:
        self.streams = streams
        self._weights = [weight / sum(weights) for weight in weights]
        self._used = [0.0] * len(streams)
        self._samples = 0

    def state_dict(self) -> dict[str, Any]:
        """The position after the last row."""
        return {
            "samples_consumed": self._samples,
            "used": list(self._used),
            "streams": [stream.position for stream in self.streams],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to the position of `state`."""
        self._samples, self._used = state["samples_consumed"], list(state["used"])
        for stream, position in zip(self.streams, state["streams"], strict=True):
            stream.go_to(position)

    def tell_counts(self) -> None:
        """Logs what was done to documents since the last time, or why they were left out."""
        for stream in self.streams:
            for note, count in stream.counts.items():
                logger.info("streamed data: %s %s", f"{count:,}", note)
            stream.counts.clear()

    def steps(self, shape: BatchShape) -> Iterator[tuple[MicroBatches, dict[str, Any]]]:
        """(this rank's item, the state after it) from the present position on, without end."""
        pin = get_platform().pin_memory
        while True:
            rows = [self._next_row() for _ in range(shape.global_batch_size)]
            item = [shape.collate(_taken([rows[number] for number in numbers])) for numbers in shape.rows.tolist()]
            yield ([_pinned(batch) for batch in item] if pin else item), self.state_dict()

    def _next_row(self) -> tuple[Packing, int, int]:
        # What each would have used of a common amount, were it at its share: the least comes next.
        behind = min(range(len(self.streams)), key=lambda i: (self._used[i] / self._weights[i], i))
        *row, units = self.streams[behind].next_row()
        self._used[behind] += units
        self._samples += 1
        return tuple(row)


def _joined(documents: Sequence[Document]) -> TokenizedDocuments:
    offsets = np.cumsum([0, *(len(document.ids) for document in documents)])
    ids = np.concatenate([np.asarray(d.ids, np.int64) for d in documents]) if documents else np.empty(0, np.int64)
    trained = None
    if any(document.trained is not None for document in documents):
        trained = np.concatenate(
            [np.ones(len(d.ids), np.bool_) if d.trained is None else np.asarray(d.trained, np.bool_) for d in documents]
        )
    return TokenizedDocuments(ids, offsets, "", "", trained)


def _copied(document: Document | tuple[Any, Any]) -> Document:
    """A document of its own memory, not a view that keeps a whole window alive."""
    ids, trained = document[:2]
    return Document(np.array(ids), None if trained is None else np.array(trained))


def _taken(rows: Sequence[tuple[Packing, int, int]]) -> PackedRows:
    parts = [packing.take_in_epoch(window, np.array([place])) for packing, window, place in rows]
    return PackedRows(*map(np.concatenate, zip(*parts, strict=True)))


def _pinned(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: x.pin_memory() if isinstance(x, torch.Tensor) else x for name, x in batch.items()}
