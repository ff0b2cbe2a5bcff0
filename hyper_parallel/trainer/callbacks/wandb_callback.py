"""WandbCallback: Weights & Biases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hyper_parallel.components.metrics import MetricsSink, WandB
from hyper_parallel.trainer.callbacks.sink_callback import SinkCallback


class WandbCallback(SinkCallback):
    """Sends each number as ``train/<name>`` to a W&B run, which a resumed run goes on in."""

    @dataclass(kw_only=True, slots=True)
    class Config(SinkCallback.Config):
        """How often, and which W&B run."""

        log_steps: int = 1
        """Every this many steps, and at the first and the last."""
        project: str = "hyper_parallel"
        """W&B project."""
        entity: str | None = None
        """W&B user or team. None: the account's default."""
        run_name: str | None = None
        """Name of the run. None: W&B makes one up."""
        mode: Literal["online", "offline"] = "online"
        """offline: write under the dump folder, to be sent later by `wandb sync`."""

        def sink(self) -> MetricsSink.Config:
            return WandB.Config(
                interval_steps=self.log_steps,
                project=self.project,
                entity=self.entity,
                run_name=self.run_name,
                mode=self.mode,
            )
