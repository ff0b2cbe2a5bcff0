"""From a micro-batch in Hugging Face's manner, as users' datasets make them, to one of ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hyper_parallel.components.loss import IGNORE_INDEX
from hyper_parallel.config.errors import RunError

FIELDS = ("input_ids", "labels", "shift_labels", "loss_mask", "attention_mask", "position_ids")
"""What is known of a micro-batch."""


class BatchError(RunError):
    """What a dataset or collate_fn made is no micro-batch."""


def causal_batch(batch: Mapping[str, Any], *, seq_len: int, vocab_size: int, row_parts: int = 1) -> dict[str, Any]:
    """`batch` with labels aligned with the logits, as `collate.collate` gives it.

    Args:
        batch: `input_ids` [B, T] with T up to `seq_len`, and `labels`, which are not shifted: they are trained and
            counted as ``labels[:, 1:]``. Or `shift_labels`, aligned with the logits. It may have `loss_mask`, of the
            labels' shape, without which all are trained; `attention_mask`, 0 behind the end of rows; and
            `position_ids`, by which a 0 begins a document that attends within itself.
        row_parts: that sequence parallelism splits each row into.

    Raises:
        BatchError: something is missing, unknown, or of the wrong size.
    """
    if not isinstance(batch, Mapping):
        raise BatchError(
            f"a micro-batch is a {type(batch).__name__}, not a dict; let collate_fn return a list of dicts"
        )
    fields = ", ".join(map(str, batch)) or "nothing"
    if "input_ids" not in batch or ("labels" in batch) == ("shift_labels" in batch):
        raise BatchError(
            f"a micro-batch has {fields}; it needs input_ids, and either labels (not shifted) or shift_labels (aligned "
            "with the logits)"
        )
    if unknown := [str(name) for name in batch if name not in FIELDS]:
        raise BatchError(
            f"a micro-batch has {', '.join(unknown)}, which no model here takes; leave it out in dataset or collate_fn "
            f"(known: {', '.join(FIELDS)})"
        )
    tensors = {name: torch.as_tensor(value) for name, value in batch.items()}
    ids_BT = tensors["input_ids"]
    if ids_BT.dim() != 2 or not 0 < ids_BT.shape[1] <= seq_len:
        shape = list(ids_BT.shape)
        raise BatchError(f"input_ids are {shape}, not [rows, tokens] of at most training.seq_len {seq_len} tokens")
    if ids_BT.shape[1] % row_parts:
        raise BatchError(
            f"input_ids are {list(ids_BT.shape)}: {ids_BT.shape[1]} tokens are not a multiple of parallelism.tp "
            f"{row_parts}, and sequence_parallel splits every row; pad them in dataset or collate_fn"
        )
    if sizes := {name: list(x.shape) for name, x in tensors.items() if x.shape != ids_BT.shape}:
        told = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise BatchError(f"{told}: not of the shape of input_ids, {list(ids_BT.shape)}")
    labels_BT = _aligned_labels(tensors)
    ids_BT = ids_BT.to(torch.int64)
    for name, values in (("input_ids", ids_BT), ("labels", labels_BT[labels_BT != IGNORE_INDEX])):
        if values.numel() and not 0 <= int(values.min()) <= int(values.max()) < vocab_size:
            raise BatchError(
                f"{name} go from {int(values.min())} to {int(values.max())}, but the ids of the tokenizer from 0 to "
                f"{vocab_size - 1}; give the tokenizer that made the ids"
            )
    if "attention_mask" in tensors:
        _check_padding(tensors["attention_mask"], labels_BT)
    positions_BT = tensors.get("position_ids", torch.arange(ids_BT.shape[1]).expand(ids_BT.shape)).to(torch.int64)
    starts_BT = positions_BT == 0
    starts_BT[:, 0] = True
    return {
        "input_ids": ids_BT,
        "labels": labels_BT,
        "position_ids": positions_BT.contiguous(),
        "cu_seqlens": [*starts_BT.flatten().nonzero().flatten().tolist(), starts_BT.numel()],
    }


def _aligned_labels(tensors: Mapping[str, Tensor]) -> Tensor:
    shifted = "shift_labels" in tensors
    labels_BT = tensors["shift_labels" if shifted else "labels"].to(torch.int64)
    if "loss_mask" in tensors:
        labels_BT = labels_BT.where(tensors["loss_mask"].bool(), IGNORE_INDEX)
    if shifted:
        return labels_BT
    return torch.cat([labels_BT[:, 1:], torch.full_like(labels_BT[:, :1], IGNORE_INDEX)], dim=1)


def _check_padding(mask_BT: Tensor, labels_BT: Tensor) -> None:
    """Attention here is causal, so what lies behind the end of a row is seen by nothing that is trained."""
    kept_BT = mask_BT.bool()
    if bool((kept_BT[:, 1:] & ~kept_BT[:, :-1]).any()):
        raise BatchError("attention_mask is 0 in front of tokens: pad behind the end of rows")
    if trained := int(((labels_BT != IGNORE_INDEX) & ~kept_BT).sum()):
        raise BatchError(f"{trained} labels are to be trained where attention_mask is 0: set them to {IGNORE_INDEX}")
