"""Parquet files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from hyper_parallel.components.data.sources.tables import TableSource

if TYPE_CHECKING:
    import pyarrow

_ROWS_PER_BATCH = 1024


class ParquetSource(TableSource):
    """One document a row."""

    suffixes = (".parquet",)

    def _batches(self, path: Path, cursor: int) -> tuple[int, Iterator[pyarrow.RecordBatch]]:
        from pyarrow import parquet

        file = parquet.ParquetFile(path)
        groups, before = list(range(file.num_row_groups)), 0
        while groups and before + file.metadata.row_group(groups[0]).num_rows <= cursor:
            before += file.metadata.row_group(groups.pop(0)).num_rows
        return before, file.iter_batches(_ROWS_PER_BATCH, row_groups=groups)
