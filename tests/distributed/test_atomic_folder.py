from __future__ import annotations

from pathlib import Path

import pytest

from hyper_parallel.distributed.atomic_folder import make_partial, partial_name, publish


@pytest.mark.parametrize("name", ["step-2", "lr [1e-3] *"])
def test_what_killed_attempts_left_is_removed_and_nothing_else(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    others = [tmp_path / other for other in ("step-20.partial-a", "lr 1.partial", name)]
    for place in (*others, partial_name(folder), partial_name(folder, "old")):
        place.mkdir()
    (make_partial(folder, "new") / "file").touch()
    assert set(tmp_path.iterdir()) == {*others, partial_name(folder, "new")}
    publish(folder, "new")
    assert set(tmp_path.iterdir()) == set(others)
    assert [file.name for file in folder.iterdir()] == ["file"]
