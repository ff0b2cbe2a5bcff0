"""How a step comes back from disk: torch.distributed.checkpoint's reader, which reads the metadata once."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader, Metadata

from hyper_parallel.components.checkpoint.verification import DamagedError, file_damage


class StepReader(FileSystemReader):
    """Reads the files of one folder."""

    @cached_property
    def metadata(self) -> Metadata:
        """Names and sizes of all entries, and where they lie.

        Raises:
            DamagedError: it is not what was written, and cannot be unpickled safely.
        """
        if reason := file_damage(Path(self.path), ".metadata"):
            raise DamagedError(reason)
        return super().read_metadata()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata
