"""What stands at a path."""

from __future__ import annotations

import glob
import re
from collections.abc import Sequence
from pathlib import Path

from hyper_parallel.config.errors import ConfigError

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def find_files(path: str, suffixes: Sequence[str]) -> list[Path]:
    """The file at `path`, or the files whose names end in one of `suffixes` in a folder or of a pattern, by name.

    A file that is named by itself may have any name.

    Raises:
        ConfigError: there is none.
    """
    known = ", ".join(suffixes)
    if Path(path).is_file():
        return [Path(path)]
    if Path(path).is_dir():
        found = [
            file for file in sorted(Path(path).rglob("*")) if file.is_file() and file.name.endswith(tuple(suffixes))
        ]
        if not found:
            raise ConfigError.one("dataloader.path", f"{path} holds no file of {known}", "give a folder that does")
        return found
    if glob.has_magic(path):
        found = [Path(file) for file in sorted(glob.glob(path, recursive=True)) if Path(file).is_file()]
        if not found:
            raise ConfigError.one("dataloader.path", f"{path} matches no file", "mend the pattern")
        return found
    raise ConfigError.one("dataloader.path", f"{path} does not exist", f"give a file or folder of {known}")


def is_hub_name(path: str) -> bool:
    """Whether `path`, where nothing stands, may name a data set on the Hugging Face hub: NAME or OWNER/NAME."""
    return _HUB_NAME.fullmatch(path) is not None and not path.startswith(".")


def is_saved_dataset(path: str) -> bool:
    """Whether `path` is a folder that `Dataset.save_to_disk` wrote."""
    return any((Path(path) / name).is_file() for name in ("state.json", "dataset_dict.json"))
