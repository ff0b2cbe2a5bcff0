"""Which rows of a dataset are in each step of an epoch, and which of those are this rank's."""

from __future__ import annotations

from collections.abc import Iterator

from torch.utils.data import Sampler

from hyper_parallel.components.data.order import epoch_permutation
from hyper_parallel.components.data.steps import rows_of_rank
from hyper_parallel.config.errors import ConfigError


class StepBatchSampler(Sampler[list[int]]):
    """Indices of one rank's rows, a list for each optimizer step from the present position to the end of the epoch.

    A rank has those of `rows_of_rank`: which rows a step trains on depends on no number of ranks.
    """

    def __init__(
        self, rows: int, *, micro_batch_size: int, global_batch_size: int, dp_rank: int, dp_size: int, seed: int
    ) -> None:
        """
        Raises:
            ConfigError: the dataset has fewer rows than one step takes.
        """
        if rows < global_batch_size:
            raise ConfigError.one(
                "dataset",
                f"it has {rows} rows, fewer than training.global_batch_size {global_batch_size}",
                "give more data, or a smaller global_batch_size",
            )
        self.rows = rows
        self.shuffle = True
        """Another order in each epoch, from the seed. False: that of the dataset."""
        self.epoch = self.first_step = 0
        self._seed = seed
        self.global_batch_size = global_batch_size
        self._own = rows_of_rank(micro_batch_size, global_batch_size, dp_rank, dp_size).flatten()

    def go_to(self, epoch: int, step: int) -> None:
        """What is iterated next begins with step `step` of `epoch`."""
        self.epoch, self.first_step = epoch, step

    def __len__(self) -> int:
        """Steps of an epoch. Rows that do not fill the last one are left out."""
        return self.rows // self.global_batch_size

    def __iter__(self) -> Iterator[list[int]]:
        order = epoch_permutation("rows", self.rows, self._seed if self.shuffle else None, self.epoch)
        for step in range(self.first_step, len(self)):
            yield order[step * self.global_batch_size + self._own].tolist()
