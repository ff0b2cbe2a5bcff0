"""Weights & Biases."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from hyper_parallel.components.metrics.record import StepMetrics
from hyper_parallel.components.metrics.sink import MetricsSink
from hyper_parallel.config.errors import Fault


class WandB(MetricsSink):
    """Sends each number as ``train/<name>``. A resumed run goes on in the same W&B run."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsSink.Config):
        """Which W&B run."""

        project: str = "hyper_parallel"
        """W&B project."""
        entity: str | None = None
        """W&B user or team. None: the account's default."""
        run_name: str | None = None
        """Name of the run. None: W&B makes one up."""
        mode: Literal["online", "offline"] = "online"
        """offline: write under the dump folder, to be sent later by `wandb sync`."""

        def faults(self) -> Iterator[Fault]:
            if find_spec("wandb") is None:
                yield Fault("project", "the W&B sink needs the package wandb", "pip install wandb, or leave it out")

    def __init__(self, config: Config, *, dump_folder: str, training_steps: int) -> None:
        super().__init__(config, dump_folder=dump_folder, training_steps=training_steps)
        self._settings = config

    def open(self, last_step: int) -> None:
        import wandb

        folder = Path(self.dump_folder)
        id_file = folder / "wandb_run_id"
        if last_step == 0 or not id_file.exists():
            folder.mkdir(parents=True, exist_ok=True)
            id_file.write_text(uuid.uuid4().hex)
        self._run = wandb.init(
            project=self._settings.project,
            entity=self._settings.entity,
            name=self._settings.run_name,
            mode=self._settings.mode,
            dir=str(folder),
            id=id_file.read_text(),
            resume="allow",
        )
        # W&B's own step counter cannot go back, which a resumed run does: plot over ours.
        self._run.define_metric("train/*", step_metric="step")

    def write(self, record: StepMetrics) -> None:
        numbers = record.as_dict()
        self._run.log({"step": numbers.pop("step")} | {f"train/{k}": v for k, v in numbers.items() if v is not None})

    def close(self) -> None:
        self._run.finish()
