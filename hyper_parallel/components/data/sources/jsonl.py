"""Files of JSON lines, each line one document."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from hyper_parallel.components.data.sources.source import FileSource
from hyper_parallel.components.data.sources.text import decode
from hyper_parallel.config.errors import ConfigError


class JsonLinesSource(FileSource):
    """One JSON object a line. Blank lines are none. The cursor is the number of lines."""

    suffixes = (".jsonl", ".jsonl.gz", ".jsonl.zst")

    def _read(self, path: Path, cursor: int) -> Iterator[tuple[bytes, str, int]]:
        with _open(path) as lines:
            for number, line in enumerate(lines, start=1):
                if number > cursor and line.strip():
                    yield line.rstrip(b"\r\n"), f"{path}:{number}", number

    def _parse(self, raw: bytes, where: str) -> dict[str, Any]:
        try:
            record = json.loads(decode(raw, where))
        except json.JSONDecodeError as error:
            fact = f"{where} is not JSON ({error.msg} at column {error.colno})"
            raise ConfigError.one("dataloader.path", fact, "mend or remove the line") from error
        except (ValueError, RecursionError) as error:  # numbers of too many digits, lists in too many lists
            fact = f"{where} cannot be read ({error})"
            raise ConfigError.one("dataloader.path", fact, "mend or remove the line") from error
        if not isinstance(record, dict):
            fact = f"{where} is a JSON {type(record).__name__}, not an object"
            raise ConfigError.one("dataloader.path", fact, "write one object a line")
        return record


def _open(path: Path) -> BinaryIO:
    if path.name.endswith(".gz"):
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if path.name.endswith(".zst"):
        import io

        import pyarrow

        return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"), 1 << 20)
    return path.open("rb")
