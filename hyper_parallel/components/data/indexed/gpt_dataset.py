"""The samples that Megatron-LM trains GPT on, from one pair or a blend of several."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex

import numpy as np
import numpy.typing as npt

from hyper_parallel.components.data.indexed.blend import Blend, BlendSpec, blend_order, places_within, samples_to_build
from hyper_parallel.components.data.indexed.index_cache import cached_arrays, digest_of
from hyper_parallel.components.data.indexed.indexed_dataset import IndexedDataset
from hyper_parallel.components.data.indexed.sample_indices import SampleIndices, SamplePlan
from hyper_parallel.config.errors import ConfigError, Fault, RunError, raise_faults

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

SPLITS = {"train": 0, "valid": 1, "validation": 1, "test": 2}
"""Name of a split to its place in ``"98,1,1"``."""

_IGNORE_INDEX = -100


class TokenIdError(RunError):
    """The data holds a token id that the model has no embedding for."""


class _Member(NamedTuple):
    dataset: IndexedDataset
    plan: SamplePlan
    indices: SampleIndices


class GPTDataset:
    """Samples of `seq_len` tokens in a fixed, shuffled order: ``dataset[k]`` is a dict of tensors [seq_len].

    - ``input_ids``, ``labels``: int64; the labels are aligned with the logits (already shifted), -100 where no loss is
    - ``position_ids``: int64, from 0
    - ``segment_starts``: bool, True where tokens begin to attend only to those from there on; only with
      `reset_attention_mask`

    Samples, their order and their number equal those of Megatron-LM's GPTDataset (in a blend, BlendedDataset) for the
    same arguments. `num_samples` is the least number of samples: a single pair gives whole epochs, so often more.
    The indices are kept in a cache and mapped, so that memory does not grow with the data.
    """

    def __init__(
        self,
        prefix: BlendSpec,
        *,
        seq_len: int,
        seed: int,
        split: str,
        split_name: str,
        num_samples: int | None = None,
        eod_token_id: int,
        pad_token_id: int,
        reset_position_ids: bool = False,
        reset_attention_mask: bool = False,
        eod_mask_loss: bool = False,
        drop_last: bool = True,
        vocab_size: int | None = None,
        cache_folder: str | Path | None = None,
    ) -> None:
        """Opens the data and builds the indices, or finds them in the cache.

        Args:
            prefix: of one pair, or a blend: ``"0.7 one 0.3 other"``, ``"one other"`` (all of each), a list of pairs
            split: shares of the sequences for train, valid and test, as ``"98,1,1"``; cut in the order of the file
            split_name: which share: train, valid (or validation) or test
            num_samples: samples needed at least; None: one epoch. Weights need a number.
            eod_token_id: ends a document; the three flags below act after each of them
            pad_token_id: fills the last sample without `drop_last`; -1: no such token, 0 stands there
            reset_position_ids: positions begin at 0 after each end of document
            reset_attention_mask: so does attention
            eod_mask_loss: what follows an end of document is not trained
            drop_last: leave out a last sample with fewer tokens; else it is padded, without loss
            vocab_size: refuse token ids from here on, when they are read; None: do not look
            cache_folder: of the indices; None: ``PREFIX.cache``, of the first pair in a blend

        Raises:
            ConfigError: an argument is out of range, the data cannot be read, or the split is too small for a sample.
            TokenIdError: a sample that is read holds an id that is not in the vocabulary.
        """
        self._arguments = {name: value for name, value in locals().items() if name != "self"}
        bounds = _split_bounds(split, split_name)
        raise_faults(_argument_faults(seq_len, seed, num_samples, eod_token_id, pad_token_id, vocab_size))
        blend = Blend.parse(prefix)
        if blend.weights is not None and num_samples is None:
            raise ConfigError.one(
                "num_samples", f"None, but the prefix {prefix!r} has weights", "say how many samples are needed"
            )
        self._seq_len, self._vocab_size = seq_len, vocab_size
        self._eod_token_id, self._pad_token_id = eod_token_id, max(pad_token_id, 0)
        self._reset_position_ids, self._reset_attention_mask = reset_position_ids, reset_attention_mask
        self._eod_mask_loss = eod_mask_loss
        self._positions = np.arange(seq_len)

        datasets = [IndexedDataset(name) for name in blend.prefixes]
        folders = [Path(f"{name}.cache" if cache_folder is None else cache_folder) for name in blend.prefixes]
        self._order: npt.NDArray[np.int16] | None = None
        of_each: list[int | None] = [num_samples if len(datasets) == 1 else None] * len(datasets)
        if blend.weights is not None:
            taken = blend.samples_of_each(num_samples or 0)
            self._order, self._places = _blended(folders[0], blend.weights, None, sum(taken))
            of_each = list(map(samples_to_build, taken, np.bincount(self._order, minlength=len(datasets)).tolist()))
        self._members = []
        for dataset, folder, wanted in zip(datasets, folders, of_each, strict=True):
            count = len(dataset.sequence_lengths)
            first, last = (round(bound * count) for bound in bounds)
            plan = SamplePlan.of(
                dataset.sequence_lengths,
                first,
                last,
                seq_len=seq_len,
                seed=seed,
                num_samples=wanted,
                drop_last=drop_last,
            )
            _check_split(dataset, plan, split, split_name)
            self._members.append(_Member(dataset, plan, _indices(folder, dataset, plan)))
        weights = blend.weights
        if weights is None and len(datasets) > 1:
            sizes = [member.plan.num_samples for member in self._members]
            weights = [size / sum(sizes) for size in sizes]
            self._order, self._places = _blended(folders[0], weights, sizes, min(sum(sizes), num_samples or sum(sizes)))
        members = [_key(member.dataset, member.plan) for member in self._members]
        self.fingerprint = digest_of({"members": members, "weights": weights})
        """Of the data and of all that shapes the samples' order: with the same one, sample k is the same tokens."""

    def __len__(self) -> int:
        """The number of samples, at least `num_samples`."""
        return self._members[0].plan.num_samples if self._order is None else len(self._order)

    def __getitem__(self, sample: SupportsIndex) -> dict[str, torch.Tensor]:
        """Sample `sample` of the shuffled order.

        Raises:
            IndexError: there is no such sample.
            TokenIdError: it holds a token id that is not in the vocabulary.
        """
        import torch

        number = operator.index(sample)
        if number < 0:
            number += len(self)
        if not 0 <= number < len(self):
            raise IndexError(f"sample {operator.index(sample)} of {len(self)}")
        ids, real = self._read(number)
        input_ids, labels = ids[:-1], ids[1:].copy()
        if real < len(ids):  # padding is known by length: the pad id may be a token of its own right
            labels[max(real - 1, 0) :] = _IGNORE_INDEX
        positions = self._positions.copy()
        item = {"input_ids": input_ids, "labels": labels, "position_ids": positions}
        if self._eod_mask_loss or self._reset_position_ids or self._reset_attention_mask:
            is_end = input_ids == self._eod_token_id
            is_end[real:] = False
            if self._eod_mask_loss:
                labels[is_end] = _IGNORE_INDEX
            starts = np.concatenate(([True], is_end[:-1]))
            if self._reset_position_ids:
                positions -= np.maximum.accumulate(np.where(starts, positions, 0))
            if self._reset_attention_mask:
                item["segment_starts"] = starts
        return {name: torch.from_numpy(values) for name, values in item.items()}

    def __reduce__(self) -> Any:
        # A worker process maps the files itself, instead of getting a copy of the indices.
        return functools.partial(type(self), **self._arguments), ()

    def _read(self, sample: int) -> tuple[npt.NDArray[np.int64], int]:
        """([seq_len + 1] token ids, how many of them are real)."""
        if self._order is None:
            member = self._members[0]
        else:
            member, sample = self._members[self._order[sample]], self._places[sample]
        dataset, (document_index, sample_index, shuffle_index) = member.dataset, member.indices
        (first, begin), (last, end) = sample_index[(window := int(shuffle_index[sample])) : window + 2].tolist()
        ids = np.empty(self._seq_len + 1, np.int64)
        real = 0
        for place in range(first, last + 1):
            part = dataset.sequence(document_index[place])
            part = part[begin if place == first else 0 : end + 1 if place == last else None]
            ids[real : real + len(part)] = part
            real += len(part)
        ids[real:] = self._pad_token_id
        if self._vocab_size is not None and not 0 <= ids.min() <= ids.max() < self._vocab_size:
            wrong = ids[(ids < 0) | (ids >= self._vocab_size)][0]
            raise TokenIdError(
                f"{dataset.prefix}.bin: token id {wrong} in sample {sample}, but the vocabulary has "
                f"{self._vocab_size} entries; prepare the data with this model's tokenizer"
            )
        return ids, real


