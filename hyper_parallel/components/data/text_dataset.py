"""Text as a dataset in Hugging Face's manner: rows of equal length, with labels that are not shifted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hyper_parallel.assets import CORPUS_FILES
from hyper_parallel.components.data.reading import DocumentReader
from hyper_parallel.components.data.sources import JsonLinesSource, choose_source
from hyper_parallel.components.data.transforms import PlainTextTransform
from hyper_parallel.components.tokenizer import adopted_tokenizer
from hyper_parallel.config.errors import ConfigError
from hyper_parallel.config.sections import TrainingConfig

Sample = dict[str, Tensor]
"""`input_ids`, `attention_mask` and `labels`, int64 [T]; labels are the ids, which the trainer shifts."""


class TokenRows(Dataset[Sample]):
    """Rows of token ids."""

    def __init__(self, ids_RT: npt.NDArray[np.int64]) -> None:
        self._ids_RT = ids_RT

    def __len__(self) -> int:
        return len(self._ids_RT)

    def __getitem__(self, row: int) -> Sample:
        ids_T = torch.from_numpy(self._ids_RT[row])
        return {"input_ids": ids_T, "attention_mask": torch.ones_like(ids_T), "labels": ids_T}


class PlainTextDataTransform:
    """Tokenises documents one after the other, and cuts what they are together into rows of equal length."""

    def __init__(
        self,
        text_column: str = "text",
        seq_len: int | None = None,
        append_eos: bool = True,
        *,
        tokenizer: Any,
        training_config: TrainingConfig,
    ) -> None:
        """
        Args:
            text_column: field of a document that holds its text.
            seq_len: tokens in a row. None: training.seq_len, from which it cannot differ.
            append_eos: end each document with the EOS token.

        Raises:
            ConfigError: `seq_len` is not training.seq_len.
        """
        if seq_len not in (None, training_config.seq_len):
            fact = f"{seq_len}, but training.seq_len is {training_config.seq_len}"
            raise ConfigError.one("data_transform.seq_len", fact, "leave it out, or give both the same")
        self._seq_len, self._append_eos = training_config.seq_len, append_eos
        self._transform = PlainTextTransform.Config(field=text_column).build(
            tokenizer=adopted_tokenizer(tokenizer), seq_len=self._seq_len
        )

    def __call__(self, documents: Iterable[Mapping[str, Any]]) -> TokenRows:
        """The full rows of `documents`; tokens that fill no row at the end are left out.

        Raises:
            ConfigError: a document has no such column.
        """
        ends = None if self._append_eos else -1
        read = DocumentReader(self._transform, "raise").read(iter(documents), "the dataset")
        ids = [np.asarray(document.ids[:ends], np.int64) for document in read]
        flat = np.concatenate(ids) if ids else np.empty(0, np.int64)
        rows = len(flat) // self._seq_len
        return TokenRows(flat[: rows * self._seq_len].reshape(rows, self._seq_len))


def load_text_dataset(
    path: str | None = None,
    name: str | None = None,
    split: str = "train",
    *,
    transform: Callable[[Iterable[Mapping[str, Any]]], Dataset[Sample]],
) -> Dataset[Sample]:
    """What `transform` makes of the documents at `path`.

    Args:
        path: a file, a folder, a pattern, or a name on the Hugging Face hub. None: the corpus in the package.
        name: configuration of a data set of the hub, such as wikitext-2-raw-v1.
        split: of a data set of the hub, or of the corpus in the package.
        transform: such as a PlainTextDataTransform.

    Raises:
        ConfigError: nothing can be read there.
    """
    if path is None:
        if split not in CORPUS_FILES:
            choices = " or ".join(CORPUS_FILES)
            raise ConfigError.one("dataset.split", f"the corpus in the package has no {split!r}", f"give {choices}")
        source: Any = JsonLinesSource.Config(path=str(CORPUS_FILES[split])).build()
    else:
        source = choose_source(path, subset=name, split=split).build()
    return transform(_records(source))


def _records(source: Any) -> Iterator[Mapping[str, Any]]:
    yield from source
