"""Documents of token ids on disk, read by number."""

from __future__ import annotations

import hashlib
import mmap
import operator
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, SupportsIndex, overload

import numpy as np
import numpy.typing as npt

from hyper_parallel.components.data.indexed.pair_format import DTYPES, HEADER, MAGIC, VERSION, pair_paths
from hyper_parallel.config.errors import ConfigError

Tokens = npt.NDArray[Any]

_CHUNK = 1 << 20  # entries checked or hashed at a time, so that no temporary array grows with the data
_PROBES, _PROBE_BYTES = 64, 4096


class IndexedDataset(Sequence[Tokens]):
    """The documents of the pair ``PREFIX.bin``, ``PREFIX.idx``: ``dataset[d]`` is the tokens of document d.

    Nothing is held in memory: both files are mapped, and what is handed out are read-only views of the map, which live
    on when the dataset is gone. Pickled, it is its prefix, so worker processes map the files themselves.
    """

    prefix: str
    dtype: np.dtype[Any]
    """Of the tokens, as the file says."""
    tokens: Tokens
    """[tokens]: those of all documents."""
    sequence_lengths: npt.NDArray[np.int32]
    """[sequences]: tokens of each. A document is one sequence in most data, but may be none or several."""
    document_bounds: npt.NDArray[np.int64]
    """[documents + 1]: document d is the sequences from ``document_bounds[d]`` up to ``document_bounds[d + 1]``."""
    sequence_modes: npt.NDArray[np.int8] | None
    """[sequences]: mode of each in multimodal data, else None."""

    def __init__(self, prefix: str | Path) -> None:
        """Opens the pair and checks that the two files agree to the last byte.

        Raises:
            ConfigError: a file is missing, is of another format, or contradicts itself or the other one.
        """
        self.prefix = str(prefix)
        self._paths = pair_paths(prefix)
        index = self._map(self._paths.idx)
        if len(index) < HEADER.size:
            self._refuse(f"has {len(index)} bytes, and its header alone takes {HEADER.size}")
        self._header = bytes(index[: HEADER.size])
        magic, version, code, sequences, bounds = HEADER.unpack(self._header)
        if magic != MAGIC:
            self._refuse(f"begins with {magic!r}, not with {MAGIC!r}", "give an index of Megatron's format")
        if version != VERSION:
            self._refuse(f"has version {version}, and only {VERSION} is known", "prepare the data anew")
        if code not in DTYPES:
            self._refuse(f"has the unknown dtype code {code}")
        if bounds == 0:
            self._refuse("has no document bounds, not even that of 0 documents")
        self.dtype = DTYPES[code]
        without_modes = HEADER.size + 12 * sequences + 8 * bounds
        if len(index) not in (without_modes, without_modes + sequences):
            self._refuse(
                f"has {len(index)} bytes, but its header says {sequences} sequences and {bounds - 1} documents, "
                f"which take {without_modes} bytes ({without_modes + sequences} with modes)"
            )

        def section(start: int, count: int, dtype: str) -> npt.NDArray[Any]:
            return np.frombuffer(index, dtype, count, HEADER.size + start) if count else np.empty(0, dtype)

        self.sequence_lengths = section(0, sequences, "<i4")
        self._pointers = section(4 * sequences, sequences, "<i8")
        self.document_bounds = section(12 * sequences, bounds, "<i8")
        has_modes = sequences > 0 and len(index) > without_modes
        self.sequence_modes = section(12 * sequences + 8 * bounds, sequences, "i1") if has_modes else None
        self._check_index()
        data = self._map(self._paths.bin)
        expected = self._pointers[-1] + self.sequence_lengths[-1] * self.dtype.itemsize if sequences else 0
        if len(data) != expected:
            raise ConfigError.one(
                str(self._paths.bin),
                f"has {len(data)} bytes, but {self._paths.idx} says {expected} bytes of {self.dtype}",
                "prepare the data anew, or copy both files again",
            )
        self.tokens = np.frombuffer(data, self.dtype) if len(data) else np.empty(0, self.dtype)

    def __len__(self) -> int:
        """The number of documents."""
        return len(self.document_bounds) - 1

    @overload
    def __getitem__(self, document: SupportsIndex) -> Tokens: ...

    @overload
    def __getitem__(self, document: slice) -> list[Tokens]: ...

    def __getitem__(self, document: SupportsIndex | slice) -> Tokens | list[Tokens]:
        """The tokens of a document, or of several.

        Raises:
            IndexError: there is no such document.
        """
        if isinstance(document, slice):
            return [self[d] for d in range(*document.indices(len(self)))]
        number = operator.index(document)
        count = len(self.document_bounds) - 1
        if number < 0:
            number += count
        if not 0 <= number < count:
            raise IndexError(f"document {operator.index(document)} of {count} in {self.prefix}")
        first, last = self.document_bounds[number : number + 2].tolist()
        return self.tokens[self._offset(first) : self._offset(last)]

    def sequence(self, number: int) -> Tokens:
        """The tokens of one sequence, counted over all documents."""
        return self.tokens[self._offset(number) : self._offset(number) + int(self.sequence_lengths[number])]

    @property
    def sequence_offsets(self) -> npt.NDArray[np.int64]:
        """[sequences]: where each begins in `tokens`. A new array."""
        return self._pointers // self.dtype.itemsize

    @property
    def document_offsets(self) -> npt.NDArray[np.int64]:
        """[documents + 1]: document d is ``tokens[document_offsets[d]:document_offsets[d + 1]]``. A new array."""
        return np.append(self.sequence_offsets, len(self.tokens))[self.document_bounds]

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the whole index and of tokens from all over the data: other data has another one, a copy the same.

        Reads the whole .idx but 256 KiB of the .bin, however large.
        """
        digest = hashlib.blake2b(self._header, digest_size=16)
        for part in (self.sequence_lengths, self._pointers, self.document_bounds, self.sequence_modes):
            for start in range(0, 0 if part is None else len(part), _CHUNK):
                digest.update(part[start : start + _CHUNK])
        data = self.tokens.view(np.uint8)
        last = max(0, len(data) - _PROBE_BYTES)
        for probe in range(_PROBES):
            start = last * probe // (_PROBES - 1)
            digest.update(data[start : start + _PROBE_BYTES])
        return digest.hexdigest()

    def __reduce__(self) -> tuple[type[IndexedDataset], tuple[str]]:
        return type(self), (self.prefix,)

    def _offset(self, sequence: int) -> int:
        if sequence == len(self._pointers):
            return len(self.tokens)
        return int(self._pointers[sequence]) // self.dtype.itemsize

    def _check_index(self) -> None:
        sequences = len(self.sequence_lengths)
        expected = 0
        for start in range(0, sequences, _CHUNK):
            lengths = self.sequence_lengths[start : start + _CHUNK]
            if lengths.min() < 0:
                number = start + int(np.argmax(lengths < 0))
                self._refuse(f"gives sequence {number} a length of {self.sequence_lengths[number]}")
            ends = expected + np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
            starts = np.concatenate(([expected], ends[:-1]))
            wrong = np.flatnonzero(self._pointers[start : start + _CHUNK] != starts)
            if len(wrong):
                number = start + int(wrong[0])
                self._refuse(
                    f"puts sequence {number} at byte {self._pointers[number]}, but the {self.dtype} tokens before it "
                    f"end at byte {starts[wrong[0]]}"
                )
            expected = int(ends[-1])
        bounds = self.document_bounds
        if bounds[0] != 0 or bounds[-1] != sequences:
            self._refuse(f"has documents from sequence {bounds[0]} to {bounds[-1]}, but {sequences} sequences")
        for start in range(0, len(bounds) - 1, _CHUNK):
            falling = np.flatnonzero(np.diff(bounds[start : start + _CHUNK + 1]) < 0)
            if len(falling):
                self._refuse(f"ends document {start + falling[0]} before it begins")

    def _map(self, path: Path) -> mmap.mmap | bytes:
        try:
            with path.open("rb") as file:
                # An empty file cannot be mapped.
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else b""
        except OSError as error:
            fact = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
            remedy = "give the prefix of a pair PREFIX.bin, PREFIX.idx, without the endings"
            raise ConfigError.one(str(path), fact, remedy) from error

    def _refuse(self, fact: str, remedy: str = "prepare the data anew, or copy both files again") -> None:
        raise ConfigError.one(str(self._paths.idx), fact, remedy)
