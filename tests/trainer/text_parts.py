"""Parts of a run as users write them, chosen by `_target_` from outside the package."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from hyper_parallel.models.auto import HyperAutoModelForCausalLM
from tests.models.auto.folders import FAMILIES


class ScaledModelOutputLoss(torch.nn.Module):
    """The one that the development guide shows."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale

    def forward(
        self,
        *,
        model_output: Any,
        labels: torch.Tensor | None,
    ) -> torch.Tensor:
        del labels
        return model_output.loss * self.scale


class SGDOptimizer:
    """The one that the development guide shows."""

    def __init__(self, lr: float, *, model: torch.nn.Module) -> None:
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr)

    def get_optimizer(self) -> torch.optim.Optimizer:
        return self.optimizer


class ShiftingLoss(nn.Module):
    """Cross entropy as transformers' own models compute it, from logits and labels that are not shifted."""

    def forward(self, *, model_output: Any, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits, targets = model_output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return {"cross_entropy": nn.functional.cross_entropy(logits, targets)}


class TrainedLoss(nn.Module):
    """A loss that would have to be trained."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, *, model_output: Any, labels: torch.Tensor) -> torch.Tensor:
        return model_output.loss * self.temperature


class LossByToken(nn.Module):
    """A vector where a number must be."""

    def forward(self, *, model_output: Any, labels: torch.Tensor) -> torch.Tensor:
        return model_output.logits.sum(-1)


class LossOfNumbers(nn.Module):
    """Numbers where tensors must be."""

    def forward(self, *, model_output: Any, labels: torch.Tensor) -> dict[str, Any]:
        return {"cross_entropy": 1.0, "other": model_output.loss}


class LossOfOne(nn.Module):
    """1, even where nothing is trained."""

    def forward(self, *, model_output: Any, labels: torch.Tensor) -> torch.Tensor:
        return model_output.loss + 1.0


def no_loss() -> float:
    return 1.0


def number():  # type: ignore[no-untyped-def]  # so that it can stand in any slot of a file
    return 1.0


def strange_optimizer(lr: float = 0.1) -> torch.optim.Optimizer:
    """It trains a weight of its own."""
    return torch.optim.SGD([nn.Parameter(torch.ones(()))], lr=lr)


def a_tenth_less_each_step(optimizer: torch.optim.Optimizer, train_iters: int) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step if step < train_iters else 0.0)


def on_plateau(optimizer: torch.optim.Optimizer, train_iters: int) -> Any:
    """Its step() takes the loss."""
    del train_iters
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)


class CountingDataset(torch.utils.data.Dataset):
    """Row i counts up from i."""

    def __init__(self, rows: int, *, training_config: Any) -> None:
        self.rows, self.seq_len = rows, training_config.seq_len

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(row, row + self.seq_len)
        return {"input_ids": ids, "labels": ids}


class CountingStream(IterableDataset):
    """The same rows, without a known number of them: rank r of n takes rows r, r + n, ..."""

    def __init__(self, rows: int, *, training_config: Any, mesh_context: Any) -> None:
        self.dataset = CountingDataset(rows, training_config=training_config)
        self.rank, self.ranks = mesh_context.dp_rank, mesh_context.dp_size

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        yield from (self.dataset[row] for row in range(self.rank, self.dataset.rows, self.ranks))


class LastTokenCollator:
    """Trains the last token of each row alone."""

    def __init__(self, num_micro_batch: int) -> None:
        self.num_micro_batch = num_micro_batch

    def __call__(self, samples: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
        ids_BT = torch.stack([sample["input_ids"] for sample in samples])
        labels_BT = torch.full_like(ids_BT, -100)
        labels_BT[:, -1] = ids_BT[:, -1]
        parts = zip(ids_BT.chunk(self.num_micro_batch), labels_BT.chunk(self.num_micro_batch), strict=True)
        return [{"input_ids": ids, "labels": labels} for ids, labels in parts]


def one_micro_batch(num_micro_batch: int) -> Any:
    """A collate function that does not do what it is asked for; and so are those behind it."""
    return lambda samples: {"input_ids": torch.stack([sample["input_ids"] for sample in samples])}


def no_micro_batch(num_micro_batch: int) -> Any:
    return lambda samples: []


def bare_micro_batches(num_micro_batch: int) -> Any:
    return lambda samples: [samples[i]["input_ids"] for i in range(num_micro_batch)]


def unlabelled_micro_batches(num_micro_batch: int) -> Any:
    return lambda samples: [{"input_ids": samples[i]["input_ids"][None]} for i in range(num_micro_batch)]


def masked_micro_batches(num_micro_batch: int) -> Any:
    """Nothing is trained."""
    ids = torch.arange(16)[None]
    return lambda samples: [{"input_ids": ids, "labels": torch.full_like(ids, -100)}] * num_micro_batch


def no_items(dataset: Any) -> list[Any]:
    """A dataloader without an item."""
    return []


def unlike_ranks(mesh_context: Any) -> list[list[dict[str, torch.Tensor]]]:
    """In the place of a dataset: 5 items on rank 0, 4 on the others."""
    ids = torch.arange(16)[None]
    return [[{"input_ids": ids, "labels": ids}]] * (4 + (mesh_context.dp_rank == 0))


def as_it_is(dataset: Any) -> Any:
    """A dataloader that has been built already."""
    return dataset


def a_linear_layer(distributed_setup: Any) -> nn.Module:
    """No language model."""
    return nn.Linear(2, 2)


def a_model_alone(vocab_size: int, *, training: Any) -> nn.Module:
    """One that is told of no ranks."""
    return a_model_of_its_own(vocab_size, training=training)


def a_model_of_its_own(vocab_size: int, *, training: Any, **runtime: Any) -> nn.Module:
    """One that is told of the ranks, and does not hand it on."""
    config_class, sizes = FAMILIES["llama"]
    return HyperAutoModelForCausalLM.from_config(config_class(vocab_size=vocab_size, **sizes), training=training)


def undecorated(module: nn.Module, module_fqn: str, context: Any) -> nn.Module:
    """No factory of replacements, since it does not say that it is one."""
    return module


GIVEN: dict[str, dict[str, Any]] = {}
"""What the parts below were given."""


def given_model(folder: str, **runtime: Any) -> nn.Module:
    GIVEN["model"] = runtime
    setup, training = runtime["distributed_setup"], runtime["training"]
    return HyperAutoModelForCausalLM.from_pretrained(folder, distributed_setup=setup, training=training)


def given_transform(**runtime: Any) -> Any:
    GIVEN["data_transform"] = runtime
    return runtime.get


def given_dataset(**runtime: Any) -> CountingDataset:
    GIVEN["dataset"] = runtime
    return CountingDataset(8, training_config=runtime["training_config"])


def given_loader(**runtime: Any) -> Any:
    GIVEN["dataloader"] = runtime
    return [[]]


def given_optimizer(**runtime: Any) -> torch.optim.Optimizer:
    GIVEN["optimizer"] = runtime
    return torch.optim.SGD(runtime["params"], lr=0.1)


def given_scheduler(**runtime: Any) -> Any:
    GIVEN["lr_scheduler"] = runtime
    return a_tenth_less_each_step(runtime["optimizer"], runtime["train_iters"])


class GivenLoss(nn.Module):
    def __init__(self, **runtime: Any) -> None:
        super().__init__()
        GIVEN["loss"] = runtime

    def forward(self, *, model_output: Any, labels: torch.Tensor) -> torch.Tensor:
        return model_output.loss