def _blended(
    folder: Path, weights: list[float], limits: list[int] | None, size: int
) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]:
    """(the data set that each sample comes from, which of its samples it is)."""

    def build() -> dict[str, npt.NDArray[Any]]:
        order = blend_order(weights, limits, size)
        return {"dataset_index": order, "dataset_sample_index": places_within(order, len(weights))}

    key = {"kind": "blend", "weights": weights, "limits": limits, "size": size}
    arrays = cached_arrays(folder, key, build)
    return arrays["dataset_index"], arrays["dataset_sample_index"]


def _indices(folder: Path, dataset: IndexedDataset, plan: SamplePlan) -> SampleIndices:
    def build() -> dict[str, npt.NDArray[Any]]:
        logger.info("%s: building the index of %s samples", dataset.prefix, f"{plan.num_samples:,}")
        return plan.build(dataset.sequence_lengths)._asdict()

    return SampleIndices(**cached_arrays(folder, _key(dataset, plan), build))


def _key(dataset: IndexedDataset, plan: SamplePlan) -> dict[str, Any]:
    return {"kind": "gpt", "data": dataset.fingerprint, **dataclasses.asdict(plan)}


def _split_bounds(split: str, name: str) -> tuple[float, float]:
    """Where the split begins and ends, as shares of the whole."""
    remedy = 'give up to three shares, for train, valid and test, as "98,1,1"'
    if name not in SPLITS:
        raise ConfigError.one("split_name", f"{name!r} is no split", f"choose one of {', '.join(SPLITS)}")
    try:
        shares = [float(share) for share in split.split(",")]
    except ValueError as error:
        raise ConfigError.one("split", f"{split!r} is no list of numbers", remedy) from error
    if len(shares) > 3 or not all(0 <= share < np.inf for share in shares) or sum(shares) == 0:
        raise ConfigError.one("split", f"{split!r} has too many shares, or one that is not positive", remedy)
    padded = np.array(shares + [0.0] * (3 - len(shares)))
    bounds = [0.0, *itertools.accumulate((padded / padded.sum()).tolist())]
    place = SPLITS[name]
    if bounds[place] == bounds[place + 1]:
        raise ConfigError.one("split", f"{split!r} leaves nothing for {name}", "give it a share, or use another split")
    return bounds[place], bounds[place + 1]


def _argument_faults(
    seq_len: int, seed: int, num_samples: int | None, eod_token_id: int, pad_token_id: int, vocab_size: int | None
) -> Iterator[Fault]:
    for name, value, least, most in (
        ("seq_len", seq_len, 1, 2**31 - 2),
        ("seed", seed, 0, 2**32 - 1),
        ("num_samples", num_samples, 1, 2**62),
        ("eod_token_id", eod_token_id, 0, (vocab_size or 2**31) - 1),
        ("pad_token_id", pad_token_id, -1, (vocab_size or 2**31) - 1),
    ):
        if value is not None and not least <= value <= most:
            yield Fault(name, f"{value} is out of range", f"give a number from {least} to {most}")


def _check_split(dataset: IndexedDataset, plan: SamplePlan, split: str, name: str) -> None:
    if plan.num_samples == 0:
        raise ConfigError.one(
            dataset.prefix,
            f"split {name} of {split!r} has {plan.last - plan.first} of the {len(dataset.sequence_lengths)} sequences "
            f"and {plan.tokens} tokens, and one sample takes seq_len + 1 = {plan.seq_len + 1}",
            "give more data, a larger share or a smaller seq_len",
        )
