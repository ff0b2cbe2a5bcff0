"""What a source of documents is, and what sources of files have in common."""

from __future__ import annotations

import hashlib
import logging
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from hyper_parallel.components.data.sources.paths import find_files
from hyper_parallel.config.configurable import Configurable
from hyper_parallel.config.errors import ConfigError, Fault

logger = logging.getLogger(__name__)

OnError = Literal["raise", "skip"]
_SHOWN_ERRORS = 3
_SAMPLE_BYTES = 65536


class Record(dict[str, Any]):
    """The fields of one document, and where they stand, as messages name it: ``data.jsonl:3``."""

    __slots__ = ("where",)

    def __init__(self, fields: Mapping[str, Any], where: str) -> None:
        super().__init__(fields)
        self.where = where


@runtime_checkable
class Source(Protocol):
    """Documents one after the other, and a position among them.

    A new source stands at the start of an epoch. The same position is followed by the same documents on every rank and
    in every process. What a source may have beside these:

    - ``set_epoch(epoch)`` is called before the position is set, where epochs are not alike
    - ``fingerprint``, a text that differs for other data, so that a position is not taken up in it
    """

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        """The documents from the present position to the end of the epoch, each a mapping of its fields."""

    def state_dict(self) -> dict[str, Any]:
        """The position after the last document that was taken: plain data."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to the position of `state`."""


class FileSource(Configurable, ABC):
    """The documents of files, in the order of the files' names.

    The position is (file, cursor in it); what a cursor is, each format says.
    """

    suffixes: ClassVar[tuple[str, ...]]
    """Ends of the names of such files."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Where the files are."""

        path: str
        """File, folder (all files of the kind below it) or pattern such as data/part-*.jsonl."""

        def faults(self) -> Iterator[Fault]:
            try:
                find_files(self.path, type(self).owner.suffixes)
            except ConfigError as error:
                yield from (Fault("path", fault.fact, fault.remedy) for fault in error.faults)

    def __init__(self, config: Config, *, on_error: OnError = "raise") -> None:
        """Finds the files; reads nothing.

        Args:
            on_error: raise at a document that cannot be read, or skip and count it.

        Raises:
            ConfigError: there are no such files.
        """
        self._paths = find_files(config.path, self.suffixes)
        self._on_error = on_error
        self._file, self._cursor = 0, 0
        self.skipped = 0
        """Documents that could not be read, and were left out."""

    def __iter__(self) -> Iterator[Record]:
        """Documents from the present position on.

        Raises:
            ConfigError: a file or, unless it is to be skipped, a document cannot be read; names the file and the place.
        """
        while self._file < len(self._paths):
            path = self._paths[self._file]
            try:
                for raw, where, cursor in self._read(path, self._cursor):
                    self._cursor = cursor
                    fields = self._fields(raw, where)
                    if fields is not None:
                        yield Record(fields, where)
            except (OSError, EOFError, zlib.error, *self._read_errors()) as error:
                fact = f"{path} cannot be read ({error})"
                raise ConfigError.one("dataloader.path", fact, "give a readable file") from error
            self._file, self._cursor = self._file + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"file": self._file, "cursor": self._cursor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._file, self._cursor = state["file"], state["cursor"]

    @property
    def fingerprint(self) -> str:
        """Digest of the sizes of the files and of the first and last 64 KiB of each."""
        digest = hashlib.blake2b(digest_size=16)
        for path in self._paths:
            size = path.stat().st_size
            with path.open("rb") as file:
                digest.update(size.to_bytes(8, "little") + file.read(_SAMPLE_BYTES))
                file.seek(max(0, size - _SAMPLE_BYTES))
                digest.update(file.read())
        return digest.hexdigest()

    @abstractmethod
    def _read(self, path: Path, cursor: int) -> Iterator[tuple[Any, str, int]]:
        """(document as it stands in the file, where that is, cursor behind it) from `cursor` on; 0 is the start."""

    def _parse(self, raw: Any, where: str) -> Mapping[str, Any]:
        """The fields of a document that `_read` gave; raises ConfigError where it has none."""
        return raw

    def _read_errors(self) -> tuple[type[Exception], ...]:
        """What a library raises for a file that is not of its format, beside OSError."""
        return ()

    def _fields(self, raw: Any, where: str) -> Mapping[str, Any] | None:
        try:
            return self._parse(raw, where)
        except ConfigError as error:
            if self._on_error == "raise":
                raise
            self.skipped += 1
            if self.skipped <= _SHOWN_ERRORS:
                logger.warning("skipped: %s", error)
            return None
