"""What a transform is."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from hyper_parallel.components.data.documents import Document
from hyper_parallel.components.data.sources.source import Record
from hyper_parallel.components.tokenizer import BaseTokenizer
from hyper_parallel.config.configurable import Configurable
from hyper_parallel.config.errors import ConfigError


class Transform(Configurable, ABC):
    """Makes documents of records, in two steps, so that what is wrong with a record is known before it is encoded."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Base of the settings of transforms."""

    def __init__(self, config: Config, *, tokenizer: BaseTokenizer, seq_len: int) -> None:
        self._tokenizer = tokenizer
        self._seq_len = seq_len

    @abstractmethod
    def read(self, record: Record) -> Any:
        """What is used of the record, as plain data.

        Raises:
            ConfigError: it lacks what is needed; says where it stands.
        """

    @abstractmethod
    def encode(self, contents: list[Any]) -> list[Document]:
        """The document of each of the contents that `read` gave."""

    def to_bytes(self, content: Any) -> bytes:
        """What identifies a content: other data has other bytes."""
        return json.dumps(content, sort_keys=True, default=str).encode()


def field_of(record: Record, name: str, setting: str, what: str) -> Any:
    """The value of a field of the record.

    Raises:
        ConfigError: at the path `setting`, with the fields that there are; `what` is what the field should hold.
    """
    if name not in record:
        fields = ", ".join(map(repr, record)) or "no fields"
        fact = f"{name!r} is not in {record.where}, which has {fields}"
        raise ConfigError.one(setting, fact, f"name the field with the {what}")
    return record[name]
