"""NVIDIA GPUs and NCCL."""

from __future__ import annotations

import os
from typing import ClassVar

import torch

from hyper_parallel.config.errors import Fault
from hyper_parallel.platform.accelerator import AcceleratorPlatform

# NVIDIA's data sheets of the A100, H100 and H200 without sparsity (the H100's and H200's give the figure with it,
# which is twice as much). Whole names, because another form of the same chip (NVL, MIG) has another peak.
_A100 = ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB", "NVIDIA A100-PCIE-40GB", "NVIDIA A100 80GB PCIe")
_HALF_PRECISION_FLOPS = {
    **dict.fromkeys(_A100, 312e12),
    "NVIDIA H100 PCIe": 756.5e12,
    "NVIDIA H100 80GB HBM3": 989.4e12,
    "NVIDIA H200": 989.4e12,
}


class CudaPlatform(AcceleratorPlatform):
    """CUDA devices. (A ROCm build of torch calls itself CUDA; it is not tested.)"""

    device_type: ClassVar[str] = "cuda"
    collectives: ClassVar[str] = "nccl"
    pins_staging: ClassVar[bool] = True

    @classmethod
    def fault(cls) -> Fault | None:
        if torch.version.cuda is None and torch.version.hip is None:
            return Fault(
                "HYPER_PARALLEL_DEVICE",
                f"cuda is not in this build of torch ({torch.__version__})",
                "install a CUDA build of torch, or set cpu",
            )
        if torch.cuda.device_count() == 0:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            return Fault(
                "HYPER_PARALLEL_DEVICE",
                f"torch {torch.__version__} sees no cuda device (CUDA_VISIBLE_DEVICES is {visible!r})",
                "check nvidia-smi and CUDA_VISIBLE_DEVICES, or set cpu",
            )
        return None

    def set_deterministic(self, on: bool) -> None:
        super().set_deterministic(on)
        torch.backends.cudnn.deterministic = on
        torch.backends.cudnn.benchmark = False

    def bf16_supported(self) -> bool:
        return torch.cuda.is_bf16_supported(including_emulation=False)

    def peak_flops(self, dtype: torch.dtype) -> float | None:
        return _HALF_PRECISION_FLOPS.get(self.name) if dtype in (torch.bfloat16, torch.float16) else None
