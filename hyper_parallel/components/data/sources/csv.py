"""CSV files with a line of column names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from hyper_parallel.components.data.sources.tables import TableSource

if TYPE_CHECKING:
    import pyarrow


class CsvSource(TableSource):
    """One document a row; every column is text, and may hold line breaks within quotes."""

    suffixes = (".csv",)

    def _batches(self, path: Path, cursor: int) -> tuple[int, Iterator[pyarrow.RecordBatch]]:
        import pyarrow
        from pyarrow import csv

        # Text alone: a type that is guessed from the first rows may not fit the others.
        parse = csv.ParseOptions(newlines_in_values=True)
        names = csv.open_csv(path, parse_options=parse).schema.names
        convert = csv.ConvertOptions(column_types=dict.fromkeys(names, pyarrow.string()), strings_can_be_null=False)
        return 0, iter(csv.open_csv(path, parse_options=parse, convert_options=convert))
