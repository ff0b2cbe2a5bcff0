"""One item a step: the micro-batches of this data-parallel rank, from an order that no world size changes.

Rows are numbered over all epochs and ranks. With `samples_consumed` rows behind it, a step takes the next
`global_batch_size`; micro-batch m of data-parallel rank r gets `micro_batch_size` of them, beginning with number
``samples_consumed + (m * dp_size + r) * micro_batch_size``. So the counter alone is the position, for every world size,
accumulation and number of workers.
"""

from __future__ import annotations

import itertools
import logging
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from hyper_parallel.assets import CORPUS_FILES
from hyper_parallel.components.data.collate import collate_micro_batches
from hyper_parallel.components.data.documents import TokenizedDocuments, tokenize
from hyper_parallel.components.data.packing import PACKINGS, PackedRows, Packing
from hyper_parallel.components.data.prefetch import BackgroundPrefetcher
from hyper_parallel.components.data.sources import SUFFIXES, is_supported, read_texts
from hyper_parallel.components.data.synthetic import DEFAULT_COUNT, synthetic_documents
from hyper_parallel.components.tokenizer import BaseTokenizer
from hyper_parallel.config.configurable import Configurable
from hyper_parallel.config.errors import ConfigError, Fault, raise_faults
from hyper_parallel.config.sections import at_least
from hyper_parallel.platform import get_platform

logger = logging.getLogger(__name__)

MicroBatches = list[dict[str, Any]]


class BaseDataLoader(Configurable, Iterator[MicroBatches]):
    """An endless iterator; one item is one optimizer step, the same number of steps on every rank."""

    rows_per_epoch: int
    """Rows of one pass over the data, over all ranks."""

    @abstractmethod
    def __next__(self) -> MicroBatches:
        """The micro-batches of the next step, see `collate.collate` for their contents."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The position after the last item handed out: small, and the same on every rank and for every world size."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to the position of `state`."""

    @abstractmethod
    def close(self) -> None:
        """Ends threads and worker processes; the position stays, and the next item starts them again."""


