"""A contender that only waits, and writes when its steps end."""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks.turns import Turn


def run(work: str, turn: Turn, *, name: str, step_seconds: float = 0.0, fails_at: int | None = None) -> None:
    """Appends `name` to the file `work` at each step."""
    for step in range(turn.steps):
        if step == fails_at:
            raise ValueError(f"{name} cannot do step {step}")
        time.sleep(step_seconds)
        with Path(work).open("a", encoding="ascii") as file:
            file.write(name)
        turn.step_done()
