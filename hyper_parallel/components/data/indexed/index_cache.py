"""Arrays that are built once per machine and mapped by every process."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from filelock import FileLock

from hyper_parallel.config.errors import ConfigError

logger = logging.getLogger(__name__)

Arrays = dict[str, npt.NDArray[Any]]

_DESCRIPTION = "description.json"


def digest_of(key: Mapping[str, Any]) -> str:
    """Digest of JSON-like values."""
    return hashlib.blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=16).hexdigest()


def cached_arrays(folder: Path, key: Mapping[str, Any], build: Callable[[], Arrays]) -> Arrays:
    """The arrays that `build` gives, from ``folder/<digest of key>`` if they are there and whole; read-only maps.

    `key` says all that shapes them. Of several processes that find nothing one builds, the others wait for it; ranks
    need no process group for it. What is damaged is built anew.

    Raises:
        ConfigError: the folder cannot be written.
    """
    place = folder / digest_of(key)
    arrays = _load(place)
    if arrays is not None:
        return arrays
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / "lock"):
            arrays = _load(place)
            if arrays is None:
                _save(place, key, build())
                arrays = _load(place)
    except OSError as error:
        raise ConfigError.one(
            str(folder), f"the index cannot be kept here ({error})", "give a cache_folder that can be written"
        ) from error
    if arrays is None:
        raise ConfigError.one(str(place), "reads otherwise than it was written", "give a cache_folder on a sound disk")
    return arrays


def _save(place: Path, key: Mapping[str, Any], arrays: Arrays) -> None:
    partial = place.with_suffix(".partial")
    for left in (partial, place):  # of a process that was killed; of arrays that are damaged
        shutil.rmtree(left, ignore_errors=True)
    partial.mkdir()
    for name, array in arrays.items():
        np.save(partial / f"{name}.npy", array)
    sums = {name: zlib.crc32(array) for name, array in arrays.items()}
    (partial / _DESCRIPTION).write_text(json.dumps({"key": key, "crc32": sums}, indent=1))
    partial.rename(place)


def _load(place: Path) -> Arrays | None:
    if not place.is_dir():
        return None
    arrays = {}
    try:
        for name, expected in json.loads((place / _DESCRIPTION).read_text())["crc32"].items():
            # Without its own class, a map is read faster.
            array = np.asarray(np.load(place / f"{name}.npy", mmap_mode="r"))
            if zlib.crc32(array) != expected:
                raise ValueError(f"{name}.npy is not what was written")
            arrays[name] = array
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:  # of any JSON, any bytes
        logger.warning("the index %s is damaged (%s): it is built anew", place, error)
        return None
    return arrays
