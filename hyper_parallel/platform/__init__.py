"""Which accelerator, and which collective backend. No other package asks: they call `get_platform()`.

Importing this package, or `environment` in it, loads no framework and touches no device.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hyper_parallel.platform.base import Platform

_platform: Platform | None = None


def get_platform() -> Platform:
    """The platform of this process: ``HYPER_PARALLEL_DEVICE`` (auto, cpu, cuda, npu), resolved at the first call.

    Raises:
        ConfigError: the variable names no platform, or one that this machine cannot offer; says why.
    """
    global _platform
    if _platform is None:
        from hyper_parallel.platform.selection import select_platform

        _platform = select_platform(os.environ.get("HYPER_PARALLEL_DEVICE", "auto"))
    return _platform


@contextmanager
def use_platform(platform: Platform) -> Iterator[Platform]:
    """Makes `get_platform` answer `platform` inside the block: for tests."""
    global _platform
    before, _platform = _platform, platform
    try:
        yield platform
    finally:
        _platform = before
