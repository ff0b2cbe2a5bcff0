"""Data whose token ids are known: a text is a list of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from hyper_parallel.components.data import TextDataLoader
from hyper_parallel.components.data.documents import Document, DocumentWriter, TokenizedDocuments
from hyper_parallel.components.tokenizer import BaseTokenizer
from hyper_parallel.config.configurable import Configurable

EOS = 9
PAD = 0


class NumberTokenizer(BaseTokenizer):
    """The text "5 0 6" has the ids [5, 0, 6]."""

    def __init__(self, config: Configurable.Config | None = None, *, eos_id: int = EOS) -> None:
        self.eos_id, self.pad_id, self.vocab_size = eos_id, PAD, 100_000

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [[int(word) for word in text.split()] for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


def write_documents(path: Path, documents: Iterable[Iterable[int]]) -> str:
    path.write_text("".join(json.dumps({"text": " ".join(map(str, ids))}) + "\n" for ids in documents))
    return str(path)


def counted_documents(lengths: Sequence[int], first: int = 1000) -> list[list[int]]:
    """Documents of the given lengths in which no id stands twice, so that an id tells its place."""
    documents = []
    for length in lengths:
        documents.append(list(range(first, first + length)))
        first += length
    return documents


def tokenized(
    documents: Iterable[Sequence[int]], trained: Iterable[Sequence[bool]] | None = None
) -> TokenizedDocuments:
    """Documents of the given ids and EOS. With `trained`, what is trained of each, EOS included."""
    writer = DocumentWriter(NumberTokenizer().vocab_size)
    masks = [None] * len(list(documents)) if trained is None else trained
    for ids, mask in zip(documents, masks, strict=True):
        writer.add(Document([*ids, EOS], mask))
    return writer.finish("", {})


def build_loader(
    path: str | None, *, seq_len: int, micro=1, batch=1, rank=0, size=1, seed=42, eos_id=EOS, tokenizer=None, **config
):
    return TextDataLoader.Config(path=path, **config).build(
        tokenizer=tokenizer or NumberTokenizer(eos_id=eos_id),
        seq_len=seq_len,
        micro_batch_size=micro,
        global_batch_size=batch,
        dp_rank=rank,
        dp_size=size,
        seed=seed,
    )


def rows_of(item: list[dict]) -> list[tuple[int, ...]]:
    """The input ids of every row of a step, in order: what identifies a sample."""
    return [tuple(row) for micro_batch in item for row in micro_batch["input_ids"].tolist()]
