"""Ascend NPUs and HCCL, through torch_npu.

Not run on Ascend hardware: the tests drive this file with stand-ins for torch_npu and torch.accelerator. They show
that names and values reach the right calls, not that the calls do on a device what torch_npu promises.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any, ClassVar

import torch

from hyper_parallel.config.errors import Fault
from hyper_parallel.platform.accelerator import AcceleratorPlatform


class NpuPlatform(AcceleratorPlatform):
    """Ascend devices. Their peak FLOP/s are not published by name, so `peak_flops` knows none."""

    device_type: ClassVar[str] = "npu"
    collectives: ClassVar[str] = "hccl"
    supports_float64: ClassVar[bool] = False

    @classmethod
    def fault(cls) -> Fault | None:
        path = "HYPER_PARALLEL_DEVICE"
        if importlib.util.find_spec("torch_npu") is None:
            return Fault(path, "npu needs torch_npu, which is not installed", "pip install 'hyper_parallel[npu]'")
        try:
            # Registers "npu" with torch where the autoload of backends is off.
            importlib.import_module("torch_npu")
        except (ImportError, OSError, RuntimeError) as error:
            return Fault(
                path,
                f"torch_npu cannot be imported ({type(error).__name__}: {error})",
                "source CANN's set_env.sh and use the CPU build of torch that torch_npu asks for, or set cpu",
            )
        if torch.accelerator.device_count() == 0:
            visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
            return Fault(
                path,
                f"torch_npu sees no device (ASCEND_RT_VISIBLE_DEVICES is {visible!r})",
                "check npu-smi and ASCEND_RT_VISIBLE_DEVICES, or set cpu",
            )
        return None

    def set_device(self, local_rank: int | None = None) -> None:
        super().set_device(local_rank)
        # Compiled binaries and plain layouts: otherwise each new shape is compiled when it is first met, and
        # parameters may be kept in a private format that sharding cannot cut.
        self._module.set_compile_mode(jit_compile=False)
        self._module.config.allow_internal_format = False

    def bf16_supported(self) -> bool:
        return self._module.is_bf16_supported()

    def compile_backend(self, default: str) -> str | None:
        # Inductor has no NPU code generator of its own.
        return None if default == "inductor" else super().compile_backend(default)

    def _profiler_api(self) -> Any:
        return importlib.import_module("torch_npu.profiler")
