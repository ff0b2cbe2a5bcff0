"""Chats, of which only the answers are trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyper_parallel.components.data.documents import Document
from hyper_parallel.components.data.sources.source import Record
from hyper_parallel.components.data.transforms.transform import Transform, field_of
from hyper_parallel.components.tokenizer import BaseTokenizer
from hyper_parallel.config.errors import ConfigError, Fault


class ChatTransform(Transform):
    """Turns of a chat through the tokenizer's chat template; only what the assistant says is trained.

    What follows the last answer is cut off. A chat is left out, and counted, when its first answer begins beyond
    `seq_len` tokens, for then nothing of it could be trained; a longer chat is cut to `seq_len` tokens.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Transform.Config):
        """Where the turns are, and how they are written."""

        field: str = "messages"
        """Field that holds the list of turns, each with `role` and `content`."""
        template: str | None = None
        """File with a Jinja chat template. None: the tokenizer's own."""

        def faults(self):  # type: ignore[no-untyped-def]
            if self.template is not None and not Path(self.template).is_file():
                yield Fault("template", f"{self.template} is no file", "give a file with a Jinja template")

    def __init__(self, config: Config, *, tokenizer: BaseTokenizer, seq_len: int) -> None:
        super().__init__(config, tokenizer=tokenizer, seq_len=seq_len)
        self._field = config.field
        self._template = None if config.template is None else Path(config.template).read_text()

    def read(self, record: Record) -> list[Mapping[str, Any]]:
        messages = field_of(record, self._field, "dataloader.transform.field", "turns")
        where = f"{self._field!r} in {record.where}"
        if not isinstance(messages, Sequence) or not all(
            isinstance(turn, Mapping) and isinstance(turn.get("role"), str) and "content" in turn for turn in messages
        ):
            fact = f"{where} is {str(messages)[:60]}, not a list of turns with role and content"
            raise ConfigError.one("dataloader.transform.field", fact, "name a field that holds the turns of a chat")
        return [dict(turn) for turn in messages]

    def encode(self, contents: list[Any]) -> list[Document]:
        return [self._document(messages) for messages in contents]

    def _document(self, messages: list[Mapping[str, Any]]) -> Document:
        ids, trained = self._tokenizer.encode_chat(messages, self._template) if messages else ([], [])
        if True not in trained:
            return Document((), note="chats without an answer left out")
        first = trained.index(True)
        end = len(trained) - trained[::-1].index(True)
        ids, trained = ids[:end], trained[:end]
        if ids[-1] != self._tokenizer.eos_id:
            ids, trained = [*ids, self._tokenizer.eos_id], [*trained, True]
        if first > self._seq_len:  # a row of seq_len tokens predicts the one after its last
            return Document((), note="chats with a prompt longer than training.seq_len left out")
        cut = self._seq_len + 1
        if len(ids) > cut:
            return Document(ids[:cut], trained[:cut], "chats cut to training.seq_len")
        return Document(ids, trained)
