"""Micro-batches in Hugging Face's manner: shifted once, and refused where they would train something else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hyper_parallel.components.data import MakeMicroBatchCollator, StepBatchSampler
from hyper_parallel.components.data.causal_batch import BatchError, causal_batch
from hyper_parallel.config.errors import ConfigError, RunError


def made(**fields: Any) -> dict[str, Any]:
    return causal_batch({name: torch.tensor(value) for name, value in fields.items()}, seq_len=8, vocab_size=10)


def test_labels_are_shifted_once() -> None:
    """A prompt of three tokens, an answer of two, and EOS: three targets are trained."""
    ids, labels = [[1, 2, 3, 4, 5, 6]], [[-100, -100, -100, 4, 5, 6]]
    aligned = [[-100, -100, 4, 5, 6, -100]]
    batch = made(input_ids=ids, labels=labels)
    assert batch["labels"].tolist() == aligned
    assert int((batch["labels"] != -100).sum()) == 3
    assert made(input_ids=ids, shift_labels=aligned)["labels"].tolist() == aligned
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5]] and batch["cu_seqlens"] == [0, 6]


def test_a_loss_mask_is_shifted_as_its_labels() -> None:
    ids = [[1, 2, 3, 4]]
    assert made(input_ids=ids, labels=ids, loss_mask=[[1, 0, 1, 1]])["labels"].tolist() == [[-100, 3, 4, -100]]
    shifted = made(input_ids=ids, shift_labels=[[2, 3, 4, 5]], loss_mask=[[1, 0, 1, 1]])
    assert shifted["labels"].tolist() == [[2, -100, 4, 5]]


def test_positions_tell_documents() -> None:
    batch = made(
        input_ids=[[1, 2, 3, 4], [5, 6, 7, 8]], labels=[[1] * 4] * 2, position_ids=[[0, 1, 0, 1], [0, 1, 2, 3]]
    )
    assert batch["cu_seqlens"] == [0, 2, 4, 8]


def test_rows_may_be_padded_behind_their_end() -> None:
    batch = made(input_ids=[[5, 0, 6, 0]], labels=[[5, 0, 6, -100]], attention_mask=[[1, 1, 1, 0]])
    assert batch["labels"].tolist() == [[0, 6, -100, -100]]  # the id 0 within the row is no padding


IDS = [[1, 2, 3, 4]]
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no labels": ({"input_ids": IDS}, r"a micro-batch has input_ids; it needs input_ids, and either labels \(not sh"),
    "both labels": ({"input_ids": IDS, "labels": IDS, "shift_labels": IDS}, "and either labels"),
    "unknown": (
        {"input_ids": IDS, "labels": IDS, "pixels": IDS},
        "has pixels, which no model here takes; leave it out",
    ),
    "one row": ({"input_ids": [1], "labels": [1]}, r"input_ids are \[1\], not \[rows, tokens\] of at most .*seq_len 8"),
    "too long": ({"input_ids": [[1] * 9], "labels": [[1] * 9]}, r"input_ids are \[1, 9\], not"),
    "shapes": ({"input_ids": IDS, "labels": [[1, 2]]}, r"labels \[1, 2\]: not of the shape of input_ids, \[1, 4\]"),
    "ids": ({"input_ids": [[1, 10]], "labels": [[1, 1]]}, r"input_ids go from 1 to 10, but the ids of the tok.* to 9"),
    "label": ({"input_ids": [[1, 1]], "labels": [[1, -1]]}, "labels go from -1 to -1, but the ids"),
    "left": (
        {"input_ids": IDS, "labels": IDS, "attention_mask": [[0, 1, 1, 1]]},
        "attention_mask is 0 in front of tokens: pad behind the end of rows",
    ),
    "trained padding": (
        {"input_ids": IDS, "labels": IDS, "attention_mask": [[1, 1, 0, 0]]},
        "1 labels are to be trained where attention_mask is 0: set them to -100",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_micro_batch_is_refused(name: str) -> None:
    fields, message = REFUSED[name]
    with pytest.raises(BatchError, match=message):
        made(**fields)


def test_rows_that_sequence_parallelism_cannot_split_are_refused() -> None:
    rows = {"input_ids": torch.ones(1, 6), "labels": torch.ones(1, 6)}
    assert causal_batch(rows, seq_len=8, vocab_size=10, row_parts=2)["input_ids"].shape == (1, 6)
    with pytest.raises(BatchError) as error:
        causal_batch(rows, seq_len=8, vocab_size=10, row_parts=4)
    assert str(error.value) == (
        "input_ids are [1, 6]: 6 tokens are not a multiple of parallelism.tp 4, and sequence_parallel splits every row"
        "; pad them in dataset or collate_fn"
    )


def test_rows_of_a_step_are_the_same_on_every_number_of_ranks() -> None:
    def steps(dp_size: int, epoch: int = 0, **sizes: int) -> list[list[int]]:
        arguments = {"micro_batch_size": 1, "global_batch_size": 4, "seed": 42} | sizes
        samplers = [StepBatchSampler(10, dp_rank=rank, dp_size=dp_size, **arguments) for rank in range(dp_size)]
        for sampler in samplers:
            sampler.go_to(epoch, 0)
        assert {len(sampler) for sampler in samplers} == {2}
        return [sorted(row for own in step for row in own) for step in zip(*samplers, strict=True)]

    alone = steps(1)
    assert steps(2) == steps(4) == steps(2, micro_batch_size=2) == alone
    assert len({row for step in alone for row in step}) == 8
    assert steps(1, epoch=1) != alone != steps(1, seed=43)
    sampler = StepBatchSampler(10, micro_batch_size=1, global_batch_size=4, dp_rank=1, dp_size=2, seed=0)
    sampler.shuffle = False
    assert list(sampler) == [[1, 3], [5, 7]]
    sampler.go_to(3, 1)
    assert list(sampler) == [[5, 7]]
    with pytest.raises(ConfigError, match=r"dataset: it has 3 rows, fewer than training.global_batch_size 4"):
        StepBatchSampler(3, micro_batch_size=1, global_batch_size=4, dp_rank=0, dp_size=1, seed=0)


def test_samples_are_stacked_into_micro_batches() -> None:
    samples = [{"input_ids": torch.tensor([i, i + 1])} for i in range(4)]
    batches = MakeMicroBatchCollator(2)(samples)
    assert [batch["input_ids"].tolist() for batch in batches] == [[[0, 1], [1, 2]], [[2, 3], [3, 4]]]
    with pytest.raises(RunError, match="4 samples of a step do not divide into 3 micro-batches"):
        MakeMicroBatchCollator(3)(samples)
    with pytest.raises(RunError, match=r"samples cannot be stacked .* input_ids of 2; input_ids of 1; .* that pads"):
        MakeMicroBatchCollator(1)([samples[0], {"input_ids": torch.tensor([1])}])
    with pytest.raises(ConfigError, match="num_micro_batch: 0 is below 1"):
        MakeMicroBatchCollator(0)
