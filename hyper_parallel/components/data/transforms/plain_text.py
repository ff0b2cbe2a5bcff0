"""Text as it stands."""

from __future__ import annotations

from dataclasses import dataclass

from hyper_parallel.components.data.documents import Document
from hyper_parallel.components.data.sources.source import Record
from hyper_parallel.components.data.transforms.transform import Transform, field_of
from hyper_parallel.components.tokenizer import BaseTokenizer
from hyper_parallel.config.errors import ConfigError


class PlainTextTransform(Transform):
    """The text of one field, and EOS. Every token is trained."""

    @dataclass(kw_only=True, slots=True)
    class Config(Transform.Config):
        """Where the text is."""

        field: str = "text"
        """Field that holds the text."""

    def __init__(self, config: Config, *, tokenizer: BaseTokenizer, seq_len: int) -> None:
        super().__init__(config, tokenizer=tokenizer, seq_len=seq_len)
        self._field = config.field

    def read(self, record: Record) -> str:
        text = field_of(record, self._field, "dataloader.text_field", "text")
        where = f"{self._field!r} in {record.where}"
        if not isinstance(text, str):
            fact = f"{where} is {text!r:.40}, not text"
            raise ConfigError.one("dataloader.text_field", fact, "name a field that holds text")
        try:
            text.encode()  # far faster than a look at each character
        except UnicodeEncodeError as error:
            fact = f"{where} holds half a surrogate pair (\\ud800 to \\udfff), which is no character"
            raise ConfigError.one("dataloader.path", fact, "mend or remove the line") from error
        return text

    def encode(self, contents: list[str]) -> list[Document]:
        return [
            Document([*ids, self._tokenizer.eos_id]) if ids else Document((), note="empty texts left out")
            for ids in self._tokenizer.encode_batch(contents)
        ]

    def to_bytes(self, content: str) -> bytes:
        return content.encode()
