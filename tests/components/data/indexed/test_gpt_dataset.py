from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from hyper_parallel.components.data.indexed import gpt_dataset
from hyper_parallel.components.data.indexed.gpt_dataset import TokenIdError
from hyper_parallel.config.errors import ConfigError
from tests.components.data.indexed.pairs import EOD, counted_documents, samples, windows, write_pair


def message_of(prefix, **options) -> str:
    with pytest.raises(ConfigError) as caught:
        samples(prefix, **options)
    return str(caught.value)


def test_samples_are_windows_of_the_documents(tmp_path):
    prefix = write_pair(tmp_path / "data", counted_documents([5, 7, 3]))
    dataset = samples(prefix)
    assert len(dataset) == 3
    (member,) = dataset._members
    order = member.indices.document_index
    flat = np.concatenate([member.dataset[d] for d in order]).tolist()
    assert sorted(windows(dataset)) == sorted(tuple(flat[4 * i : 4 * i + 5]) for i in range(3))
    item = dataset[0]
    assert torch.equal(item["input_ids"][1:], item["labels"][:-1])
    assert item["position_ids"].tolist() == [0, 1, 2, 3]
    assert {value.dtype for value in item.values()} == {torch.int64}
    assert torch.equal(dataset[-1]["labels"], dataset[2]["labels"])
    for number in (3, -4):
        with pytest.raises(IndexError, match=f"sample {number} of 3"):
            dataset[number]


def test_each_epoch_has_every_sequence_once(tmp_path):
    prefix = write_pair(tmp_path / "data", counted_documents([4] * 50))
    dataset = samples(prefix, num_samples=75)
    assert len(dataset) == 99  # (2 * 200 - 1) // 4: whole epochs
    inputs = torch.cat([item["input_ids"] for item in dataset])
    counts = torch.bincount(inputs, minlength=201)[1:]
    assert counts.sum() == 396
    assert counts.max() == 2


@pytest.mark.parametrize("seed", [1, 2])
def test_the_order_follows_the_seed_alone(tmp_path, seed):
    prefix = write_pair(tmp_path / "data", counted_documents([4] * 50))
    first = windows(samples(prefix, seed=seed))
    assert windows(samples(prefix, seed=seed, cache_folder=tmp_path / "other")) == first
    assert windows(samples(prefix, seed=3 - seed)) != first


def test_splits_are_disjoint_and_complete(tmp_path):
    prefix = write_pair(tmp_path / "data", counted_documents([5] * 40))
    parts = []
    for name, documents in (("train", 20), ("valid", 12), ("test", 8)):
        dataset = samples(prefix, split="50,30,20", split_name=name, drop_last=False)
        parts.append({int(token) for window in windows(dataset) for token in window if token > 0})
        assert len(parts[-1]) == 5 * documents
    assert set.union(*parts) == set(range(1, 201))
    by_other_name = samples(prefix, split="50,30,20", split_name="validation", drop_last=False)
    assert {token for window in windows(by_other_name) for token in window if token > 0} == parts[1]


def test_a_short_sample_is_padded_without_loss_by_its_length(tmp_path):
    # The pad id is a token of the data too: there it is trained.
    prefix = write_pair(tmp_path / "data", [[5, 3, 6, 3, 7, 8, 3]])
    dataset = samples(prefix, drop_last=False, pad_token_id=3)
    found = {tuple(item["input_ids"].tolist()): item["labels"].tolist() for item in dataset}
    assert found == {(5, 3, 6, 3): [3, 6, 3, 7], (7, 8, 3, 3): [8, 3, -100, -100]}
    filled = samples(prefix, drop_last=False, pad_token_id=-1)
    assert (7, 8, 3, 0) in {tuple(item["input_ids"].tolist()) for item in filled}


