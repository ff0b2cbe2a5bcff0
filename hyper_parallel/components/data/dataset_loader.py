"""build_dataloader: from a dataset and a collate_fn to a loader whose items are the micro-batches of one step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

from hyper_parallel.components.data.step_sampler import StepBatchSampler
from hyper_parallel.components.data.worker_processes import worker_options
from hyper_parallel.config.errors import ConfigError
from hyper_parallel.platform import get_platform

PREFETCH_STEPS = 2
"""Steps that the background thread reads ahead."""


def build_dataloader(
    dataset: Any,
    collate_fn: Callable[[list[Any]], list[dict[str, Any]]],
    batch_size: int,
    batch_sampler: StepBatchSampler | None = None,
    *,
    shuffle: bool = True,
    drop_last: bool = True,
    num_workers: int = 0,
    use_background_prefetcher: bool = True,
) -> DataLoader[list[dict[str, Any]]]:
    """A torch DataLoader of `dataset`.

    Args:
        dataset: with `__getitem__` and `__len__`; or iterable, when it gives each rank the rows of its own.
        collate_fn: from the samples of a step to its micro-batches.
        batch_size: rows of one step on this rank.
        batch_sampler: which rows those are. None: the dataset is iterable.
        shuffle: another order in each epoch, from training.seed.
        drop_last: leave out the rows that do not fill a step at the end of an epoch.
        num_workers: processes that read.
        use_background_prefetcher: let a thread read ahead of training.

    Raises:
        ConfigError: drop_last is False where rows would be left, or an iterable dataset is to be shuffled.
    """
    if batch_sampler is None and shuffle:
        fact = f"True, but {type(dataset).__name__} has no length, so it gives rows in its own order"
        raise ConfigError.one("dataloader.shuffle", fact, "set False, and shuffle in the dataset")
    if batch_sampler is not None:
        left = batch_sampler.rows - len(batch_sampler) * batch_sampler.global_batch_size
        if left and not drop_last:
            fact = f"False, but {left} of {batch_sampler.rows} rows do not fill a step at the end of an epoch"
            raise ConfigError.one("dataloader.drop_last", fact, "set True, or give rows that fill all steps")
        batch_sampler.shuffle = shuffle
    chosen = {"batch_sampler": batch_sampler} if batch_sampler is not None else {"batch_size": batch_size}
    loader = DataLoader(
        dataset,
        collate_fn=collate_fn,
        pin_memory=get_platform().pin_memory,
        drop_last=batch_sampler is None and drop_last,
        **chosen,  # type: ignore[arg-type]
        **worker_options(num_workers, PREFETCH_STEPS),
    )
    loader.prefetch_steps = PREFETCH_STEPS if use_background_prefetcher else 0  # type: ignore[attr-defined]
    return loader
