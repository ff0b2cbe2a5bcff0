"""Data sets of the Hugging Face hub, or in a local folder, through the library `datasets`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyper_parallel.components.data.sources.paths import is_saved_dataset
from hyper_parallel.components.data.sources.source import OnError, Record
from hyper_parallel.config.configurable import Configurable
from hyper_parallel.config.errors import ConfigError


class HuggingFaceSource(Configurable):
    """One document a row."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Which data set."""

        path: str
        """Name on the hub, or a local folder: of data files, or written by save_to_disk."""
        subset: str | None = None
        """Configuration of the data set, such as wikitext-2-raw-v1."""
        split: str = "train"
        """Split to read."""
        revision: str | None = None
        """Branch, tag or commit on the hub. A commit keeps the data as it is."""
        streaming: bool = False
        """Read the data while it is used, instead of downloading it first."""

    def __init__(self, config: Config, *, on_error: OnError = "raise") -> None:
        """Opens the data set, and downloads it unless it is streamed.

        Args:
            on_error: as every source has it; here a row that cannot be read ends the run in any case.

        Raises:
            ConfigError: there is no such data set, configuration or split, or the hub cannot be reached.
        """
        self._config = config
        self._dataset = _load(config)
        self._position = 0

    def __iter__(self) -> Iterator[Record]:
        if self._config.streaming:
            import fsspec.asyn

            fsspec.asyn.reset_lock()  # which a forked worker process may have inherited locked
            # Not iter(dataset): within a worker process of torch that would give a part of the data alone.
            for batch in self._dataset.iter(batch_size=1):
                self._position += 1
                yield self._record({name: values[0] for name, values in batch.items()})
        else:
            while self._position < len(self._dataset):
                row = self._dataset[self._position]
                self._position += 1
                yield self._record(row)

    def state_dict(self) -> dict[str, Any]:
        stream = self._dataset.state_dict() if self._config.streaming else None
        return {"position": self._position, "stream": stream}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._position = state["position"]
        if self._config.streaming:
            self._dataset.load_state_dict(state["stream"])

    @property
    def fingerprint(self) -> str:
        """Digest by `datasets` of the data and of all that was done to it; for a stream, what names it."""
        if not self._config.streaming:
            return self._dataset._fingerprint
        config = self._config
        return f"{config.path} {config.subset} {config.split} {config.revision}"

    def _record(self, row: dict[str, Any]) -> Record:
        return Record(row, f"{self._config.path} {self._config.split} row {self._position}")


def _load(config: HuggingFaceSource.Config) -> Any:
    import datasets

    try:
        if is_saved_dataset(config.path):
            saved = datasets.load_from_disk(config.path)
            if isinstance(saved, datasets.DatasetDict):
                if config.split not in saved:
                    raise ValueError(f"it has the splits {', '.join(saved)}, not {config.split}")
                saved = saved[config.split]
            return saved.to_iterable_dataset() if config.streaming else saved
        return datasets.load_dataset(
            config.path, config.subset, split=config.split, revision=config.revision, streaming=config.streaming
        )
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        where = "in the folder" if Path(config.path).is_dir() else "on the Hugging Face hub"
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError.one(
            "dataloader.path",
            f"the data set {config.path} {where} cannot be loaded ({reason})",
            "mend the name, subset or split, or the connection",
        ) from error
