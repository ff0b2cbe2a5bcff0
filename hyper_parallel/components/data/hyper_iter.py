"""HyperIter: any loader of micro-batches as an endless iterator with an exact position."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader

from hyper_parallel.components.data.causal_batch import BatchError, causal_batch
from hyper_parallel.components.data.loader import BaseDataLoader
from hyper_parallel.components.data.prefetch import BackgroundPrefetcher
from hyper_parallel.components.data.step_sampler import StepBatchSampler
from hyper_parallel.components.data.steps import MicroBatches
from hyper_parallel.components.data.worker_processes import iterate
from hyper_parallel.config.errors import Fault, raise_faults


class HyperIter(BaseDataLoader):
    """One pass after the other over `loader`, whose items are the micro-batches of one step on this rank.

    A loader of `sampler` begins where it is told to; of any other, what is behind the position is read and dropped.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        sampler: StepBatchSampler | None,
        steps_per_epoch: int | None,
        global_batch_size: int,
        micro_batches: int,
        seq_len: int,
        vocab_size: int,
        row_parts: int = 1,
    ) -> None:
        """
        Args:
            loader: each `iter` of it is an epoch. It may have `prefetch_steps`, which are read ahead by a thread.
            sampler: what the loader may have been made with.
            steps_per_epoch: the same on all ranks: what one of them has beyond is left out. None: unknown.
            micro_batches: in each item.
            row_parts: that sequence parallelism splits each row into.
        """
        self._loader, self._micro_batches = loader, micro_batches
        self._sampler = sampler if getattr(loader, "batch_sampler", None) is sampler else None
        self._sizes = {"seq_len": seq_len, "vocab_size": vocab_size, "row_parts": row_parts}
        self._steps_per_epoch, self._global_batch_size = steps_per_epoch, global_batch_size
        self._epoch = self._step = 0
        self._items: Iterator[tuple[MicroBatches, int, int]] | None = None

    @property
    def rows_per_epoch(self) -> int | None:
        return None if self._steps_per_epoch is None else self._steps_per_epoch * self._global_batch_size

    def __next__(self) -> MicroBatches:
        """
        Raises:
            BatchError: an item is no list of micro-batches, or an epoch has none.
        """
        if self._items is None:
            items, ahead = self._read(), getattr(self._loader, "prefetch_steps", 0)
            self._items = BackgroundPrefetcher(items, ahead) if ahead else items
        item, self._epoch, self._step = next(self._items)
        return item

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self._epoch,
            "step": self._step,
            "training.global_batch_size": self._global_batch_size,
            "dataset": None if self._steps_per_epoch is None else f"{self._steps_per_epoch} steps an epoch",
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to the position of `state`.

        Raises:
            ConfigError: it belongs to another number of rows in a step or an epoch.
        """
        now = self.state_dict()
        raise_faults(
            Fault(name, f"{now[name]} here, but the position was saved with {state.get(name)}", "resume with the same")
            for name in ("training.global_batch_size", "dataset")
            if state.get(name) != now[name]
        )
        self.close()
        self._epoch, self._step = state["epoch"], state["step"]

    def close(self) -> None:
        if isinstance(self._items, BackgroundPrefetcher):
            self._items.close()
        self._items = None

    def _read(self) -> Iterator[tuple[MicroBatches, int, int]]:
        """(item, epoch and step of the position behind it) from the present position on, without end."""
        epoch, step = self._epoch, self._step
        while True:
            if step == self._steps_per_epoch:
                epoch, step = epoch + 1, 0
            begin = step
            if self._sampler is not None:
                self._sampler.go_to(epoch, begin)
                items = self._open()
            else:
                items = islice(self._open(), begin, None)
            for item in items:
                step += 1
                yield self._checked(item), epoch, step
                if step == self._steps_per_epoch:
                    break
            if step == begin:
                raise BatchError(f"the dataloader gives no item in epoch {epoch}; give more data, or fewer ranks")
            epoch, step = epoch + 1, 0

    def _open(self) -> Iterator[Any]:
        return iterate(self._loader) if isinstance(self._loader, DataLoader) else iter(self._loader)

    def _checked(self, item: Any) -> MicroBatches:
        if not isinstance(item, list) or len(item) != self._micro_batches:
            size = f" of {len(item)}" if isinstance(item, list) else ""
            raise BatchError(
                f"an item of the dataloader is a {type(item).__name__}{size}; it must be a list of the "
                f"{self._micro_batches} micro-batches of a step, each a dict; let collate_fn make it"
            )
        return [causal_batch(batch, **self._sizes) for batch in item]
