"""One item a step: the micro-batches of this data-parallel rank, from an order that no world size changes.

Rows are numbered over all epochs and ranks. With `samples_consumed` rows behind it, a step takes the next
`global_batch_size`; micro-batch m of data-parallel rank r gets `micro_batch_size` of them, beginning with number
``samples_consumed + (m * dp_size + r) * micro_batch_size``. So the counter alone is the position, for every world size,
accumulation and number of workers.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from hyper_parallel.components.data.best_fit import Cost
from hyper_parallel.components.data.loader_faults import loader_faults
from hyper_parallel.components.data.mixture import Stopping
from hyper_parallel.components.data.prefetch import BackgroundPrefetcher
from hyper_parallel.components.data.rows import numbered_rows, streamed_rows
from hyper_parallel.components.data.sources import Source
from hyper_parallel.components.data.sources.source import OnError
from hyper_parallel.components.data.steps import BatchShape, MicroBatches, numbered_steps
from hyper_parallel.components.data.transforms import Transform
from hyper_parallel.components.tokenizer import BaseTokenizer
from hyper_parallel.config.configurable import Buildable, Configurable, slot
from hyper_parallel.config.errors import ConfigError, Fault, raise_faults

logger = logging.getLogger(__name__)


class BaseDataLoader(Configurable, Iterator[MicroBatches]):
    """An endless iterator; one item is one optimizer step, the same number of steps on every rank."""

    rows_per_epoch: int | None
    """Rows of one pass over the data, over all ranks. None: the data is streamed, so nobody knows before its end."""

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
    """Documents of token ids, packed into rows of `seq_len` tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        source: Literal[
            "text", "txt", "jsonl", "parquet", "arrow", "csv", "pt", "indexed", "huggingface", "synthetic"
        ] = "text"
        """What `path` is. text: what is found there. synthetic: random token ids from the training seed, seq_len of
        them in each document, and no path."""
        path: str | None = None
        """File, folder or pattern (.txt is one document; .jsonl(.gz, .zst), .parquet, .arrow, .csv and .pt hold many),
        prefix of a .bin and .idx, or name on the Hugging Face hub. None: the corpus in the package."""
        split: Literal["train", "validation"] = "train"
        """Part to read of the corpus in the package or of a Hugging Face data set. Files are read as a whole."""
        subset: str | None = None
        """Configuration of a Hugging Face data set, such as wikitext-2-raw-v1."""
        text_field: str = "text"
        """Field or column that holds the text."""
        sources: tuple[Buildable[Source], ...] = slot(tuple, runtime="on_error")
        """Several sources, or one of your own, in the place of `path`."""
        weights: tuple[float, ...] = ()
        """Share of each of `sources`. Empty: equal ones."""
        weigh_by: Literal["tokens", "samples"] = "tokens"
        """What the weights are shares of: tokens, or samples, which are documents."""
        stopping: Stopping = "repeat"
        """End of an epoch of several sources. first_exhausted: when one ends, and all begin anew. all_exhausted: when
        all have ended, shorter ones repeat. repeat: after as many rows as they have together, each goes on."""
        transform: Buildable[Transform] | None = slot(None, runtime="tokenizer seq_len")
        """What makes token ids of a document. None: plain text of `text_field`; .bin, .idx and .pt are token ids."""
        on_error: OnError = "raise"
        """raise: stop at a document that cannot be read. skip: leave it out, and count it."""
        documents: int | None = None
        """Take this many documents, or as many as there are. None: all of a text, 1024 of synthetic data."""
        reading: Literal["ahead", "stream"] = "ahead"
        """ahead: all documents are tokenised before training, into a temporary file. stream: while training, shuffled
        within windows; an epoch has no known length."""
        shuffle_window: int | None = None
        """Documents of a stream that are shuffled and packed together. None: 1024."""
        packing: Literal["concat", "best_fit", "pad", "megatron"] = "concat"
        """concat: documents one after the other, cut into full rows. best_fit: whole documents, rows padded.
        pad: one document a row, padded. megatron: .bin and .idx as Megatron-LM cuts and orders them."""
        packing_cost: Cost = "total"
        """What best_fit keeps even. total: rows are as full as can be. trained: rows train equally many tokens."""
        document_mask: bool = True
        """Tokens attend within their document, at positions from 0. Off: to all of the row before them; with megatron
        the first token of a document is then trained too, as it is there by default."""
        shuffle: bool = True
        """Another order of documents and rows in each epoch, from the training seed. Off: the order of the file."""
        num_workers: int = 0
        """Processes that prepare batches; 0 leaves it to the background thread, which is faster for text in memory.
        Of a stream, each reads it all and tokenises its share."""
        prefetch: int = 2
        """Steps that the background thread, and each worker process, prepares ahead. 0: none, and no thread."""

        def faults(self) -> Iterator[Fault]:
            yield from loader_faults(self)

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
        """Reads and tokenises the documents, or draws them, or opens what is streamed.

        Raises:
            ConfigError: the data cannot be read or gives fewer rows than one step takes, or the batch sizes do not
                divide.
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
        self._shape = BatchShape(
            micro_batch_size=micro_batch_size,
            global_batch_size=global_batch_size,
            dp_rank=dp_rank,
            dp_size=dp_size,
            document_mask=config.document_mask,
            vocab_size=tokenizer.vocab_size,
        )
        self._numbered = self._streamed = None
        if config.reading == "ahead":
            self._numbered, data = numbered_rows(config, tokenizer, seq_len, seed, global_batch_size)
            self._position: dict[str, Any] = {"samples_consumed": 0}
        else:
            self._streamed, data = streamed_rows(config, tokenizer, seq_len, seed)
            self._position = self._streamed.state_dict()
        self._fingerprint = data | {
            "training.seq_len": seq_len,
            "dataloader.packing": config.packing,
            "dataloader.shuffle": config.shuffle,
            "training.seed": seed if config.shuffle else None,
        }
        self._items: Iterator[tuple[MicroBatches, dict[str, Any]]] | None = None

    @property
    def rows_per_epoch(self) -> int | None:
        return None if self._numbered is None else self._numbered.rows_per_epoch

    def __next__(self) -> MicroBatches:
        if self._items is None:
            self._items = self._start()
        item, self._position = next(self._items)
        return item

    def state_dict(self) -> dict[str, Any]:
        return {**self._position, "fingerprint": dict(self._fingerprint)}

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
        self._position = {name: value for name, value in state.items() if name != "fingerprint"}

    def close(self) -> None:
        if isinstance(self._items, BackgroundPrefetcher):
            self._items.close()
        self._items = None  # torch's iterator ends its worker processes when it goes
        if self._streamed is not None:
            self._streamed.tell_counts()

    def _start(self) -> Iterator[tuple[MicroBatches, dict[str, Any]]]:
        items = self._numbered_items() if self._streamed is None else self._streamed_items()
        return BackgroundPrefetcher(items, self._config.prefetch) if self._config.prefetch else items

    def _numbered_items(self) -> Iterator[tuple[MicroBatches, dict[str, Any]]]:
        config, samples = self._config, self._position["samples_consumed"]
        assert self._numbered is not None, "this is what is not streamed"
        for item in numbered_steps(
            self._numbered, self._shape, samples, num_workers=config.num_workers, prefetch=config.prefetch
        ):
            samples += self._shape.global_batch_size
            yield item, {"samples_consumed": samples}

    def _streamed_items(self) -> Iterator[tuple[MicroBatches, dict[str, Any]]]:
        assert self._streamed is not None, "this is what is streamed"
        self._streamed.load_state_dict(self._position)
        return self._streamed.steps(self._shape)
