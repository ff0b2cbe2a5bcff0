"""Settings of the whole suite. The first lines run before any test module loads torch."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tensors are tiny, and reductions the same whatever the machine
os.environ.setdefault("HYPER_PARALLEL_DEVICE", "cpu")  # `HYPER_PARALLEL_DEVICE=npu pytest -m npu` on a real device
os.environ["HF_HUB_OFFLINE"] = "1"  # no test needs a network
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest

from hyper_parallel.platform import get_platform
from hyper_parallel.platform.environment import prepare_environment

prepare_environment()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("npu")]
    if marked and get_platform().device_type != "npu":
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an Ascend NPU"))


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test draws the same numbers, alone or among others."""
    get_platform().seed_all(0)


@pytest.fixture
def dump_folder(tmp_path: Path) -> str:
    """A folder for the outputs of one run; it does not exist yet."""
    return str(tmp_path / "outputs")
