"""The rows that the settings of a dataloader ask for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from hyper_parallel.components.data.best_fit import BestFitPacking
from hyper_parallel.components.data.documents import TokenizedDocuments
from hyper_parallel.components.data.gpt_rows import GPTRows
from hyper_parallel.components.data.indexed import IndexedDataset
from hyper_parallel.components.data.mapped_numbers import MappedNumbers
from hyper_parallel.components.data.mixture import Mixture
from hyper_parallel.components.data.opening import at_source, open_sources, transform_of
from hyper_parallel.components.data.packing import ConcatPacking, Packing, PadPacking
from hyper_parallel.components.data.reading import read_documents
from hyper_parallel.components.data.sources import IndexedSource
from hyper_parallel.components.data.sources.synthetic import DEFAULT_COUNT, synthetic_documents
from hyper_parallel.components.data.steps import NumberedRows
from hyper_parallel.components.data.stream import RowStream, StreamedRows, StreamSettings
from hyper_parallel.components.tokenizer import BaseTokenizer
from hyper_parallel.config.errors import ConfigError

if TYPE_CHECKING:
    from hyper_parallel.components.data.loader import TextDataLoader

logger = logging.getLogger(__name__)

DEFAULT_WINDOW = 1024
"""Documents of a stream that are shuffled together, when their number is not given."""


class NamedDocuments(NamedTuple):
    """The documents of one source."""

    name: str
    """The source, as log lines name it."""
    documents: TokenizedDocuments


def numbered_rows(
    config: TextDataLoader.Config, tokenizer: BaseTokenizer, seq_len: int, seed: int, global_batch_size: int
) -> tuple[NumberedRows, dict[str, Any]]:
    """(rows of documents that are read now, what identifies the data).

    Raises:
        ConfigError: the data cannot be read, or gives fewer rows than one step takes.
    """
    if config.packing == "megatron":
        gpt_rows = _gpt_rows(config, tokenizer, seq_len, seed)
        if gpt_rows.rows_per_epoch < global_batch_size:
            raise _too_few(config, [], gpt_rows.rows_per_epoch, seq_len, global_batch_size)
        return gpt_rows, {"dataloader.path": f"megatron {gpt_rows.fingerprint}"}
    data = [documents for _, documents in read_sources(config, tokenizer, seq_len, seed)]
    rows, _ = packed_rows(config, data, tokenizer, seq_len, seed)
    fingerprint: dict[str, Any] = {
        "dataloader.path": f"{'synthetic' if config.source == 'synthetic' else 'text'} "
        + " ".join(documents.texts_digest for documents in data),
        "tokenizer": "token ids " + " ".join(documents.tokens_digest for documents in data),
    }
    if len(data) > 1:
        fingerprint |= _mixture_fingerprint(config) | {"dataloader.stopping": config.stopping}
    if config.packing == "best_fit":
        fingerprint["dataloader.packing_cost"] = config.packing_cost
    if rows.rows_per_epoch < global_batch_size:
        raise _too_few(config, data, rows.rows_per_epoch, seq_len, global_batch_size)
    return rows, fingerprint


def packed_rows(
    config: TextDataLoader.Config, data: list[TokenizedDocuments], tokenizer: BaseTokenizer, seq_len: int, seed: int
) -> tuple[NumberedRows, list[Packing]]:
    """(the rows of all sources together, those of each).

    Raises:
        ConfigError: one of several sources gives no row.
    """
    packings = [make_packing(config, documents, tokenizer, seq_len, seed) for documents in data]
    if len(packings) == 1:
        return packings[0], packings
    for i, packing in enumerate(packings):
        if packing.rows_per_epoch == 0:
            raise ConfigError.one(f"dataloader.sources.{i}", "gives not one row", "give a longer source")
    shares = [
        # As many rows as hold the wanted part of the tokens, or of the documents.
        weight * packing.rows_per_epoch / len(documents.token_ids if by_tokens(config) else documents.lengths)
        for weight, packing, documents in zip(_weights(config), packings, data, strict=True)
    ]
    order_seed = seed if config.shuffle else None
    return Mixture(packings, shares, stopping=config.stopping, seed=order_seed), packings


def streamed_rows(
    config: TextDataLoader.Config, tokenizer: BaseTokenizer, seq_len: int, seed: int
) -> tuple[StreamedRows, dict[str, Any]]:
    """(rows of sources that are read while training, what identifies the data).

    Raises:
        ConfigError: a source cannot be opened.
    """
    sources = list(open_sources(config))
    settings = StreamSettings(
        window=config.shuffle_window or DEFAULT_WINDOW,
        limit=config.documents,
        on_error=config.on_error,
        num_workers=config.num_workers,
        prefetch=config.prefetch,
        by_tokens=by_tokens(config),
    )
    streams = [
        RowStream(
            source,
            transform_of(config, source, tokenizer, seq_len),
            settings,
            lambda documents: make_packing(config, documents, tokenizer, seq_len, seed),
        )
        for _, source in sources
    ]
    fingerprint: dict[str, Any] = {
        "dataloader.path": "stream "
        + " ".join(str(getattr(source, "fingerprint", type(source).__qualname__)) for _, source in sources),
        "tokenizer": f"{tokenizer.vocab_size} entries, EOS {tokenizer.eos_id}",
        "dataloader.shuffle_window": settings.window,
        "dataloader.documents": config.documents,
    }
    if len(streams) > 1:
        fingerprint |= _mixture_fingerprint(config)
    logger.info("%s data: streamed from %s", config.split, ", ".join(name for name, _ in sources))
    return StreamedRows(streams, _weights(config)), fingerprint


def read_sources(
    config: TextDataLoader.Config,
    tokenizer: BaseTokenizer,
    seq_len: int,
    seed: int,
    watch: Callable[[Iterator[Any], str], Iterator[Any]] = lambda records, name: records,
) -> Iterator[NamedDocuments]:
    """The documents of each source, one source after the other.

    Args:
        watch: sees the records of the source of a name go by, as a progress bar does.

    Raises:
        ConfigError: a source cannot be read.
    """
    if config.source == "synthetic":
        count = DEFAULT_COUNT if config.documents is None else config.documents
        logger.info("%s data: random token ids", config.split)
        documents = synthetic_documents(count, tokens=seq_len, tokenizer=tokenizer, seed=seed, split=config.split)
        yield _told(config, "synthetic", documents)
        return
    for i, (name, source) in enumerate(open_sources(config)):
        with at_source(config, i):
            if isinstance(source, IndexedSource) and config.transform is None:
                documents = _indexed_documents(source, config.documents)
            else:
                documents = read_documents(
                    source,
                    watch(iter(source), name),
                    transform_of(config, source, tokenizer, seq_len),
                    vocab_size=tokenizer.vocab_size,
                    limit=config.documents,
                    on_error=config.on_error,
                )
        yield _told(config, name, documents)


def make_packing(
    config: TextDataLoader.Config, documents: TokenizedDocuments, tokenizer: BaseTokenizer, seq_len: int, seed: int
) -> Packing:
    """The documents in rows, as `config.packing` asks for."""
    arguments: dict[str, Any] = {
        "seq_len": seq_len,
        "pad_id": tokenizer.pad_id,
        "seed": seed if config.shuffle else None,
    }
    if config.packing == "best_fit":
        return BestFitPacking(documents, **arguments, cost=config.packing_cost)
    # Rows of packing megatron are numbered by GPTRows; they are as many, and as full, as those of concat.
    return (PadPacking if config.packing == "pad" else ConcatPacking)(documents, **arguments)


def by_tokens(config: TextDataLoader.Config) -> bool:
    """Whether weights are shares of tokens; of documents otherwise."""
    return config.weigh_by == "tokens"


def _gpt_rows(config: TextDataLoader.Config, tokenizer: BaseTokenizer, seq_len: int, seed: int) -> GPTRows:
    prefixes = []
    for name, source in open_sources(config):
        if not isinstance(source, IndexedSource):
            fact = f"megatron is given, but {name} is no pair of .bin and .idx"
            raise ConfigError.one(
                "dataloader.packing", fact, "make one with data_tools prepare, or choose another packing"
            )
        prefixes.append(source.dataset.prefix)
    rows = GPTRows(
        prefixes,
        config.weights or None,
        seq_len=seq_len,
        seed=seed,
        eod_token_id=tokenizer.eos_id,
        pad_token_id=tokenizer.pad_id,
        vocab_size=tokenizer.vocab_size,
        document_mask=config.document_mask,
    )
    logger.info("%s data: %s samples an epoch of %s", config.split, f"{rows.rows_per_epoch:,}", ", ".join(prefixes))
    return rows


def _indexed_documents(source: IndexedSource, limit: int | None) -> TokenizedDocuments:
    """The pair as it lies on disk: nothing is copied."""
    offsets = source.dataset.document_offsets[: None if limit is None else limit + 1]
    digest = source.fingerprint if limit is None else f"{source.fingerprint} {len(offsets) - 1}"
    return TokenizedDocuments(_tokens(source.dataset, int(offsets[-1])), offsets, digest, digest)


def _tokens(dataset: IndexedDataset, count: int) -> MappedNumbers:
    return MappedNumbers.of(dataset.tokens[:count], lambda: (_tokens, (dataset, count)))


def _told(config: TextDataLoader.Config, name: str, documents: TokenizedDocuments) -> NamedDocuments:
    logger.info(
        "%s data: %s%s documents, %s tokens%s",
        config.split,
        f"{name}: " if len(config.sources) > 1 else "",
        f"{len(documents.lengths):,}",
        f"{len(documents.token_ids):,}",
        "".join(f"; {count:,} {note}" for note, count in documents.counts.items()),
    )
    return NamedDocuments(name, documents)


def _weights(config: TextDataLoader.Config) -> tuple[float, ...]:
    return config.weights or (1.0,) * max(1, len(config.sources))


def _mixture_fingerprint(config: TextDataLoader.Config) -> dict[str, Any]:
    return {"dataloader.weights": list(_weights(config)), "dataloader.weigh_by": config.weigh_by}


def _too_few(
    config: TextDataLoader.Config, data: list[TokenizedDocuments], rows: int, seq_len: int, global_batch_size: int
) -> ConfigError:
    drawn, read = config.source == "synthetic", ""
    if data:
        documents, tokens = sum(len(each.lengths) for each in data), sum(len(each.token_ids) for each in data)
        read = f" ({documents} documents, {tokens} tokens)"
    name = config.path or ("synthetic data" if drawn else f"the embedded {config.split} corpus")
    if config.sources:
        name = f"all of the {len(config.sources)} sources"
    return ConfigError.one(
        "dataloader.documents" if drawn else "dataloader.sources" if config.sources else "dataloader.path",
        f"{name}{read} gives {rows} rows of training.seq_len {seq_len}, "
        f"fewer than training.global_batch_size {global_batch_size}",
        f"give more {'documents' if drawn else 'text'} or smaller sizes",
    )
