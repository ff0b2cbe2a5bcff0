"""Tokenised documents in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from hyper_parallel.components.tokenizer import BaseTokenizer

_TEXTS_PER_BATCH = 64  # what the tokenizer makes beside token ids is a hundred bytes a token


@dataclass(frozen=True, slots=True)
class TokenizedDocuments:
    """All documents one after the other, each ending in the EOS token."""

    token_ids: npt.NDArray[np.unsignedinteger]
    """[tokens], in the smallest unsigned type that holds the vocabulary."""
    offsets: npt.NDArray[np.int64]
    """[documents + 1]: document d is ``token_ids[offsets[d]:offsets[d + 1]]``."""
    texts_digest: str
    """Digest of the texts and of where each ends."""
    tokens_digest: str
    """Digest of the token ids, which depend on the tokenizer too."""
    empty_texts: int
    """Texts without a single token, left out."""

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """[documents]: tokens of each, EOS included."""
        return np.diff(self.offsets)


def tokenize(texts: Iterable[str], tokenizer: BaseTokenizer) -> TokenizedDocuments:
    """Encodes every text and ends each with EOS. Needs memory for the token ids and for one batch of texts."""
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    texts_hash = hashlib.blake2b(digest_size=16)
    documents: list[npt.NDArray[np.unsignedinteger]] = []
    empty_texts = 0
    texts = iter(texts)
    while batch := list(islice(texts, _TEXTS_PER_BATCH)):
        for text in batch:
            data = text.encode()
            texts_hash.update(len(data).to_bytes(8, "little"))
            texts_hash.update(data)
        for ids in tokenizer.encode_batch(batch):
            if ids:
                documents.append(np.array([*ids, tokenizer.eos_id], dtype=dtype))
            else:
                empty_texts += 1
    token_ids = np.concatenate(documents) if documents else np.empty(0, dtype)
    offsets = np.zeros(len(documents) + 1, np.int64)
    np.cumsum([len(document) for document in documents], out=offsets[1:])
    return TokenizedDocuments(
        token_ids, offsets, texts_hash.hexdigest(), tokens_digest(token_ids, offsets), empty_texts
    )


def tokens_digest(token_ids: npt.NDArray[np.unsignedinteger], offsets: npt.NDArray[np.int64]) -> str:
    """Digest of documents, whatever type their ids are held in."""
    tokens_hash = hashlib.blake2b(offsets.astype("<i8").tobytes(), digest_size=16)
    tokens_hash.update(token_ids.astype("<u4").tobytes())
    return tokens_hash.hexdigest()