class TextDataLoader(BaseDataLoader):
    """Documents of token ids, held in memory and packed into rows of `seq_len` tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        source: Literal["text", "synthetic"] = "text"
        """text: the documents of `path`, tokenised when training starts. synthetic: random token ids from the training
        seed, seq_len of them in each document."""
        path: str | None = None
        """File of text: .txt is one document, .jsonl and .jsonl.gz hold one a line. None: the corpus in the package."""
        split: Literal["train", "validation"] = "train"
        """Part of the corpus in the package to read. A file at `path` is one split by itself: it is read whole."""
        text_field: str = "text"
        """Field of each JSON line that holds the text."""
        documents: int | None = None
        """Take this many documents, or as many as there are. None: all of a text, 1024 of synthetic data."""
        packing: Literal["concat", "pad"] = "concat"
        """concat: documents one after the other, cut into full rows. pad: one document a row, padded."""
        shuffle: bool = True
        """Another order of documents and rows in each epoch, from the training seed. Off: the order of the file."""
        num_workers: int = 0
        """Processes that prepare batches; 0 leaves it to the background thread, which is faster for text in memory."""
        prefetch: int = 2
        """Steps that the background thread, and each worker process, prepares ahead. 0: none, and no thread."""

        def faults(self) -> Iterator[Fault]:
            yield from at_least(self, 0, "num_workers", "prefetch")
            yield from at_least(self, 1, "documents")
            if self.num_workers > 0 and self.prefetch == 0:
                yield Fault("prefetch", f"0 leaves {self.num_workers} workers nothing to do", "give 1 or more")
            if self.path is not None and self.source == "synthetic":
                yield Fault("path", f"{self.path} is given, but source is synthetic", "remove one of the two")
            elif self.path is not None:
                path = Path(self.path)
                known = ", ".join(SUFFIXES)
                if not path.is_file():
                    fact = "is not a file" if path.exists() else "does not exist"
                    yield Fault("path", f"{path} {fact}", f"give a file of text ({known})")
                elif not is_supported(path):
                    yield Fault("path", f"{path} is of an unknown kind", f"give a file that ends in one of {known}")
            if self.text_field != "text" and (self.path is None or self.path.endswith(".txt")):
                source = self.path or ("the corpus in the package" if self.source == "text" else "synthetic data")
                yield Fault("text_field", f"{self.text_field!r} is given, but {source} has no such fields", "remove it")

    def __init__(
        self,
        config: Config,
        *,
        tokenizer: BaseTokenizer,
        seq_len: int,
        micro_batch_size: int,
        global_batch_size: int,
        dp_rank: int,
        dp_size: int,
        seed: int,
    ) -> None:
        """Reads and tokenises the documents, or draws them.

        Raises:
            ConfigError: the data cannot be read or gives fewer rows than one step takes, or the batch sizes do not
                divide; see `sources.read_texts`.
        """
        raise_faults(Fault(f"dataloader.{fault.path}", fault.fact, fault.remedy) for fault in config.faults())
        if global_batch_size % (micro_batch_size * dp_size):
            raise ConfigError.one(
                "training.global_batch_size",
                f"{global_batch_size} is not a multiple of training.micro_batch_size {micro_batch_size} "
                f"x data-parallel size {dp_size}",
                f"give a multiple of {micro_batch_size * dp_size}",
            )
        self._config = config
        self._global_batch_size = global_batch_size
        documents = self._read(tokenizer, seq_len, seed)
        order_seed = seed if config.shuffle else None
        packing = PACKINGS[config.packing](documents, seq_len=seq_len, pad_id=tokenizer.pad_id, seed=order_seed)
        self.rows_per_epoch = packing.rows_per_epoch
        if self.rows_per_epoch < global_batch_size:
            is_text = config.source == "text"
            data = config.path or (f"the embedded {config.split} corpus" if is_text else "synthetic data")
            raise ConfigError.one(
                "dataloader.path" if is_text else "dataloader.documents",
                f"{data} ({len(documents.lengths)} documents, {len(documents.token_ids)} tokens) gives "
                f"{self.rows_per_epoch} rows of training.seq_len {seq_len}, fewer than training.global_batch_size "
                f"{global_batch_size}",
                f"give more {'text' if is_text else 'documents'} or smaller sizes",
            )
        self._steps = _Steps(packing, micro_batch_size, global_batch_size, dp_rank, dp_size)
        self._fingerprint = {
            "dataloader.path": f"{config.source} {documents.texts_digest}",
            "tokenizer": f"token ids {documents.tokens_digest}",
            "training.seq_len": seq_len,
            "dataloader.packing": config.packing,
            "dataloader.shuffle": config.shuffle,
            "training.seed": order_seed,
        }
        self._samples_consumed = 0
        self._items: Iterator[MicroBatches] | None = None

    def _read(self, tokenizer: BaseTokenizer, seq_len: int, seed: int) -> TokenizedDocuments:
        config = self._config
        if config.source == "synthetic":
            count = DEFAULT_COUNT if config.documents is None else config.documents
            logger.info("%s data: random token ids", config.split)
            documents = synthetic_documents(count, tokens=seq_len, tokenizer=tokenizer, seed=seed, split=config.split)
        else:
            if config.path is None:
                path = CORPUS_FILES[config.split]
                logger.info("%s data: no path given, using the embedded Shakespeare corpus %s", config.split, path.name)
            else:
                path = Path(config.path)
            documents = tokenize(islice(read_texts(path, config.text_field), config.documents), tokenizer)
        logger.info(
            "%s data: %s documents, %s tokens%s",
            config.split,
            f"{len(documents.lengths):,}",
            f"{len(documents.token_ids):,}",
            f"; {documents.empty_texts:,} empty texts left out" if documents.empty_texts else "",
        )
        return documents

    def __next__(self) -> MicroBatches:
        if self._items is None:
            self._items = self._start()
        item = next(self._items)
        self._samples_consumed += self._global_batch_size
        return item

    def state_dict(self) -> dict[str, Any]:
        return {"samples_consumed": self._samples_consumed, "fingerprint": dict(self._fingerprint)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to the position of `state`, which may come from another world, batch size or number of workers.

        Raises:
            ConfigError: the state belongs to other data or another order; one fault for each thing that differs.
        """
        saved, now = state["fingerprint"], self._fingerprint
        differing = [name for name in now if saved.get(name) != now[name]]
        if "dataloader.path" in differing and "tokenizer" in differing:
            differing.remove("tokenizer")  # other text has other token ids with the same tokenizer too
        remedy = "resume with what it was saved with, or start anew in another dump_folder"
        raise_faults(
            Fault(name, f"{now[name]} here, but the position was saved with {saved.get(name)}", remedy)
            for name in differing
        )
        self.close()
        self._samples_consumed = state["samples_consumed"]

    def close(self) -> None:
        if isinstance(self._items, BackgroundPrefetcher):
            self._items.close()
        self._items = None  # torch's iterator ends its worker processes when it goes

    def _start(self) -> Iterator[MicroBatches]:
        config, platform = self._config, get_platform()
        loader = DataLoader(
            self._steps,
            batch_size=None,
            sampler=itertools.count(self._samples_consumed, self._global_batch_size),
            collate_fn=collate_micro_batches,
            num_workers=config.num_workers,
            prefetch_factor=config.prefetch if config.num_workers else None,
            multiprocessing_context=platform.mp_context() if config.num_workers else None,
            pin_memory=platform.pin_memory,
            # Without one of its own it would draw from torch's global generator, and so change what is trained.
            generator=torch.Generator(),
        )
        items = iter(loader)
        return BackgroundPrefetcher(items, config.prefetch) if config.prefetch else items


class _Steps(Dataset[list[PackedRows]]):
    """The packed rows of one rank for the step that begins with a given global row."""

    def __init__(
        self, packing: Packing, micro_batch_size: int, global_batch_size: int, dp_rank: int, dp_size: int
    ) -> None:
        self._packing = packing
        # [micro-batches, B]: which rows of a step are this rank's.
        self._rows = np.arange(global_batch_size).reshape(-1, dp_size, micro_batch_size)[:, dp_rank]

    def __getitem__(self, first_sample: int) -> list[PackedRows]:
        return [self._packing.take(first_sample + rows) for rows in self._rows]
