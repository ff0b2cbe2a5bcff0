"""Where texts come from: the files of the embedded corpus or one of the user's."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from hyper_parallel.config.errors import ConfigError

SUFFIXES = (".txt", ".jsonl", ".jsonl.gz")


def read_texts(path: Path, text_field: str) -> Iterator[str]:
    """Yields the texts of the file at `path`, in file order, without holding the file in memory.

    ``.txt`` is one document; ``.jsonl`` and ``.jsonl.gz`` hold one JSON object a line, whose `text_field` is a
    document. Blank lines are skipped.

    Raises:
        ConfigError: the file cannot be read, is not UTF-8, or a line is not an object with that field; names the line.
    """
    try:
        if path.name.endswith(".txt"):
            yield _decode(path.read_bytes(), str(path))
        else:
            with _open_lines(path) as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        yield _text_of(line.rstrip(b"\r\n"), text_field, f"{path}:{number}")
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError.one("dataloader.path", f"{path} cannot be read ({error})", "give a readable file") from error


def is_supported(path: Path) -> bool:
    """Whether `read_texts` knows the format that the name of `path` stands for."""
    return path.name.endswith(SUFFIXES)


def _open_lines(path: Path) -> BinaryIO:
    return gzip.open(path, "rb") if path.name.endswith(".gz") else path.open("rb")  # type: ignore[return-value]


def _text_of(line: bytes, text_field: str, where: str) -> str:
    try:
        record = json.loads(_decode(line, where))
    except json.JSONDecodeError as error:
        raise ConfigError.one(
            "dataloader.path", f"{where} is not JSON ({error.msg} at column {error.colno})", "mend or remove the line"
        ) from error
    except (ValueError, RecursionError) as error:  # numbers of too many digits, lists in too many lists
        raise ConfigError.one(
            "dataloader.path", f"{where} cannot be read ({error})", "mend or remove the line"
        ) from error
    if not isinstance(record, dict):
        raise ConfigError.one(
            "dataloader.path", f"{where} is a JSON {type(record).__name__}, not an object", "write one object a line"
        )
    if text_field not in record:
        fields = ", ".join(map(repr, record)) or "no fields"
        fact = f"{text_field!r} is not in {where}, which has {fields}"
        raise ConfigError.one("dataloader.text_field", fact, "name the field with the text")
    text = record[text_field]
    if not isinstance(text, str):
        fact = f"{text_field!r} in {where} is {text!r:.40}, not text"
        raise ConfigError.one("dataloader.text_field", fact, "name a field that holds text")
    if any("\ud800" <= character <= "\udfff" for character in text):
        fact = f"{text_field!r} in {where} holds half a surrogate pair (\\ud800 to \\udfff), which is no character"
        raise ConfigError.one("dataloader.path", fact, "mend or remove the line")
    return text


def _decode(data: bytes, where: str) -> str:
    try:
        # A byte order mark is no part of the text.
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError.one(
            "dataloader.path",
            f"{where} is not UTF-8 (byte {error.object[error.start]:#04x} at offset {error.start})",
            "convert it to UTF-8",
        ) from error
