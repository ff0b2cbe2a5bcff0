"""What the reader of a step gives, against torch's own reader, which reads every tensor into memory of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from hyper_parallel.components.checkpoint import step_reader
from hyper_parallel.components.checkpoint.reading import open_step
from hyper_parallel.components.checkpoint.verification import DamagedError


def saved_state() -> dict[str, Any]:
    """Tensors of every kind of layout, small behind large and large behind small, among things that are none."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(7, 5, generator=generator)
    return {
        "few": torch.arange(3, dtype=torch.int64),
        "transposed": weight.t(),
        "part of a storage": weight[2:5, 1:3],
        "scalar": torch.tensor(0.5, dtype=torch.float64),
        "empty": torch.empty(0, 4),
        "bfloat16": weight.bfloat16(),
        "bool": weight > 0,
        "text": "which is pickled",
        "last": torch.randn(100, 3, generator=generator),
    }


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A step without a marker, which is not looked for here."""
    monkeypatch.setattr(step_reader, "file_damage", lambda folder, name: None)
    dcp.save(saved_state(), storage_writer=FileSystemWriter(tmp_path / "step-1"), no_dist=True)
    return tmp_path / "step-1"


def test_every_layout_and_type_is_read_as_by_torch(folder: Path) -> None:
    def empty() -> dict[str, Any]:
        state = saved_state()
        return {
            name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else "" for name, value in state.items()
        }

    ours, theirs = empty(), empty()
    dcp.load(ours, storage_reader=open_step(folder), no_dist=True)
    dcp.load(theirs, storage_reader=FileSystemReader(folder), no_dist=True)
    for name, value in saved_state().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(ours[name], value) and torch.equal(theirs[name], value), name
        else:
            assert ours[name] == theirs[name] == value


def test_a_file_that_ends_too_early_is_named_with_the_tensor(folder: Path) -> None:
    reader = open_step(folder)
    places = {index.fqn: place for index, place in reader.metadata.storage_data.items()}
    place = places["last"]

    class Ending:
        """What a file looks like that another process cuts while it is read."""

        def __init__(self, file: Any) -> None:
            self._file = file

        def readinto(self, memory: Any) -> int:
            count: int = self._file.readinto(memory)
            return count - (len(memory) == 1200)  # what the tensor itself takes

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

    state = {"last": torch.zeros(100, 3)}
    original = reader._read_tensor
    reader._read_tensor = lambda file, *rest: original(Ending(file), *rest)  # type: ignore[method-assign]
    with pytest.raises(dcp.api.CheckpointException, match=f"{place.relative_path} ends within last") as raised:
        dcp.load(state, storage_reader=reader, no_dist=True)
    assert any(isinstance(error, DamagedError) for error, _ in raised.value.failures.values())
