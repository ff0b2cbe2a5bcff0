"""How a step comes back from disk: torch.distributed.checkpoint's reader, which reads the metadata once."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from torch.distributed.checkpoint import FileSystemReader, Metadata


class StepReader(FileSystemReader):
    """Reads the files of one folder."""

    @cached_property
    def metadata(self) -> Metadata:
        """Names and sizes of all entries, and where they lie."""
        return super().read_metadata()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata
