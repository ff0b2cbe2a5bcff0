"""Files that torch.save wrote: documents as others have prepared them."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hyper_parallel.components.data.sources.source import FileSource
from hyper_parallel.config.errors import ConfigError


class TorchFileSource(FileSource):
    """A list of documents, each a mapping of its fields, or a mapping of columns of equal length.

    Tensors are mapped, not read into memory as a whole; the list itself is. Only data is loaded, never code. The cursor
    is the number of documents.
    """

    suffixes = (".pt",)

    def _read(self, path: Path, cursor: int) -> Iterator[tuple[dict[str, Any], str, int]]:
        import torch

        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        for i in range(cursor, _size(content, path)):
            fields = {name: column[i] for name, column in content.items()} if _has_columns(content) else content[i]
            yield fields, f"{path} document {i}", i + 1

    def _parse(self, raw: Any, where: str) -> Mapping[str, Any]:
        if not isinstance(raw, Mapping):
            fact = f"{where} is a {type(raw).__name__}, not a mapping of fields"
            raise ConfigError.one("dataloader.path", fact, "save a list of mappings")
        return {name: value.numpy() if hasattr(value, "numpy") else value for name, value in raw.items()}

    def _read_errors(self) -> tuple[type[Exception], ...]:
        return (RuntimeError, pickle.UnpicklingError)  # what torch.load raises for what is no such file


def _has_columns(content: Any) -> bool:
    return isinstance(content, Mapping)


def _size(content: Any, path: Path) -> int:
    if _has_columns(content):
        sizes = {len(column) for column in content.values()}
        if len(sizes) == 1:
            return sizes.pop()
        fact = f"{path} has columns of {', '.join(map(str, sorted(sizes)))} documents"
        raise ConfigError.one("dataloader.path", fact, "save columns of equal length")
    if not isinstance(content, Sequence):
        fact = f"{path} holds a {type(content).__name__}"
        raise ConfigError.one("dataloader.path", fact, "save a list of documents, or a mapping of columns")
    return len(content)
