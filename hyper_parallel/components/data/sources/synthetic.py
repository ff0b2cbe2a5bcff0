"""Random token ids, for runs that need rows of the right size and no text."""

from __future__ import annotations

import hashlib

import numpy as np

from hyper_parallel.components.data.documents import TokenizedDocuments, tokens_digest
from hyper_parallel.components.tokenizer import BaseTokenizer

DEFAULT_COUNT = 1024
"""Documents when their number is not given."""

_SPLITS = ("train", "validation")


def synthetic_documents(
    count: int, *, tokens: int, tokenizer: BaseTokenizer, seed: int, split: str
) -> TokenizedDocuments:
    """`count` documents of `tokens` random ids and EOS: the same from the same (seed, split) on every machine.

    Ids are the raw output of a counter-based generator modulo the tokenizer's vocabulary, see
    `order.epoch_permutation`; a 64-bit number leaves all of them equally likely to one part in 10^14.
    """
    generator = np.random.Philox(key=np.array([seed, _SPLITS.index(split)], np.uint64))
    token_ids = np.full((count, tokens + 1), tokenizer.eos_id, np.min_scalar_type(tokenizer.vocab_size - 1))
    for document in token_ids:  # one at a time: the generator's numbers take eight bytes each
        document[:-1] = generator.random_raw(tokens) % tokenizer.vocab_size
    offsets = np.arange(count + 1, dtype=np.int64) * (tokens + 1)
    origin = f"synthetic {split} {count} {tokens} {seed}"
    return TokenizedDocuments(
        token_ids.reshape(-1),
        offsets,
        texts_digest=hashlib.blake2b(origin.encode(), digest_size=16).hexdigest(),
        tokens_digest=tokens_digest(token_ids.reshape(-1), offsets),
    )
