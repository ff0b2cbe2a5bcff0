"""Token ids on disk in Megatron's format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyper_parallel.components.data.indexed import IndexedDataset
from hyper_parallel.components.data.sources.paths import find_files
from hyper_parallel.components.data.sources.source import OnError, Record
from hyper_parallel.config.configurable import Configurable
from hyper_parallel.config.errors import ConfigError

SUFFIXES = (".idx", ".bin")


class IndexedSource(Configurable):
    """The documents of a pair PREFIX.bin, PREFIX.idx, as the field `input_ids`."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Where the pair is."""

        path: str
        """PREFIX of the two files, one of them, or a folder that holds no other pair."""

    def __init__(self, config: Config, *, on_error: OnError = "raise") -> None:
        """Opens the pair.

        Args:
            on_error: as every source has it; here a pair that is damaged anywhere is refused in any case.

        Raises:
            ConfigError: there is no such pair, or it is damaged.
        """
        self.dataset = IndexedDataset(find_prefix(config.path))
        self._document = 0

    def __iter__(self) -> Iterator[Record]:
        while self._document < len(self.dataset):
            ids = self.dataset[self._document]
            self._document += 1
            yield Record({"input_ids": ids}, f"{self.dataset.prefix} document {self._document - 1}")

    def state_dict(self) -> dict[str, Any]:
        return {"document": self._document}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._document = state["document"]

    @property
    def fingerprint(self) -> str:
        """That of the pair."""
        return self.dataset.fingerprint


def is_prefix(path: str) -> bool:
    """Whether `path` is the prefix of a pair."""
    return Path(f"{path}.idx").is_file()


def find_prefix(path: str) -> str:
    """The prefix of the pair that `path` stands for.

    Raises:
        ConfigError: there is none, or several.
    """
    if is_prefix(path):
        return path
    prefixes = [str(file.with_suffix("")) for file in find_files(path, (SUFFIXES[0],))]
    if len(prefixes) > 1:
        raise ConfigError.one(
            "dataloader.path", f"{path} holds {len(prefixes)} pairs of .bin and .idx", "give each its place in sources"
        )
    return prefixes[0]
