"""What CUDA and NPU share: `torch.accelerator`, and the module of the device for what it does not cover."""

from __future__ import annotations

import os
from typing import Any, ClassVar

import torch

from hyper_parallel.config.errors import ConfigError
from hyper_parallel.platform.base import MemoryStats, Platform


class AcceleratorPlatform(Platform):
    """A device with its own memory, streams and random numbers. Made only where `fault` found none."""

    pin_memory: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return self._module.get_device_name()

    @property
    def _module(self) -> Any:
        return torch.get_device_module(self.device_type)

    def device_count(self) -> int:
        return torch.accelerator.device_count()

    def device(self, local_rank: int | None = None) -> torch.device:
        """As in `Platform`.

        Raises:
            ConfigError: there are fewer devices than ranks on this node.
        """
        return torch.device(self.device_type, self._device_index(local_rank))

    def set_device(self, local_rank: int | None = None) -> None:
        torch.accelerator.set_device_index(self._device_index(local_rank))

    def _device_index(self, local_rank: int | None) -> int:
        rank = int(os.environ.get("LOCAL_RANK", "0")) if local_rank is None else local_rank
        count = self.device_count()
        if count == 1:
            return 0  # a launcher may show each process its own device only
        if rank >= count:
            raise ConfigError.one(
                "LOCAL_RANK",
                f"{rank} has no {self.device_type} device, {count} are visible",
                f"start at most {count} processes on this node",
            )
        return rank

    def synchronize(self) -> None:
        torch.accelerator.synchronize()

    def stream(self) -> Any:
        return torch.Stream(self.device_type)

    def current_stream(self) -> Any:
        return torch.accelerator.current_stream()

    def event(self) -> Any:
        return torch.Event(self.device_type, enable_timing=True)

    def empty_cache(self) -> None:
        torch.accelerator.empty_cache()

    def memory(self) -> MemoryStats:
        stats = torch.accelerator.memory_stats()
        free_bytes, total_bytes = torch.accelerator.get_memory_info()
        return MemoryStats(
            allocated_bytes=stats.get("allocated_bytes.all.current"),
            max_allocated_bytes=stats.get("allocated_bytes.all.peak"),
            reserved_bytes=stats.get("reserved_bytes.all.current"),
            max_reserved_bytes=stats.get("reserved_bytes.all.peak"),
            free_bytes=free_bytes,
            total_bytes=total_bytes,
            alloc_retries=stats.get("num_alloc_retries"),
            ooms=stats.get("num_ooms"),
        )

    def memory_bytes(self) -> int | None:
        # Read every step, so without the driver call that `memory` makes.
        return torch.accelerator.max_memory_allocated()

    def reset_peak_memory(self) -> None:
        torch.accelerator.reset_peak_memory_stats()

    def rng_state(self) -> dict[str, torch.Tensor]:
        return {**super().rng_state(), self.device_type: self._module.get_rng_state()}

    def set_rng_state(self, state: dict[str, torch.Tensor]) -> None:
        super().set_rng_state(state)
        if self.device_type in state:
            self._module.set_rng_state(state[self.device_type])
