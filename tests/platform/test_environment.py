"""What is set before torch is loaded, and that a torch_npu without CANN cannot stop `import torch`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hyper_parallel import platform as platform_package
from hyper_parallel.platform import environment, get_platform, use_platform
from hyper_parallel.platform.base import Platform
from hyper_parallel.platform.cpu import CpuPlatform
from hyper_parallel.platform.environment import prepare_environment

ROOT = Path(__file__).parents[2]
TOUCHED = ("HYPER_PARALLEL", "LOCAL_WORLD", "OMP_", "TORCH_", "PYTORCH_", "HCCL_", "CLOSE_MATMUL", "CUBLAS_")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(TOUCHED)}
    monkeypatch.setattr(os, "environ", kept)


def pretend(monkeypatch: pytest.MonkeyPatch, *, torch_npu: bool, cann: bool) -> None:
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: object() if torch_npu else None)
    monkeypatch.setattr(environment, "_cann_is_loadable", lambda: cann)


def test_the_user_wins_and_the_second_call_sets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, torch_npu=True, cann=True)
    os.environ["HCCL_EXEC_TIMEOUT"] = "7"
    new = prepare_environment(deterministic=True, timeout_seconds=600)
    assert new == {
        "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
        "HCCL_CONNECT_TIMEOUT": "1200",
        "HCCL_DETERMINISTIC": "true",
        "CLOSE_MATMUL_K_SHIFT": "1",
    }
    assert os.environ["HCCL_EXEC_TIMEOUT"] == "7"
    assert all(os.environ[name] == value for name, value in new.items())
    assert prepare_environment(deterministic=True, timeout_seconds=600) == {}


def test_the_device_times_out_before_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, torch_npu=True, cann=True)
    assert "HCCL_EXEC_TIMEOUT" not in prepare_environment()
    assert prepare_environment(timeout_seconds=600) == {"HCCL_EXEC_TIMEOUT": "540"}


def test_cuda_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, torch_npu=False, cann=False)
    assert prepare_environment() == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert prepare_environment(deterministic=True) == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def test_the_older_allocator_variable_counts_as_set(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, torch_npu=False, cann=False)
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "max_split_size_mb:128"
    assert prepare_environment() == {}


def test_cpu_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, torch_npu=False, cann=False)
    os.environ["HYPER_PARALLEL_DEVICE"] = "cpu"
    assert prepare_environment(deterministic=True, timeout_seconds=60) == {}


def test_ranks_share_the_cores_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, torch_npu=False, cann=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    os.environ.update(HYPER_PARALLEL_DEVICE="cpu", LOCAL_WORLD_SIZE="3")
    assert prepare_environment() == {"OMP_NUM_THREADS": "2"}


@pytest.mark.parametrize(("device", "cann"), [("auto", False), ("npu", False), ("cpu", True), ("cuda", True)])
def test_autoload_is_off_where_torch_npu_is_not_used(monkeypatch: pytest.MonkeyPatch, device: str, cann: bool) -> None:
    pretend(monkeypatch, torch_npu=True, cann=cann)
    os.environ["HYPER_PARALLEL_DEVICE"] = device
    assert prepare_environment()["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0"


def run_python(code: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, *paths)))}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)


def test_no_framework_is_loaded() -> None:
    result = run_python(
        "import sys, hyper_parallel.platform\n"
        "from hyper_parallel.platform.environment import prepare_environment\n"
        "prepare_environment(deterministic=True, timeout_seconds=60)\n"
        "print(sorted({'torch', 'numpy', 'torch_npu'} & sys.modules.keys()))"
    )
    assert result.stdout.strip() == "[]", result.stderr


def test_torch_npu_without_cann_cannot_stop_torch(tmp_path: Path) -> None:
    """An installed torch_npu is an entry point that torch loads by itself, and that raises without CANN."""
    (tmp_path / "torch_npu.py").write_text("raise ImportError('libhccl.so: cannot open shared object file')")
    info = tmp_path / "torch_npu-2.13.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-npu\nVersion: 2.13.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")

    assert "libhccl.so" in run_python("import torch", tmp_path).stderr
    prepared = run_python(
        "from hyper_parallel.platform.environment import prepare_environment\n"
        "prepare_environment()\n"
        "from hyper_parallel.platform import get_platform\n"
        "print(get_platform().device_type)",
        tmp_path,
    )
    assert prepared.stdout.strip() in ("cpu", "cuda"), prepared.stderr
    assert "libhccl.so" in prepared.stderr  # and the reason is logged


def test_get_platform_resolves_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform_package, "_platform", None)
    os.environ["HYPER_PARALLEL_DEVICE"] = "cpu"
    first = get_platform()
    os.environ["HYPER_PARALLEL_DEVICE"] = "no such device"
    assert get_platform() is first
    assert type(first) is CpuPlatform


def test_use_platform_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    before, other = CpuPlatform(), Platform()
    monkeypatch.setattr(platform_package, "_platform", before)
    with pytest.raises(KeyError), use_platform(other):
        assert get_platform() is other
        raise KeyError
    assert get_platform() is before
