"""Files of text, each one document."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hyper_parallel.components.data.sources.source import FileSource
from hyper_parallel.config.errors import ConfigError


class TextSource(FileSource):
    """One document a file, with the field `text`."""

    suffixes = (".txt",)

    def _read(self, path: Path, cursor: int) -> Iterator[tuple[bytes, str, int]]:
        if cursor == 0:
            yield path.read_bytes(), str(path), 1

    def _parse(self, raw: bytes, where: str) -> dict[str, Any]:
        return {"text": decode(raw, where)}


def decode(data: bytes, where: str) -> str:
    """UTF-8 as text, without a byte order mark, which is no part of it.

    Raises:
        ConfigError: it is something else; names the first wrong byte.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError.one(
            "dataloader.path",
            f"{where} is not UTF-8 (byte {error.object[error.start]:#04x} at offset {error.start})",
            "convert it to UTF-8",
        ) from error
