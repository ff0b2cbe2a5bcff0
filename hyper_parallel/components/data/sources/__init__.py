"""Where documents come from: one class for each kind of file, and a protocol for sources of one's own."""

from hyper_parallel.components.data.sources.arrow import ArrowSource
from hyper_parallel.components.data.sources.choose import choose_source
from hyper_parallel.components.data.sources.csv import CsvSource
from hyper_parallel.components.data.sources.huggingface import HuggingFaceSource
from hyper_parallel.components.data.sources.indexed import IndexedSource
from hyper_parallel.components.data.sources.jsonl import JsonLinesSource
from hyper_parallel.components.data.sources.parquet import ParquetSource
from hyper_parallel.components.data.sources.source import FileSource, Record, Source
from hyper_parallel.components.data.sources.text import TextSource
from hyper_parallel.components.data.sources.torch_file import TorchFileSource

__all__ = [
    "ArrowSource",
    "CsvSource",
    "FileSource",
    "HuggingFaceSource",
    "IndexedSource",
    "JsonLinesSource",
    "ParquetSource",
    "Record",
    "Source",
    "TextSource",
    "TorchFileSource",
    "choose_source",
]
