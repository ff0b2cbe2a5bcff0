"""Rows as Megatron-LM cuts and orders them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hyper_parallel.components.data.indexed import GPTDataset
from hyper_parallel.components.data.packing import PackedRows


class GPTRows:
    """An endless sequence of rows: the samples of a GPTDataset, whose seed grows by one from epoch to epoch.

    So the first epoch has Megatron-LM's samples in its order for one epoch of the same seed. With `document_mask` the
    end of a document resets positions and attention, and what follows it is not trained; without, rows are what
    Megatron-LM makes of them by default.
    """

    def __init__(
        self,
        prefixes: Sequence[str],
        weights: Sequence[float] | None,
        *,
        seq_len: int,
        seed: int,
        eod_token_id: int,
        pad_token_id: int,
        vocab_size: int,
        document_mask: bool,
    ) -> None:
        """Opens the pairs, and builds the order of the first epoch or finds it beside them.

        Args:
            weights: share of each pair in the samples; None: all of each once an epoch.

        Raises:
            ConfigError: a pair cannot be read, or is too small for a sample.
        """
        self._seed = seed
        self._arguments = {
            "seq_len": seq_len,
            "split": "1,0,0",
            "split_name": "train",
            "eod_token_id": eod_token_id,
            "pad_token_id": pad_token_id,
            "vocab_size": vocab_size,
            "reset_position_ids": document_mask,
            "reset_attention_mask": document_mask,
            "eod_mask_loss": document_mask,
        }
        self._blend: str | list[str] = prefixes[0] if len(prefixes) == 1 else list(prefixes)
        if weights is not None and len(prefixes) > 1:
            whole = sum(len(self._dataset(prefix, 0)) for prefix in prefixes)
            self._blend = [word for pair in zip(map(str, weights), prefixes, strict=True) for word in pair]
            self._arguments["num_samples"] = whole
        self._epoch = (0, self._dataset(self._blend, 0))
        self.rows_per_epoch = len(self._epoch[1])
        self.fingerprint: str = self._epoch[1].fingerprint
        """Of the pairs, and of what shapes the order."""

    def take(self, samples_B: npt.NDArray[np.int64]) -> PackedRows:
        """The rows of the given samples, which may lie in several epochs."""
        items = []
        for epoch, place in zip(*map(np.ndarray.tolist, np.divmod(samples_B, self.rows_per_epoch)), strict=True):
            if self._epoch[0] != epoch:
                self._epoch = (epoch, self._dataset(self._blend, epoch))
            items.append(self._epoch[1][place])
        input_ids_BT, labels_BT = (np.stack([item[name].numpy() for item in items]) for name in ("input_ids", "labels"))
        if "segment_starts" in items[0]:
            starts_BT = np.stack([item["segment_starts"].numpy() for item in items])
        else:
            starts_BT = np.broadcast_to(np.arange(input_ids_BT.shape[1]) == 0, input_ids_BT.shape)
        return PackedRows(input_ids_BT, labels_BT, starts_BT)

    def _dataset(self, blend: str | list[str], epoch: int) -> GPTDataset:
        return GPTDataset(blend, seed=self._seed + epoch, **self._arguments)  # type: ignore[arg-type]
