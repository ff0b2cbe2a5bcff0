"""What sources of tables have in common: batches of rows, as pyarrow reads them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyper_parallel.components.data.sources.source import FileSource

if TYPE_CHECKING:
    import pyarrow


class TableSource(FileSource):
    """One document a row, whose fields are the columns. The cursor is the number of rows."""

    def _read(self, path: Path, cursor: int) -> Iterator[tuple[dict[str, Any], str, int]]:
        done, batches = self._batches(path, cursor)
        for batch in batches:
            if done + batch.num_rows > cursor:
                first = max(0, cursor - done)
                for number, row in enumerate(batch.slice(first).to_pylist(), start=done + first + 1):
                    yield row, f"{path} row {number}", number
            done += batch.num_rows

    def _read_errors(self) -> tuple[type[Exception], ...]:
        import pyarrow

        return (pyarrow.ArrowException,)

    @abstractmethod
    def _batches(self, path: Path, cursor: int) -> tuple[int, Iterator[pyarrow.RecordBatch]]:
        """(number of rows before them, the rows from there on, some at a time): all after row `cursor` are in them."""
