"""A small run with everything that a checkpoint holds."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hyper_parallel.components.checkpoint import CheckpointManager
from hyper_parallel.components.optimizer import AdamW
from hyper_parallel.config.sections import ParallelismConfig, TrainingConfig
from hyper_parallel.distributed.fsdp import gradient_sync
from hyper_parallel.distributed.parallel_dims import ParallelDims
from hyper_parallel.distributed.reductions import all_reduce_sum
from tests.distributed.tiny_decoder import sum_loss
from tests.distributed.training import ROWS, batch, build, whole


@dataclass
class Counter:
    """State of one number."""

    value: int = 0
    loaded: list[int] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]
        self.loaded.append(self.value)


class Run:
    """Trains a tiny decoder in float64 on the ranks there are; dropout draws from the rank's random state."""

    def __init__(
        self, dump_folder: Path | str, *, model: dict[str, Any] | None = None, dtype: str = "float64", **config: Any
    ) -> None:
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.dims = ParallelDims.from_config(ParallelismConfig(), world_size)
        self.dims.build_mesh("cpu")
        torch.manual_seed(100 + self.dims.dp_rank)
        training = TrainingConfig(dtype=dtype)
        self.model = build(self.dims, ParallelismConfig(), training=training, **(model or {}))
        self.optimizers = AdamW.Config(lr=0.01).build(model_parts=[self.model])
        self.lr_schedulers, self.dataloader, self.train_state = Counter(), Counter(), Counter()
        self.manager = CheckpointManager.Config(**config).build(
            dump_folder=str(dump_folder),
            sd_adapter=None,
            tokenizer=None,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.lr_schedulers,
            dataloader=self.dataloader,
            train_state=self.train_state,
        )

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            ids, labels = batch(self.dataloader.value)
            first, count = self.dims.dp_rank * ROWS // self.dims.dp_size, ROWS // self.dims.dp_size
            rows = slice(first, first + count)
            gradient_sync([self.model], last=True)
            loss = self.model(ids[rows], labels_BT=labels[rows], loss_fn=sum_loss).loss_sum / 40
            loss.backward()
            self.optimizers.step()
            self.optimizers.zero_grad()
            losses.append(all_reduce_sum(loss.detach(), self.dims.loss_group).item())
            self.dataloader.value += 1
            self.lr_schedulers.value += 2
            self.train_state.value += 3
        return losses

    def draws(self) -> tuple[float, float, float]:
        """The next number of every random generator."""
        return torch.rand(()).item(), random.random(), float(np.random.rand())

    def tensors(self) -> dict[str, torch.Tensor]:
        """Whole weights and optimizer state. A collective."""
        named = {**self.model.state_dict(), **self.optimizers.state_dict()}
        return {name: whole(value).clone() for name, value in named.items() if isinstance(value, torch.Tensor)}
