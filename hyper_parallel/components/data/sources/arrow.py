"""Arrow files, of either of the two kinds: with an index of its batches, or a stream of them as `datasets` writes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from hyper_parallel.components.data.sources.tables import TableSource

if TYPE_CHECKING:
    import pyarrow

_MAGIC = b"ARROW1"


class ArrowSource(TableSource):
    """One document a row."""

    suffixes = (".arrow",)

    def _batches(self, path: Path, cursor: int) -> tuple[int, Iterator[pyarrow.RecordBatch]]:
        import pyarrow

        file = pyarrow.memory_map(str(path))
        if file.read(len(_MAGIC)) == _MAGIC:
            reader = pyarrow.ipc.open_file(file)
            return 0, (reader.get_batch(i) for i in range(reader.num_record_batches))
        file.seek(0)
        return 0, iter(pyarrow.ipc.open_stream(file))
