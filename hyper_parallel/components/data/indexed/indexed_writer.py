"""Documents of token ids written to disk, one after the other."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from hyper_parallel.components.data.indexed.indexed_dataset import IndexedDataset
from hyper_parallel.components.data.indexed.pair_format import HEADER, MAGIC, VERSION, dtype_code, pair_paths

_CHUNK = 1 << 20  # entries of an index copied at a time
_SECTIONS = {"tokens": None, "lengths": "<i4", "bounds": "<i8", "modes": "i1"}


def partial_folder(prefix: str | Path) -> Path:
    """Where the parts of a pair are while it is written."""
    return Path(f"{prefix}.partial")


def finished_folder(prefix: str | Path) -> Path:
    """Where the whole pair is until its files have their final names."""
    return Path(f"{prefix}.finished")


def publish(prefix: str | Path) -> None:
    """Gives the files of a finished pair their final names; what is done already, or not finished, stays as it is."""
    folder, final = finished_folder(prefix), pair_paths(prefix)
    if (folder / "tokens").exists():
        # Between the two renames there is no index, so that nobody reads the new tokens with an older one.
        final.idx.unlink(missing_ok=True)
        (folder / "tokens").replace(final.bin)
    if (folder / "idx").exists():
        (folder / "idx").replace(final.idx)
    if folder.exists():
        shutil.rmtree(folder)


class IndexedWriter:
    """Writes the pair ``PREFIX.bin``, ``PREFIX.idx``.

    Until `finalize`, all is in the folder ``PREFIX.partial``, one file for each part of the pair, so the memory needed
    does not grow with the documents. As a context manager it finalizes at the end, or discards after an error.
    """

    def __init__(
        self, prefix: str | Path, dtype: npt.DTypeLike = np.int32, *, state: dict[str, int] | None = None
    ) -> None:
        """Begins a pair of tokens of `dtype`; see `pair_format.smallest_dtype` for one that fits a vocabulary.

        With a `state` of `checkpoint` it goes on from there, whatever was written after it.

        Raises:
            ValueError: the format has no code for `dtype`.
        """
        self._code = dtype_code(dtype)
        self._prefix = str(prefix)
        self._folder = partial_folder(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        publish(prefix)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._counts = dict.fromkeys(_SECTIONS, 0) if state is None else dict(state)
        self._files = {name: self._open(name) for name in _SECTIONS}

    def add_document(
        self, ids: npt.ArrayLike, sequence_lengths: Sequence[int] | None = None, modes: Sequence[int] | None = None
    ) -> None:
        """Adds one document: one sequence, none if it is empty, or those of `sequence_lengths`, with their `modes`.

        Raises:
            ValueError: `ids` is not one list of numbers that the dtype can hold, the lengths do not add up to it, or
                there are modes in some documents only.
        """
        ids = self._checked(ids)
        lengths = np.asarray([len(ids)] if sequence_lengths is None and len(ids) else sequence_lengths or [], np.int32)
        if (lengths < 0).any() or lengths.sum(dtype=np.int64) != len(ids):
            raise ValueError(f"sequence_lengths {lengths.tolist()} do not add up to a document of {len(ids)} tokens")
        if modes is not None and len(modes) != len(lengths):
            raise ValueError(f"{len(modes)} modes for {len(lengths)} sequences")
        if (modes is None and self._counts["modes"]) or (
            modes is not None and self._counts["modes"] < self._counts["lengths"]
        ):
            raise ValueError("modes are given for some documents and not for others; give them for all or none")
        self._write("tokens", ids)
        self._write("lengths", lengths)
        self._write("bounds", np.array([self._counts["lengths"]]))
        if modes is not None:
            self._write("modes", np.asarray(modes))

    def add_documents(self, ids: npt.ArrayLike, lengths: npt.ArrayLike) -> None:
        """Adds many documents of one sequence each: `ids` [tokens] one after the other, `lengths` [documents].

        Raises:
            ValueError: as `add_document`.
        """
        ids, lengths = self._checked(ids), np.asarray(lengths)
        if lengths.sum(dtype=np.int64) != len(ids):
            raise ValueError(f"lengths add up to {lengths.sum(dtype=np.int64)}, but there are {len(ids)} tokens")
        first = self._counts["lengths"]
        self._write("tokens", ids)
        self._write("lengths", lengths)
        self._write("bounds", np.arange(first + 1, first + len(lengths) + 1))

    def add_dataset(self, dataset: IndexedDataset) -> None:
        """Adds all documents of another pair.

        Raises:
            ValueError: it holds tokens of another dtype, or modes where this one has none.
        """
        if dataset.dtype != self.dtype or dataset.sequence_modes is not None:
            raise ValueError(
                f"{dataset.prefix} holds {dataset.dtype} tokens or modes; only plain {self.dtype} is added"
            )
        first = self._counts["lengths"]
        for name, part in (("tokens", dataset.tokens), ("lengths", dataset.sequence_lengths)):
            for start in range(0, len(part), _CHUNK):
                self._write(name, part[start : start + _CHUNK])
        for start in range(1, len(dataset.document_bounds), _CHUNK):
            self._write("bounds", first + dataset.document_bounds[start : start + _CHUNK])

    @property
    def tokens(self) -> int:
        """The number of tokens added so far."""
        return self._counts["tokens"]

    def checkpoint(self) -> dict[str, int]:
        """Puts all that was added on the disk; returns the state that a new writer of the prefix goes on from."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        return dict(self._counts)

    def finalize(self) -> None:
        """Puts the pair under its final names, in the place of an older pair. Only now is there anything at all."""
        self.checkpoint()
        self._close()
        with (self._folder / "idx").open("wb") as file:
            file.write(HEADER.pack(MAGIC, VERSION, self._code, self._counts["lengths"], self._counts["bounds"] + 1))
            for part in self._index_sections():
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        # From here on the pair is whole: if publish() is killed between two steps, the next writer goes on with it.
        self._folder.rename(finished_folder(self._prefix))
        publish(self._prefix)

    def discard(self) -> None:
        """Removes all that was written; an older pair under the final names stays."""
        self._close()
        shutil.rmtree(self._folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.finalize()
        else:
            self.discard()

    def _checked(self, ids: npt.ArrayLike) -> npt.NDArray[Any]:
        given = np.asarray(ids)
        if given.dtype == self.dtype and given.ndim == 1:
            return given
        if given.size == 0:
            given = given.astype(self.dtype)
        if given.ndim != 1 or given.dtype.kind not in "iuf":
            raise ValueError(f"a document is one list of token ids, not an array {list(given.shape)} of {given.dtype}")
        with np.errstate(invalid="ignore", over="ignore"):
            written = given.astype(self.dtype)
        different = np.flatnonzero(written != given)
        if len(different):
            raise ValueError(f"{given[different[0]]} at place {different[0]} does not fit {self.dtype}")
        return written

    def _write(self, name: str, part: npt.NDArray[Any]) -> None:
        self._files[name].write(np.ascontiguousarray(part, _SECTIONS[name] or self.dtype))
        self._counts[name] += len(part)

    def _open(self, name: str) -> BinaryIO:
        path = self._folder / name
        file = path.open("ab")
        size = self._counts[name] * np.dtype(_SECTIONS[name] or self.dtype).itemsize
        if path.stat().st_size < size:
            file.close()
            raise ValueError(f"{path} has {path.stat().st_size} bytes, fewer than the {size} of the state")
        file.truncate(size)
        return file

    def _index_sections(self) -> Iterator[bytes | npt.NDArray[Any]]:
        yield from self._chunks("lengths")
        end = 0
        for lengths in self._chunks("lengths"):
            ends = end + np.cumsum(lengths, dtype="<i8") * self.dtype.itemsize
            yield np.concatenate(([end], ends[:-1])).astype("<i8")
            end = int(ends[-1])
        yield np.zeros(1, "<i8")
        yield from self._chunks("bounds")
        yield from self._chunks("modes")

    def _chunks(self, name: str) -> Iterator[npt.NDArray[Any]]:
        with (self._folder / name).open("rb") as file:
            while len(part := np.fromfile(file, _SECTIONS[name], _CHUNK)):
                yield part

    def _close(self) -> None:
        for file in self._files.values():
            file.close()
