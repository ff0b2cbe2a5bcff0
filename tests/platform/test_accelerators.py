"""CUDA and NPU on a host without either: stand-ins record what reaches torch.accelerator and the device's module.

This shows that names, indices and values arrive where they should. It does not show that a device does what its
library promises; only a run on one does.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hyper_parallel.config.errors import ConfigError
from hyper_parallel.platform.accelerator import AcceleratorPlatform
from hyper_parallel.platform.cuda import CudaPlatform
from hyper_parallel.platform.npu import NpuPlatform
from hyper_parallel.platform.selection import select_platform

KINDS = [CudaPlatform, NpuPlatform]


class Device:
    """Two devices that remember what was done to them."""

    def __init__(self) -> None:
        self.count = 2
        self.calls: list[tuple[str, Any]] = []
        self.rng = torch.arange(16, dtype=torch.uint8)
        self.module = SimpleNamespace(
            get_device_name=lambda: "NVIDIA H200",
            get_rng_state=lambda: self.rng.clone(),
            set_rng_state=lambda state: setattr(self, "rng", state),
            set_compile_mode=lambda **kwargs: self.calls.append(("set_compile_mode", kwargs)),
            config=SimpleNamespace(allow_internal_format=True),
            is_bf16_supported=lambda: False,
        )


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    fake = Device()
    stats = {
        "allocated_bytes.all.current": 1, "allocated_bytes.all.peak": 2, "reserved_bytes.all.current": 3,
        "reserved_bytes.all.peak": 4, "num_ooms": 6,
    }  # fmt: skip
    answers = {
        "device_count": lambda: fake.count,
        "set_device_index": lambda index: fake.calls.append(("set_device_index", index)),
        "memory_stats": lambda: stats,
        "get_memory_info": lambda: (7, 8),
        "max_memory_allocated": lambda: 2,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.accelerator, name, answer)
    monkeypatch.setattr(torch, "get_device_module", lambda device_type: fake.module)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return fake


@pytest.mark.parametrize(
    ("kind", "requested", "backend"),
    [
        (CudaPlatform, "auto", "cpu:gloo,cuda:nccl"),
        (CudaPlatform, "nccl", "cpu:gloo,cuda:nccl"),
        (CudaPlatform, "hccl", "cpu:gloo,cuda:nccl"),
        (CudaPlatform, "gloo", "gloo"),
        (CudaPlatform, "cuda:nccl", "cuda:nccl"),
        (NpuPlatform, "auto", "cpu:gloo,npu:hccl"),
        (NpuPlatform, "hccl", "cpu:gloo,npu:hccl"),
        (NpuPlatform, "cpu:gloo,cuda:nccl", "cpu:gloo,npu:hccl"),
    ],
)
def test_comm_backend(kind: type[AcceleratorPlatform], requested: str, backend: str) -> None:
    assert kind().comm_backend(requested) == backend


def test_torch_parses_the_cuda_backends() -> None:
    parsed = torch.distributed.distributed_c10d.BackendConfig(CudaPlatform().comm_backend())
    assert parsed.get_device_backend_map() == {"cpu": "gloo", "cuda": "nccl"}


@pytest.mark.parametrize("kind", KINDS)
def test_each_rank_gets_its_device(
    device: Device, monkeypatch: pytest.MonkeyPatch, kind: type[AcceleratorPlatform]
) -> None:
    platform = kind()
    monkeypatch.setenv("LOCAL_RANK", "1")
    platform.set_device()
    platform.set_device()
    platform.set_device(0)
    device.count = 1  # the launcher shows this process its own device only
    platform.set_device()
    assert [index for name, index in device.calls if name == "set_device_index"] == [1, 1, 0, 0]


def test_device_of_a_rank(device: Device) -> None:  # a torch without torch_npu knows no device type "npu"
    assert CudaPlatform().device(1) == torch.device("cuda", 1)


@pytest.mark.parametrize("kind", KINDS)
def test_more_ranks_than_devices(device: Device, kind: type[AcceleratorPlatform]) -> None:
    with pytest.raises(ConfigError, match=r"LOCAL_RANK: 2 has no \w+ device, 2 are visible; start at most 2 processes"):
        kind().set_device(2)


def test_npu_runs_compiled_kernels_on_plain_layouts(device: Device) -> None:
    NpuPlatform().set_device(0)
    assert ("set_compile_mode", {"jit_compile": False}) in device.calls
    assert device.module.config.allow_internal_format is False


@pytest.mark.parametrize("kind", KINDS)
def test_memory(device: Device, kind: type[AcceleratorPlatform]) -> None:
    memory = kind().memory()
    assert (memory.allocated_bytes, memory.max_allocated_bytes) == (1, 2)
    assert (memory.reserved_bytes, memory.max_reserved_bytes) == (3, 4)
    assert (memory.free_bytes, memory.total_bytes) == (7, 8)
    assert (memory.alloc_retries, memory.ooms) == (None, 6)  # a key that the library leaves out is not 0
    assert kind().memory_bytes() == 2


@pytest.mark.parametrize("kind", KINDS)
def test_random_state_goes_to_host_and_device(device: Device, kind: type[AcceleratorPlatform]) -> None:
    platform = kind()
    state = platform.rng_state()
    assert state.keys() == {"cpu", platform.device_type}
    expected = torch.rand(3)
    device.rng = torch.zeros(16, dtype=torch.uint8)
    platform.set_rng_state(state)
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(device.rng, torch.arange(16, dtype=torch.uint8))


@pytest.mark.parametrize("kind", KINDS)
def test_random_state_of_a_cpu_run_leaves_the_device_alone(device: Device, kind: type[AcceleratorPlatform]) -> None:
    kind().set_rng_state({"cpu": torch.get_rng_state()})
    assert torch.equal(device.rng, torch.arange(16, dtype=torch.uint8))


def test_cuda_peak_flops_only_of_known_names(device: Device) -> None:
    cuda = CudaPlatform()
    assert cuda.peak_flops(torch.bfloat16) == 989.4e12
    assert cuda.peak_flops(torch.float32) is None
    for name in ("NVIDIA H200 NVL", "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "Tesla T4"):
        device.module.get_device_name = lambda name=name: name
        assert cuda.peak_flops(torch.bfloat16) is None


def test_npu_answers(device: Device) -> None:
    npu = NpuPlatform()
    assert npu.peak_flops(torch.bfloat16) is None
    assert not npu.bf16_supported() and not npu.supports_float64
    assert (npu.compile_backend("inductor"), npu.compile_backend("aot_eager")) == (None, "aot_eager")


def test_npu_profiler_is_torch_npus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: dict[str, Any] = {}
    api = SimpleNamespace(
        ProfilerActivity=SimpleNamespace(CPU="C", NPU="N"),
        schedule=lambda **kwargs: kwargs,
        tensorboard_trace_handler=lambda folder, worker_name: (folder, worker_name),
        profile=lambda **kwargs: seen.update(kwargs),
    )
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(profiler=api))
    monkeypatch.setitem(sys.modules, "torch_npu.profiler", api)
    monkeypatch.setenv("RANK", "3")
    NpuPlatform().profiler(tmp_path, wait_steps=1, warmup_steps=2, active_steps=3)
    assert seen["activities"] == ["C", "N"]
    assert seen["schedule"] == {"wait": 1, "warmup": 2, "active": 3, "repeat": 1}
    assert seen["on_trace_ready"] == (str(tmp_path), "rank3")


# Selection


@pytest.fixture
def torch_npu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Installs a torch_npu with the given source text; the real one, if any, is out of sight."""

    def install(source: str) -> None:
        (tmp_path / "torch_npu.py").write_text(source)
        importlib.invalidate_caches()

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    yield install
    sys.modules.pop("torch_npu", None)