def test_no_sample_is_changed_by_another_that_was_read_before(tmp_path):
    prefix = write_pair(tmp_path / "data", counted_documents([31]))
    straight = [samples(prefix, drop_last=False)[k] for k in range(8)]
    dataset = samples(prefix, drop_last=False)
    short = next(k for k in range(8) if (straight[k]["labels"] == -100).any())
    spoiled = dataset[short]
    for values in spoiled.values():
        values.fill_(-7)
    for k in range(8):
        for name, values in dataset[k].items():
            assert torch.equal(values, straight[k][name])
    assert sum((item["labels"] == -100).any() for item in straight) == 1


def test_the_end_of_a_document_cuts_positions_attention_and_loss(tmp_path):
    prefix = write_pair(tmp_path / "data", [[5, 6, EOD, 7, EOD, EOD, 8, 9, 1]])
    item = samples(
        prefix, seq_len=8, reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True, pad_token_id=0
    )[0]
    assert item["input_ids"].tolist() == [5, 6, 0, 7, 0, 0, 8, 9]
    assert item["labels"].tolist() == [6, 0, -100, 0, -100, -100, 9, 1]
    assert item["position_ids"].tolist() == [0, 1, 2, 0, 1, 0, 0, 1]
    assert item["segment_starts"].tolist() == [True, False, False, True, False, True, True, False]
    assert "segment_starts" not in samples(prefix, seq_len=8)[0]


@pytest.mark.parametrize(("weights", "draws", "counts"), [((0.7, 0.3), 10, (7, 3)), ((0.999, 0.001), 20, (20, 1))])
def test_a_blend_draws_by_weight_and_again_from_the_cache(tmp_path, weights, draws, counts):
    one = write_pair(tmp_path / "one", counted_documents([5] * 20))
    two = write_pair(tmp_path / "two", counted_documents([5], first=500))  # one sample an epoch
    for _ in range(2):
        dataset = samples(f"{weights[0]} {one} {weights[1]} {two}", num_samples=draws)
        origins = [int(item["input_ids"][0]) >= 500 for item in dataset]
        assert (origins.count(False), origins.count(True)) == counts


def test_a_blend_without_weights_takes_each_sample_once(tmp_path):
    prefixes = [write_pair(tmp_path / str(i), counted_documents([9] * n, 1 + 300 * i)) for i, n in enumerate((4, 12))]
    both = samples(prefixes)
    assert sorted(windows(both)) == sorted(window for prefix in prefixes for window in windows(samples(prefix)))
    assert len(samples(prefixes, num_samples=10)) == 10
    assert len(samples(prefixes, num_samples=1000)) == len(both)


def test_other_data_at_the_same_place_are_not_read_with_the_old_index(tmp_path):
    prefix = write_pair(tmp_path / "data", counted_documents([9] * 10))
    assert len(samples(prefix)) == 22
    fingerprint = samples(prefix).fingerprint
    write_pair(tmp_path / "data", counted_documents([9] * 5))
    dataset = samples(prefix)
    assert len(windows(dataset)) == 11
    assert dataset.fingerprint != fingerprint


def test_all_that_shapes_the_samples_is_in_the_key(tmp_path, monkeypatch):
    prefix = write_pair(tmp_path / "data", counted_documents([9] * 10))
    cases = [
        {}, {"seq_len": 5}, {"seed": 8}, {"split": "1,1"}, {"split": "1,1", "split_name": "valid"},
        {"num_samples": 50}, {"drop_last": False},
    ]  # fmt: skip
    cold = [windows(samples(prefix, cache_folder=tmp_path / str(i), **case)) for i, case in enumerate(cases)]
    for _ in range(2):
        assert [windows(samples(prefix, **case)) for case in cases] == cold
    assert len({samples(prefix, **case).fingerprint for case in cases}) == len(cases)
    # What does not shape them is not in it: nothing is built again.
    monkeypatch.setattr(gpt_dataset.SamplePlan, "build", None)
    samples(prefix, eod_mask_loss=True, vocab_size=1000, pad_token_id=3, num_samples=22)


def test_longer_runs_of_the_same_epochs_have_the_same_fingerprint(tmp_path):
    prefix = write_pair(tmp_path / "data", counted_documents([9] * 10))
    assert samples(prefix, num_samples=40).fingerprint == samples(prefix, num_samples=44).fingerprint
    assert samples(prefix, num_samples=40).fingerprint != samples(prefix, num_samples=46).fingerprint


