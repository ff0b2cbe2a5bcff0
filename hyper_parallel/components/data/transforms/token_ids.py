"""Token ids that others have made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hyper_parallel.components.data.documents import Document
from hyper_parallel.components.data.packing import IGNORE_INDEX
from hyper_parallel.components.data.sources.source import Record
from hyper_parallel.components.data.transforms.transform import Transform, field_of
from hyper_parallel.components.tokenizer import BaseTokenizer
from hyper_parallel.config.errors import ConfigError

_INTEGERS = "iu"
_LABELS = "labels"


class TokenIdsTransform(Transform):
    """Token ids as they stand: what ends a document must be among them."""

    @dataclass(kw_only=True, slots=True)
    class Config(Transform.Config):
        """Where the ids are."""

        field: str = "input_ids"
        """Field that holds the token ids."""
        labels_field: str | None = None
        """Field that repeats the ids, with -100 in the place of those that are not trained. None: `labels`, and where a
        document has none, all of it is trained."""
        labels_shifted: bool = False
        """Each label stands beside the token that it is predicted from, instead of beside the same token."""

    def __init__(self, config: Config, *, tokenizer: BaseTokenizer, seq_len: int) -> None:
        super().__init__(config, tokenizer=tokenizer, seq_len=seq_len)
        self._config = config

    def read(self, record: Record) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64] | None]:
        config = self._config
        ids = self._integers(record, config.field)
        if "attention_mask" in record:  # what is masked out is padding, whatever ids stand there
            ids = ids[self._real(record, len(ids))]
        beyond = ids[(ids < 0) | (ids >= self._tokenizer.vocab_size)]
        if len(beyond):
            fact = f"{record.where} holds the token id {beyond[0]}, and the tokenizer's go from 0 to "
            fact += f"{self._tokenizer.vocab_size - 1}"
            raise ConfigError.one("dataloader.path", fact, "give the tokenizer that made the ids")
        if config.labels_field is None and _LABELS not in record:
            return ids, None
        labels = self._integers(record, config.labels_field or _LABELS)
        if "attention_mask" in record:
            labels = labels[self._real(record, len(labels))]
        if len(labels) != len(ids):
            fact = f"{record.where} has {len(ids)} token ids, but {len(labels)} labels"
            raise ConfigError.one("dataloader.transform.labels_field", fact, "mend the data")
        if config.labels_shifted and len(labels):  # one label more than there are ids to predict
            ids = np.append(ids, labels[-1]) if labels[-1] != IGNORE_INDEX else ids
            labels = np.append(IGNORE_INDEX, labels)[: len(ids)]
        wrong = np.flatnonzero((labels != IGNORE_INDEX) & (labels != ids))
        if len(wrong):
            i = wrong[0]
            fact = f"{record.where} has the label {labels[i]} for the token id {ids[i]} at {i}"
            raise ConfigError.one(
                "dataloader.transform.labels_shifted", fact, f"set it {not config.labels_shifted}, or mend the data"
            )
        return ids, labels

    def encode(self, contents: list[Any]) -> list[Document]:
        documents = []
        for ids, labels in contents:
            trained = None if labels is None else labels != IGNORE_INDEX
            empty = len(ids) == 0
            documents.append(Document(ids, trained, "empty documents left out" if empty else ""))
        return documents

    def to_bytes(self, content: Any) -> bytes:
        return b"".join(b"-" if part is None else part.astype("<i8").tobytes() for part in content)

    def _real(self, record: Record, size: int) -> npt.NDArray[np.bool_]:
        mask = self._integers(record, "attention_mask") != 0
        if len(mask) != size:
            fact = f"{record.where} has {size} token ids or labels, but an attention_mask of {len(mask)}"
            raise ConfigError.one("dataloader.path", fact, "mend the data")
        return mask

    def _integers(self, record: Record, field: str) -> npt.NDArray[np.int64]:
        value = field_of(record, field, "dataloader.transform.field", "token ids")
        try:
            array = np.asarray(value)
        except ValueError:  # lists of unequal lengths
            array = np.empty(0, object)
        if array.ndim != 1 or (array.dtype.kind not in _INTEGERS and array.size) or array.dtype.kind == "O":
            fact = f"{field!r} in {record.where} is {str(value)[:40]}, not a list of whole numbers"
            raise ConfigError.one("dataloader.transform.field", fact, "name a field that holds token ids")
        return array.astype(np.int64)
