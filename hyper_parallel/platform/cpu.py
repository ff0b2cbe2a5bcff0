"""The host itself: gloo, and the memory of the process."""

from __future__ import annotations

import contextlib
import platform as python_platform
from pathlib import Path
from typing import ClassVar

from hyper_parallel.platform.base import MemoryStats, Platform

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


class CpuPlatform(Platform):
    """No accelerator. Memory is what Linux says of this process; elsewhere it is not measurable."""

    device_type: ClassVar[str] = "cpu"

    @property
    def name(self) -> str:
        return python_platform.processor() or python_platform.machine() or "cpu"

    def memory(self) -> MemoryStats:
        # Not getrusage: its peak is carried over from the program that started this one.
        sizes = _status_bytes("VmRSS", "VmHWM")
        return MemoryStats(allocated_bytes=sizes.get("VmRSS"), max_allocated_bytes=sizes.get("VmHWM"))

    def reset_peak_memory(self) -> None:
        # Where the system does not let a process do this, the peak is that of its whole life.
        with contextlib.suppress(OSError):
            _CLEAR_REFS.write_text("5")  # proc(5): resets the peak resident set size


def _status_bytes(*keys: str) -> dict[str, int]:
    """Those of `keys` that the system tells; read once, since each step asks."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return {}
    named = (line.split(":", 1) for line in lines)
    return {key: int(value.split()[0]) * 1024 for key, value in named if key in keys}
