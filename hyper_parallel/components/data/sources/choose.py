"""The source of a path, by what is found there."""

from __future__ import annotations

import glob
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from hyper_parallel.components.data.sources.arrow import ArrowSource
from hyper_parallel.components.data.sources.csv import CsvSource
from hyper_parallel.components.data.sources.huggingface import HuggingFaceSource
from hyper_parallel.components.data.sources.indexed import SUFFIXES as INDEXED_SUFFIXES
from hyper_parallel.components.data.sources.indexed import IndexedSource, is_prefix
from hyper_parallel.components.data.sources.jsonl import JsonLinesSource
from hyper_parallel.components.data.sources.parquet import ParquetSource
from hyper_parallel.components.data.sources.paths import is_hub_name, is_saved_dataset
from hyper_parallel.components.data.sources.source import FileSource
from hyper_parallel.components.data.sources.text import TextSource
from hyper_parallel.components.data.sources.torch_file import TorchFileSource
from hyper_parallel.config.errors import ConfigError

Kind = Literal["txt", "jsonl", "parquet", "arrow", "csv", "pt", "indexed", "huggingface"]

FILE_SOURCES: Mapping[Kind, type[FileSource]] = {
    "txt": TextSource,
    "jsonl": JsonLinesSource,
    "parquet": ParquetSource,
    "arrow": ArrowSource,
    "csv": CsvSource,
    "pt": TorchFileSource,
}
"""The sources of files, by the name of their kind."""

_SUFFIXES: dict[Kind, tuple[str, ...]] = {kind: source.suffixes for kind, source in FILE_SOURCES.items()} | {
    "indexed": INDEXED_SUFFIXES
}


def choose_source(
    path: str, *, kind: Kind | None = None, subset: str | None = None, split: str = "train", streaming: bool = False
) -> FileSource.Config | HuggingFaceSource.Config | IndexedSource.Config:
    """The source of `path`: of the given kind, else of what stands there.

    Args:
        path: a file, a folder, a pattern, or the name of a data set on the Hugging Face hub.
        subset: configuration of a Hugging Face data set.
        split: of a Hugging Face data set; files are one split by themselves.
        streaming: do not download a data set of the hub before it is read.

    Raises:
        ConfigError: nothing is found, or nothing or several kinds of what is known.
    """
    kind = kind or kind_of(path)
    if kind == "huggingface":
        return HuggingFaceSource.Config(path=path, subset=subset, split=split, streaming=streaming)
    if subset is not None:
        fact = f"{subset!r} is given, but {path} is no Hugging Face data set"
        raise ConfigError.one("dataloader.subset", fact, "remove it")
    return IndexedSource.Config(path=path) if kind == "indexed" else FILE_SOURCES[kind].Config(path=path)


def kind_of(path: str) -> Kind:
    """What stands at `path`.

    Raises:
        ConfigError: nothing, or nothing or several kinds of what is known.
    """
    known = ", ".join(suffix for suffixes in _SUFFIXES.values() for suffix in suffixes)
    if is_saved_dataset(path):
        return "huggingface"
    place = Path(path)
    if is_prefix(path):
        if place.is_dir():
            fact = f"{path} is a folder and the prefix of {path}.bin"
            raise ConfigError.one("dataloader.path", fact, "say which to read with source, indexed for the pair")
        return "indexed"
    if place.is_file():
        files = [place]
    elif place.is_dir():
        files = [file for file in place.rglob("*") if file.is_file()]
    elif glob.has_magic(path):
        files = [Path(file) for file in glob.glob(path, recursive=True)]
    elif _suffix_kind(place) is None and is_hub_name(path):
        return "huggingface"
    else:
        raise ConfigError.one("dataloader.path", f"{path} does not exist", f"give a file of text ({known})")
    kinds = {kind for file in files if (kind := _suffix_kind(file))}
    if len(kinds) == 1:
        return kinds.pop()
    if kinds:
        fact = f"{path} holds files of several kinds ({', '.join(sorted(kinds))})"
        raise ConfigError.one("dataloader.path", fact, "say which to read with source, or give a pattern")
    if place.is_file():
        raise ConfigError.one(
            "dataloader.path",
            f"{path} is of an unknown kind",
            f"give a file that ends in one of {known}, or say what it is with source",
        )
    raise ConfigError.one("dataloader.path", f"{path} holds no file of a known kind", f"give files of {known}")


def _suffix_kind(path: Path) -> Kind | None:
    return next((kind for kind, suffixes in _SUFFIXES.items() if path.name.endswith(suffixes)), None)