BROKEN = "raise ImportError('libhccl.so: cannot open shared object file')"


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)


def error_of(requested: str) -> str:
    with pytest.raises(ConfigError) as error:
        select_platform(requested)
    return str(error.value)


def test_explicit_npu_names_the_broken_import(torch_npu: Any) -> None:
    torch_npu(BROKEN)
    message = error_of("npu")
    assert message.startswith("HYPER_PARALLEL_DEVICE: torch_npu cannot be imported (ImportError: libhccl.so: ")
    assert "set_env.sh" in message


def test_explicit_npu_without_devices(torch_npu: Any, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_npu("")
    device.count = 0
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "9")
    assert "torch_npu sees no device (ASCEND_RT_VISIBLE_DEVICES is '9')" in error_of("npu")


def test_auto_takes_a_working_npu(torch_npu: Any, device: Device) -> None:
    torch_npu("")
    assert type(select_platform("auto")) is NpuPlatform


def test_auto_says_why_it_leaves_an_npu_out(torch_npu: Any, no_cuda: None, caplog: pytest.LogCaptureFixture) -> None:
    torch_npu(BROKEN)
    assert select_platform("auto").device_type == "cpu"
    assert "torch_npu is left out" in caplog.text and "libhccl.so" in caplog.text


def test_explicit_cuda_on_a_build_without(no_cuda: None) -> None:
    assert f"cuda is not in this build of torch ({torch.__version__})" in error_of("cuda")


def test_explicit_cuda_without_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "sees no cuda device (CUDA_VISIBLE_DEVICES is '')" in error_of("cuda")


def test_unknown_device() -> None:
    assert error_of("cudaa") == "HYPER_PARALLEL_DEVICE: 'cudaa' is no device; did you mean 'cuda'?"
