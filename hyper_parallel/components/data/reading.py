"""Documents out of a source, through a transform."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from hyper_parallel.components.data.documents import Document, DocumentWriter, TokenizedDocuments
from hyper_parallel.components.data.sources.source import OnError, Record, Source
from hyper_parallel.components.data.transforms import Transform
from hyper_parallel.config.errors import ConfigError

logger = logging.getLogger(__name__)

UNREADABLE = "unreadable documents skipped"
_TEXTS_PER_BATCH = 64  # what the tokenizer makes beside token ids is a hundred bytes a token
_SHOWN_ERRORS = 3


class DocumentReader:
    """Makes documents of the records of a source, some at a time, and counts what it leaves out."""

    def __init__(self, transform: Transform, on_error: OnError, digest: Any = None) -> None:
        """`digest`, a hash, is updated with all that is read."""
        self._transform = transform
        self._on_error = on_error
        self._digest = digest
        self.counts: Counter[str] = Counter()
        """What was done to documents, or why they were left out -> how many."""

    def read(self, records: Iterator[Mapping[str, Any]], origin: str) -> Iterator[Document]:
        """The documents of `records`; those that hold no token are left out.

        Raises:
            ConfigError: a record lacks what the transform needs, unless such are skipped; names it, or `origin`.
        """
        number = 0
        while batch := list(islice(records, _TEXTS_PER_BATCH)):
            contents = []
            for record in batch:
                number += 1
                try:
                    content = self._transform.read(_placed(record, f"document {number} of {origin}"))
                except ConfigError as error:
                    self._skip(error)
                    continue
                contents.append(content)
                if self._digest is not None:
                    data = self._transform.to_bytes(content)
                    self._digest.update(len(data).to_bytes(8, "little") + data)
            for document in self._transform.encode(contents):
                if document.note:
                    self.counts[document.note] += 1
                if len(document.ids):
                    yield document

    def count_unreadable(self, documents: int) -> None:
        """Counts documents that the source itself has skipped."""
        if documents:
            self.counts[UNREADABLE] += documents

    def _skip(self, error: ConfigError) -> None:
        if self._on_error == "raise":
            raise error
        self.counts[UNREADABLE] += 1
        if self.counts[UNREADABLE] <= _SHOWN_ERRORS:
            logger.warning("skipped: %s", error)


def read_documents(
    source: Source,
    records: Iterator[Mapping[str, Any]],
    transform: Transform,
    *,
    vocab_size: int,
    limit: int | None = None,
    on_error: OnError = "raise",
) -> TokenizedDocuments:
    """All documents of a source, or the first `limit` of them. Needs memory for one batch of texts.

    Args:
        records: what iterating over the source gives.

    Raises:
        ConfigError: the source cannot be read, or a document of it.
    """
    digest = hashlib.blake2b(digest_size=16)
    reader = DocumentReader(transform, on_error, digest)
    writer = DocumentWriter(vocab_size)
    for document in reader.read(islice(records, limit), type(source).__name__):
        writer.add(document)
    reader.count_unreadable(getattr(source, "skipped", 0))
    return writer.finish(digest.hexdigest(), dict(reader.counts))


def _placed(record: Mapping[str, Any], where: str) -> Record:
    if isinstance(record, Record):
        return record
    if not isinstance(record, Mapping):
        raise ConfigError.one("dataloader.sources", f"{where} is {record!r:.40}, not a mapping", "give one of fields")
    return Record(record, where)
