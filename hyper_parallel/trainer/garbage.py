"""Python's garbage collector, run at the same step on every rank.

Left to itself each rank collects at a moment of its own, and all the others wait for it in their next collective.
"""

from __future__ import annotations

import gc


class GarbageCollection:
    """Within the `with` block garbage is collected by `step` alone, every `interval_steps`; 0 leaves it to Python."""

    def __init__(self, interval_steps: int) -> None:
        self._interval_steps = interval_steps
        self._was_enabled = gc.isenabled()

    def __enter__(self) -> GarbageCollection:
        if self._interval_steps:
            gc.collect()
            gc.freeze()  # what was built stays to the end: later collections need not look at it
            gc.disable()
        return self

    def step(self, step: int) -> None:
        """Collects if `step` is due."""
        if self._interval_steps and step % self._interval_steps == 0:
            gc.collect()

    def __exit__(self, *_: object) -> None:
        if self._interval_steps:
            gc.unfreeze()
            if self._was_enabled:
                gc.enable()
