"""Picks the platform of a process."""

from __future__ import annotations

import importlib.util
import logging

from hyper_parallel.config.errors import ConfigError, did_you_mean
from hyper_parallel.platform.base import Platform
from hyper_parallel.platform.cpu import CpuPlatform
from hyper_parallel.platform.cuda import CudaPlatform
from hyper_parallel.platform.npu import NpuPlatform

logger = logging.getLogger(__name__)

PLATFORMS: dict[str, type[Platform]] = {"npu": NpuPlatform, "cuda": CudaPlatform, "cpu": CpuPlatform}
"""In the order in which `auto` tries them."""


def select_platform(requested: str) -> Platform:
    """`requested` is auto, the first that works, or one of `PLATFORMS`, which must work.

    Raises:
        ConfigError: `requested` is unknown, or this machine cannot offer it; says why.
    """
    if requested == "auto":
        return _first_that_works()
    if requested not in PLATFORMS:
        remedy = did_you_mean(requested, ["auto", *PLATFORMS])
        raise ConfigError.one("HYPER_PARALLEL_DEVICE", f"{requested!r} is no device", remedy)
    fault = PLATFORMS[requested].fault()
    if fault is not None:
        raise ConfigError([fault])
    return PLATFORMS[requested]()


def _first_that_works() -> Platform:
    for name, kind in PLATFORMS.items():
        fault = kind.fault()
        if fault is None:
            return kind()
        if name == "npu" and importlib.util.find_spec("torch_npu") is not None:
            logger.warning("an installed torch_npu is left out: %s; %s", fault.fact, fault.remedy)
    raise AssertionError("the CPU always works")
