"""What every accelerator must answer. The base answers for a host without one, so nothing here can raise on a CPU."""

from __future__ import annotations

import logging
import os
import random
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import numpy as np
import torch

from hyper_parallel.config.errors import Fault
from hyper_parallel.platform.environment import prepare_environment

logger = logging.getLogger(__name__)

VENDOR_BACKENDS = ("nccl", "hccl")
"""Collective libraries that exist for one kind of device only."""


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """Memory of this process, in bytes. None: not measurable here, which is not 0.

    `allocated` and `max_allocated` are those of the accelerator's tensors, and on a CPU the resident memory of the
    process. Maxima are since `Platform.reset_peak_memory`.
    """

    allocated_bytes: int | None = None
    max_allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    max_reserved_bytes: int | None = None
    free_bytes: int | None = None
    total_bytes: int | None = None
    alloc_retries: int | None = None
    ooms: int | None = None


class StepProfiler(Protocol):
    """A profiler that watches steps: `step` closes one."""

    def start(self) -> None: ...

    def step(self) -> None: ...

    def stop(self) -> None: ...


class HostStream:
    """The only stream of a host: work is done when the call returns, so there is nothing to wait for."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: HostEvent | None = None) -> HostEvent:
        event = event or HostEvent()
        event.record()
        return event


class HostEvent:
    """A moment on the host's clock."""

    def __init__(self) -> None:
        self._seconds = time.perf_counter()

    def record(self, stream: Any = None) -> None:
        self._seconds = time.perf_counter()

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: HostEvent) -> float:
        """Milliseconds from this moment to `end`, as torch.Event counts them."""
        return (end._seconds - self._seconds) * 1e3


class Platform:
    """One kind of device. Every method may be called any number of times; None means "not measurable"."""

    device_type: ClassVar[str] = "cpu"
    collectives: ClassVar[str] = "gloo"
    """The device's own collective library."""
    pin_memory: ClassVar[bool] = False
    """Whether copies from pinned host memory can overlap with compute."""
    pins_staging: ClassVar[bool] = False
    """Whether torch.distributed.checkpoint can pin the host memory that it copies states to."""
    supports_float64: ClassVar[bool] = True

    @classmethod
    def fault(cls) -> Fault | None:
        """Why this machine cannot offer the platform, or None."""
        return None

    # Devices

    @property
    def name(self) -> str:
        """The device as its maker calls it."""
        return self.device_type

    def device_count(self) -> int:
        return 1

    def device(self, local_rank: int | None = None) -> torch.device:
        """The device of `local_rank`; None: of this process (``LOCAL_RANK``, else the first)."""
        return torch.device(self.device_type)

    def set_device(self, local_rank: int | None = None) -> None:
        """Makes `device(local_rank)` current. Call it before the first tensor and the process group."""

    def comm_backend(self, requested: str = "auto") -> str:
        """The argument of init_process_group.

        Accelerators carry gloo beside their own library, for objects and asynchronous checkpoints in host memory.
        A library of another maker is replaced by this device's with a warning, so one file runs everywhere.
        """
        own = self.collectives if self.collectives == "gloo" else f"cpu:gloo,{self.device_type}:{self.collectives}"
        if requested in ("auto", self.collectives):
            return own
        if any(vendor in requested and vendor != self.collectives for vendor in VENDOR_BACKENDS):
            logger.warning("comm.backend: %r is not for %s; %r is used", requested, self.device_type, own)
            return own
        return requested

    # Work in flight, and memory

    def synchronize(self) -> None:
        """Waits for all work given to the current device."""

    def stream(self) -> Any:
        """A new stream: a context manager with wait_stream, wait_event, record_event, synchronize."""
        return HostStream()

    def current_stream(self) -> Any:
        return HostStream()

    def event(self) -> Any:
        """A timing event: record, synchronize, elapsed_time(end) in milliseconds."""
        return HostEvent()

    def empty_cache(self) -> None:
        """Returns unused cached memory to the device."""

    def memory(self) -> MemoryStats:
        return MemoryStats()

    def memory_bytes(self) -> int | None:
        """The peak of allocated memory since `reset_peak_memory`: what metrics report."""
        return self.memory().max_allocated_bytes

    def reset_peak_memory(self) -> None:
        """Lets the maxima of `memory` start again from what is allocated now."""

    # Random numbers and determinism

    def seed_all(self, seed: int) -> None:
        """Seeds Python, numpy and torch, which seeds every device."""
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)

    def rng_state(self) -> dict[str, torch.Tensor]:
        """torch's random state by device type: the host's and the current device's."""
        return {"cpu": torch.get_rng_state()}

    def set_rng_state(self, state: dict[str, torch.Tensor]) -> None:
        """Puts back what `rng_state` gave. A state of another kind of device is left out with a warning."""
        torch.set_rng_state(state["cpu"])
        foreign = sorted(state.keys() - {"cpu", self.device_type})
        if foreign:
            logger.warning("the random state of %s was not restored on %s", ", ".join(foreign), self.device_type)

    def set_deterministic(self, on: bool) -> None:
        """Only deterministic kernels, so that two equal runs agree in every bit; one that has none raises."""
        if on:
            prepare_environment(deterministic=True)
        torch.use_deterministic_algorithms(on)

    # Numbers and compute

    def bf16_supported(self) -> bool:
        """Whether bfloat16 is computed by the hardware, or on a CPU at all."""
        return True

    def peak_flops(self, dtype: torch.dtype) -> float | None:
        """Dense floating-point operations a second at best, as the maker states them; None: unknown."""
        return None

    def autocast(self, dtype: torch.dtype) -> AbstractContextManager[Any]:
        return torch.autocast(self.device_type, dtype=dtype)

    def compile_backend(self, default: str) -> str | None:
        """`default` where torch.compile knows it and can use it on this device, else None."""
        known = callable(default) or default in torch.compiler.list_backends(exclude_tags=())
        return default if known else None

    def profiler(
        self,
        folder: str | Path,
        *,
        wait_steps: int,
        warmup_steps: int,
        active_steps: int,
        repeat: int = 1,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
    ) -> StepProfiler:
        """A profiler that writes the trace of every window of `active_steps` into `folder`.

        A window is wait, warm-up and active steps; `repeat` windows follow each other, 0 is without end.
        """
        api = self._profiler_api()
        kinds = dict.fromkeys(("CPU", self.device_type.upper()))
        return api.profile(
            activities=[getattr(api.ProfilerActivity, kind) for kind in kinds],
            schedule=api.schedule(wait=wait_steps, warmup=warmup_steps, active=active_steps, repeat=repeat),
            on_trace_ready=api.tensorboard_trace_handler(str(folder), worker_name=f"rank{os.environ.get('RANK', '0')}"),
            record_shapes=record_shapes,
            profile_memory=profile_memory,
            with_stack=with_stack,
        )

    def _profiler_api(self) -> Any:
        import torch.profiler

        return torch.profiler
