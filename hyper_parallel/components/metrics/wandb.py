"""Weights & Biases."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from hyper_parallel.components.metrics.record import StepMetrics
from hyper_parallel.components.metrics.sink import PeriodicSink
from hyper_parallel.config.errors import Fault

RUN_ID_FILE = "wandb_run_id"
"""Which W&B run is that of the dump folder."""


class WandB(PeriodicSink):
    """Sends each number as ``train/<name>``. A resumed run goes on in the same W&B run."""

    @dataclass(kw_only=True, slots=True)
    class Config(PeriodicSink.Config):
        """How often, and which W&B run."""

        interval_steps: int = 1
        """Every this many steps, and at the first and the last."""
        project: str = "hyper_parallel"
        """W&B project."""
        entity: str | None = None
        """W&B user or team. None: the account's default."""
        run_name: str | None = None
        """Name of the run. None: W&B makes one up."""
        mode: Literal["online", "offline"] = "online"
        """offline: write under the dump folder, to be sent later by `wandb sync`."""

        def writes_to(self) -> str:
            return RUN_ID_FILE

        def faults(self) -> Iterator[Fault]:
            yield from PeriodicSink.Config.faults(self)
            if find_spec("wandb") is None:
                yield Fault("project", "the W&B sink needs the package wandb", "pip install wandb, or leave it out")

    config: Config

    def open(self, last_step: int) -> None:
        import wandb

        super().open(last_step)
        folder = Path(self.dump_folder)
        id_file = folder / RUN_ID_FILE
        if last_step == 0 or not id_file.exists():
            folder.mkdir(parents=True, exist_ok=True)
            id_file.write_text(uuid.uuid4().hex)
        self._run = wandb.init(
            project=self.config.project,
            entity=self.config.entity,
            name=self.config.run_name,
            mode=self.config.mode,
            dir=str(folder),
            id=id_file.read_text(),
            resume="allow",
        )
        # W&B's own step counter cannot go back, which a resumed run does: plot over ours.
        self._run.define_metric("train/*", step_metric="step")

    def write(self, record: StepMetrics) -> None:
        if not self.is_due(record):
            return
        numbers = record.as_dict()
        self._run.log({"step": numbers.pop("step")} | {f"train/{k}": v for k, v in numbers.items() if v is not None})

    def close(self) -> None:
        self._run.finish()
