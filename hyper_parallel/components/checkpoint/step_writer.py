"""How a step gets to disk: torch.distributed.checkpoint's writer, which also digests what it writes, and seals it.

It is pickled and sent to another process when a step is saved there.
"""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash
from torch.distributed.checkpoint import FileSystemWriter, Metadata, SavePlan, SavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from hyper_parallel.components.checkpoint.model_state import not_finite
from hyper_parallel.components.checkpoint.step_locks import WRITING
from hyper_parallel.components.checkpoint.storage import MARKER, NOT_FINITE, CheckpointError, FileSeal, seal_of
from hyper_parallel.distributed.atomic_folder import partial_name, publish, sync_folder


class StepWriter(FileSystemWriter):
    """Fills a folder. When every rank has written and synced its files, one of them adds the marker and gives the
    folder its name: all that comes before leaves nothing that could be taken for a checkpoint."""

    def __init__(self, folder: Path, attempt: str, about: dict[str, Any], parameters: frozenset[str]) -> None:
        """
        Args:
            folder: the final name; it is filled under that of `attempt`.
            about: what the marker says beside the files.
            parameters: names of the tensors of the model that must be finite.
        """
        super().__init__(partial_name(folder, attempt), sync_files=True)
        self.fs = _DigestingFileSystem()
        self._folder, self._attempt, self._about, self._parameters = folder, attempt, about, parameters

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Called in the process that writes, where torch tells of every request."""
        logging.getLogger().setLevel(logging.WARNING)
        self.__dict__.update(state)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """
        Raises:
            CheckpointError: parameters hold NaN or an infinity. A good checkpoint must not be removed for them. This is
                asked here, where training does not wait for it.
        """
        tensors = (item for item in plan.items if item.type is not WriteItemType.BYTE_IO)
        named = ((item.index.fqn.removeprefix("model."), item) for item in tensors)
        if names := not_finite({n: planner.resolve_data(item) for n, item in named if n in self._parameters}):
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise CheckpointError(f"{names[0]}{more} are {NOT_FINITE}")
        # torch's own checksum of every tensor, which it does not compare when it reads, costs as much as all else.
        computes_crc32 = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            results = super().write_data(plan, planner)
        finally:
            torch.serialization.set_crc32_options(computes_crc32)
        # Results go to the rank that calls `finish`. The last one is no tensor: it carries the seals of this rank.
        results.value().append(WriteResult(MetadataIndex(""), 0, self.fs.seals))
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        seals: dict[str, FileSeal] = {}
        for of_rank in results:
            seals |= of_rank.pop().storage_data
        super().finish(metadata, results)
        seals[".metadata"] = self.fs.seals[".metadata.tmp"]  # written under that name, then renamed
        marker = self._about | {"torch": torch.__version__, "files": seals}
        marker["seal"] = seal_of(marker)
        partial = Path(self.path)
        with (partial / MARKER).open("w") as stream:
            json.dump(marker, stream, indent=1)
            stream.flush()
            os.fsync(stream.fileno())
        sync_folder(partial)
        publish(self._folder, self._attempt)
        (self._folder / WRITING).unlink(missing_ok=True)  # only now: until here its lock keeps others from the folder
        sync_folder(self._folder.parent)


class _DigestingFileSystem(FileSystem):
    """Remembers size and digest of every file that is written through it."""

    def __init__(self) -> None:
        self.seals: dict[str, FileSeal] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with super().create_stream(path, mode) as file:
            if mode != "wb":
                yield file
                return
            stream = _DigestingStream(file)
            yield stream
            self.seals[os.path.basename(path)] = {"bytes": stream.size_bytes, "xxh3": stream.digest.hexdigest()}


class _DigestingStream(io.RawIOBase):
    """Passes on what is written, from the first byte to the last."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size_bytes = 0
        self.digest = xxhash.xxh3_128()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.digest.update(data)
        self.size_bytes += self._file.write(data)
        return len(data)

    def tell(self) -> int:
        return self.size_bytes

    def flush(self) -> None:
        self._file.flush()

    def fileno(self) -> int:
        self._file.flush()  # who asks for it will sync what was written
        return self._file.fileno()
