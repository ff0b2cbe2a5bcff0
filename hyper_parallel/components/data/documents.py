"""Tokenised documents, as packing takes them."""

from __future__ import annotations

import hashlib
import os
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.reduction import DupFd
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hyper_parallel.components.data.mapped_numbers import MappedNumbers

_HASHED_TOKENS = 1 << 16  # at a time, since they are widened for it


class Document(NamedTuple):
    """What a transform makes of one record."""

    ids: Sequence[int]
    """Token ids, the one that ends the document included. None at all: the document is left out."""
    trained: Sequence[bool] | None = None
    """[ids]: whether each is to be predicted. None: all of them. The first of a document never is."""
    note: str = ""
    """What was done to it, such as ``empty texts left out``: counted, and told at the start."""


@dataclass(frozen=True, slots=True)
class TokenizedDocuments:
    """All documents one after the other."""

    token_ids: npt.NDArray[np.integer]
    """[tokens], in any integer type."""
    offsets: npt.NDArray[np.int64]
    """[documents + 1]: document d is ``token_ids[offsets[d]:offsets[d + 1]]``."""
    texts_digest: str
    """Digest of the documents as they were read and of where each ends."""
    tokens_digest: str
    """Digest of the token ids, which depend on the tokenizer too, and of which are trained."""
    trained: npt.NDArray[np.bool_] | None = None
    """[tokens]: whether each is to be predicted; None: all of them."""
    counts: dict[str, int] = field(default_factory=dict)
    """What was done to documents, or why they were left out -> how many."""

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """[documents]: tokens of each, EOS included."""
        return np.diff(self.offsets)


def tokens_digest(
    token_ids: npt.NDArray[np.integer],
    offsets: npt.NDArray[np.int64],
    trained: npt.NDArray[np.bool_] | None = None,
) -> str:
    """Digest of documents, whatever type their ids are held in."""
    digest = hashlib.blake2b(np.ascontiguousarray(offsets, "<i8"), digest_size=16)
    for start in range(0, len(token_ids), _HASHED_TOKENS):
        digest.update(token_ids[start : start + _HASHED_TOKENS].astype("<u4"))
    if trained is not None:
        for start in range(0, len(trained), _HASHED_TOKENS):
            digest.update(np.packbits(trained[start : start + _HASHED_TOKENS]))
    return digest.hexdigest()


class DocumentWriter:
    """Collects documents in a temporary file without a name, so that memory does not grow with them.

    The file stands where `tempfile` puts it (TMPDIR), and ends with the process.
    """

    def __init__(self, vocab_size: int) -> None:
        self._token_ids = _Spool(np.min_scalar_type(vocab_size - 1))
        self._trained: _Spool | None = None
        self._lengths = _Spool(np.dtype(np.int64))

    def add(self, document: Document) -> None:
        """Adds one document of at least one token."""
        if document.trained is not None and self._trained is None:
            self._trained = _Spool(np.dtype(np.bool_))
            for start in range(0, self._token_ids.size, _HASHED_TOKENS):
                self._trained.append(np.ones(min(_HASHED_TOKENS, self._token_ids.size - start), np.bool_))
        self._token_ids.append(document.ids)
        if self._trained is not None:
            self._trained.append(np.ones(len(document.ids)) if document.trained is None else document.trained)
        self._lengths.append([len(document.ids)])

    def finish(self, texts_digest: str, counts: dict[str, int]) -> TokenizedDocuments:
        """All documents that were added; the writer takes no more."""
        lengths = self._lengths.finish()
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        token_ids = self._token_ids.finish()
        trained = None if self._trained is None else self._trained.finish()
        return TokenizedDocuments(
            token_ids, offsets, texts_digest, tokens_digest(token_ids, offsets, trained), trained, counts
        )


class _Spool:
    """Numbers written to a temporary file, and mapped into memory in the end."""

    def __init__(self, dtype: np.dtype) -> None:
        self._dtype = dtype
        self._file = tempfile.TemporaryFile(prefix="hyper_parallel_")  # noqa: SIM115  closed by finish()
        self.size = 0

    def append(self, numbers: npt.ArrayLike) -> None:
        array = np.asarray(numbers, self._dtype)
        self._file.write(array.tobytes())
        self.size += array.size

    def finish(self) -> npt.NDArray:
        with self._file as file:
            file.flush()
            return _mapped(file, self._dtype, self.size) if self.size else np.empty(0, self._dtype)


def _mapped(file: IO[bytes], dtype: np.dtype, size: int) -> MappedNumbers:
    descriptor = os.dup(file.fileno())  # by which a worker gets at a file that has no name
    numbers = MappedNumbers.of(
        np.memmap(file, dtype, "r", shape=(size,)), lambda: (_mapped_again, (DupFd(descriptor), dtype, size))
    )
    weakref.finalize(numbers, os.close, descriptor)
    return numbers


def _mapped_again(descriptor: Any, dtype: np.dtype, size: int) -> MappedNumbers:
    with open(descriptor.detach(), "rb") as file:
        return _mapped(file, dtype, size)
