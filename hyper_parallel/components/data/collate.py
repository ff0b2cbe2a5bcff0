"""Packed rows to the tensors of a micro-batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hyper_parallel.components.data.packing import PackedRows


def collate(rows: PackedRows, document_mask: bool = True) -> dict[str, Any]:
    """One micro-batch of B rows of T tokens:

    - ``input_ids``, ``labels``, ``position_ids``: int64 [B, T]; positions count from 0 in each segment
    - ``cu_seqlens``: host integers, the ends of all segments over the B * T tokens: 0, ..., B * T

    Without `document_mask` a row is one segment as a whole; labels are the same.
    """
    starts_BT = rows.segment_starts_BT
    if not document_mask:
        starts_BT = np.broadcast_to(np.arange(starts_BT.shape[1]) == 0, starts_BT.shape)
    columns_T = np.arange(starts_BT.shape[1])
    position_ids_BT = columns_T - np.maximum.accumulate(np.where(starts_BT, columns_T, 0), axis=1)
    return {
        "input_ids": torch.from_numpy(rows.input_ids_BT),
        "labels": torch.from_numpy(rows.labels_BT),
        "position_ids": torch.from_numpy(position_ids_BT),
        "cu_seqlens": [*np.flatnonzero(starts_BT).tolist(), starts_BT.size],
    }