def test_a_split_without_a_sample_is_refused(tmp_path):
    prefix = write_pair(tmp_path / "data", counted_documents([20]))
    assert message_of(prefix, split="50,50") == (
        f"{prefix}: split train of '50,50' has 0 of the 1 sequences and 0 tokens, and one sample takes "
        "seq_len + 1 = 5; give more data, a larger share or a smaller seq_len"
    )
    assert message_of(prefix, seq_len=20).startswith(
        f"{prefix}: split train of '1' has 1 of the 1 sequences and 20 tokens, and one sample takes seq_len + 1 = 21"
    )
    assert message_of(write_pair(tmp_path / "none", []), num_samples=3).startswith(f"{tmp_path}/none: split train")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split_name": "dev"}, "split_name: 'dev' is no split; choose one of train, valid, validation, test"),
        ({"split": "a,b"}, "split: 'a,b' is no list of numbers; give up to three shares"),
        ({"split": "1,1,1,1"}, "split: '1,1,1,1' has too many shares, or one that is not positive"),
        ({"split": "0,0"}, "split: '0,0' has too many shares, or one that is not positive"),
        ({"split": "2,-1"}, "split: '2,-1' has too many shares, or one that is not positive"),
        (
            {"split": "1,0,1", "split_name": "valid"},
            "split: '1,0,1' leaves nothing for valid; give it a share, or use another split",
        ),
        (
            {"seq_len": 0, "seed": -1},
            "seq_len: 0 is out of range; give a number from 1 to 2147483646\n"
            "seed: -1 is out of range; give a number from 0 to 4294967295",
        ),
        ({"num_samples": 0}, "num_samples: 0 is out of range"),
        ({"eod_token_id": 100, "vocab_size": 100}, "eod_token_id: 100 is out of range; give a number from 0 to 99"),
        ({"pad_token_id": -2}, "pad_token_id: -2 is out of range"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path, options, message):
    assert message_of(write_pair(tmp_path / "data", counted_documents([20])), **options).startswith(message)


def test_weights_need_a_number_of_samples(tmp_path):
    prefix = write_pair(tmp_path / "data", counted_documents([20]))
    assert message_of(f"1 {prefix}") == (
        f"num_samples: None, but the prefix '1 {prefix}' has weights; say how many samples are needed"
    )


def test_ids_beyond_the_vocabulary_are_never_trained(tmp_path):
    prefix = write_pair(tmp_path / "data", counted_documents([13]))
    dataset = samples(prefix, vocab_size=13)
    outcomes = []
    for k in range(3):
        try:
            outcomes.append(int(dataset[k]["labels"].max()))
        except TokenIdError as error:
            assert str(error) == (
                f"{prefix}.bin: token id 13 in sample {k}, but the vocabulary has 13 entries; prepare the data with "
                "this model's tokenizer"
            )
            outcomes.append(None)
    assert sorted(outcomes, key=str) == [5, 9, None]
    negative = write_pair(tmp_path / "negative", [[1, -5, 2, 3, 4]])
    with pytest.raises(TokenIdError, match="token id -5 in sample 0"):
        samples(negative, vocab_size=13)[0]


def test_worker_processes_map_the_files_themselves(tmp_path):
    dataset = samples(write_pair(tmp_path / "data", [[1] * 100_000]))
    assert len(pickle.dumps(dataset)) < 10_000
    loader = torch.utils.data.DataLoader(dataset, batch_size=10, num_workers=1, multiprocessing_context="spawn")
    assert next(iter(loader))["input_ids"].shape == (10, 4)


def test_the_data_are_not_needed_to_be_writable_where_the_cache_is_elsewhere(tmp_path):
    prefix = write_pair(tmp_path / "data", counted_documents([20]))
    samples(prefix, cache_folder=tmp_path / "cache")
    assert not Path(f"{prefix}.cache").exists()
    samples(prefix)
    assert Path(f"{prefix}.cache").is_dir()
