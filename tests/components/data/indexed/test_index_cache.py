from __future__ import annotations

import json
import multiprocessing
import time

import numpy as np
import pytest

from hyper_parallel.components.data.indexed.index_cache import cached_arrays
from hyper_parallel.config.errors import ConfigError

KEY = {"data": "a", "seq_len": 4}


class Builder:
    """Builds an array, and counts how often."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self):
        self.calls += 1
        return {"index": np.arange(12).reshape(6, 2), "none": np.empty(0, np.int16)}


def test_what_is_there_is_not_built_again(tmp_path):
    build = Builder()
    for _ in range(2):
        arrays = cached_arrays(tmp_path, KEY, build)
        assert arrays["index"].tolist() == np.arange(12).reshape(6, 2).tolist()
        assert arrays["none"].dtype == np.int16
    assert build.calls == 1
    cached_arrays(tmp_path, KEY | {"seq_len": 5}, build)
    assert build.calls == 2


def spoil_array(place):
    file = place / "index.npy"
    data = bytearray(file.read_bytes())
    data[-8] ^= 1
    file.write_bytes(data)


DAMAGES = {
    "one bit": spoil_array,
    "truncated": lambda place: (place / "index.npy").write_bytes((place / "index.npy").read_bytes()[:-1]),
    "empty array": lambda place: (place / "index.npy").write_bytes(b""),
    "no array": lambda place: (place / "index.npy").unlink(),
    "no description": lambda place: (place / "description.json").unlink(),
    "half a description": lambda place: (place / "description.json").write_text('{"key'),
    "other description": lambda place: (place / "description.json").write_text("[]"),
    "other sums": lambda place: (place / "description.json").write_text(json.dumps({"crc32": []})),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_cache_is_built_anew(tmp_path, caplog, name):
    build = Builder()
    cached_arrays(tmp_path, KEY, build)
    (place,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    DAMAGES[name](place)
    arrays = cached_arrays(tmp_path, KEY, build)
    assert arrays["index"].tolist() == np.arange(12).reshape(6, 2).tolist()
    assert build.calls == 2
    assert f"the index {place} is damaged" in caplog.text
    caplog.clear()
    cached_arrays(tmp_path, KEY, build)
    assert (build.calls, caplog.text) == (2, "")


def test_what_a_killed_process_left_is_no_hindrance(tmp_path):
    build = Builder()
    cached_arrays(tmp_path, KEY, build)
    (place,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    place.rename(place.with_suffix(".partial"))
    cached_arrays(tmp_path, KEY, build)
    assert build.calls == 2
    assert not place.with_suffix(".partial").exists()


def _rank(folder, results):
    def build():
        time.sleep(0.5)
        return {"index": np.arange(3)}

    built = []
    arrays = cached_arrays(folder, KEY, lambda: built.append(1) or build())
    results.put((len(built), arrays["index"].tolist()))


def test_one_of_several_processes_builds_and_the_others_wait(tmp_path):
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [context.Process(target=_rank, args=(tmp_path, results)) for _ in range(4)]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert sum(built for built, _ in found) == 1
    assert [values for _, values in found] == [[0, 1, 2]] * 4


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        ConfigError, match=r"file/cache: the index cannot be kept here .*; give a cache_folder that can"
    ):
        cached_arrays(tmp_path / "file" / "cache", KEY, Builder())
