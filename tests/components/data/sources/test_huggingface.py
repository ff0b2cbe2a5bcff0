"""Data sets by name: the hub is a stand-in, local folders are real."""

from __future__ import annotations

import itertools

import datasets
import pytest

from hyper_parallel.components.data.sources import HuggingFaceSource
from hyper_parallel.config.errors import ConfigError
from tests.components.data.numbers import build_loader, rows_of

TEXTS = [" ".join(str(10 * i + j) for j in range(1 + i % 4)) for i in range(1, 31)]


@pytest.fixture
def folder(tmp_path):
    for part in range(3):
        rows = [{"text": text} for text in TEXTS[10 * part : 10 * part + 10]]
        datasets.Dataset.from_list(rows).to_parquet(tmp_path / "files" / f"train-{part}.parquet")
    datasets.disable_progress_bars()
    return tmp_path / "files"


@pytest.fixture
def hub(monkeypatch, folder):
    """`load_dataset` that knows one name, and notes what it is asked for."""
    asked, load = [], datasets.load_dataset

    def load_dataset(path, name=None, **options):
        asked.append((path, name, options))
        if path != "owner/numbers":
            raise datasets.exceptions.DatasetNotFoundError(f"Dataset '{path}' doesn't exist on the Hub")
        options["revision"] = None
        return load(str(folder), **options)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


@pytest.mark.parametrize("streaming", [False, True])
def test_every_position_is_followed_by_the_rows_behind_it(folder, streaming):
    config = HuggingFaceSource.Config(path=str(folder), streaming=streaming)
    for taken in range(len(TEXTS) + 1):
        source = config.build()
        first = [record["text"] for record in itertools.islice(source, taken)]
        again = config.build()
        again.load_state_dict(source.state_dict())
        rest = list(again)
        assert [*first, *(record["text"] for record in rest)] == TEXTS
        if rest:
            assert rest[0].where == f"{folder} train row {taken + 1}"


@pytest.mark.parametrize("streaming", [False, True])
def test_a_saved_data_set_and_its_splits(tmp_path, streaming):
    split = datasets.Dataset.from_list([{"text": "a"}, {"text": "b"}])
    datasets.DatasetDict({"train": split, "test": split}).save_to_disk(tmp_path / "saved")
    config = HuggingFaceSource.Config(path=str(tmp_path / "saved"), split="test", streaming=streaming)
    assert [record["text"] for record in config.build()] == ["a", "b"]
    config.split = "dev"
    with pytest.raises(ConfigError, match=r"in the folder cannot be loaded \(it has the splits train, test, not dev\)"):
        config.build()


@pytest.mark.parametrize("reading", ["ahead", "stream"])
def test_a_name_of_the_hub_in_the_loader(hub, reading):
    loader = build_loader("owner/numbers", seq_len=4, batch=2, subset="raw", reading=reading, packing="pad")
    rows = [row for _ in range(15) for row in rows_of(next(loader))]
    loader.close()
    assert sorted(row[0] for row in rows) == [10 * i for i in range(1, 31)]
    assert hub == [
        ("owner/numbers", "raw", {"split": "train", "revision": None, "streaming": reading == "stream"}),
    ]


def test_workers_read_all_of_a_stream(folder):
    """Within a worker of torch a stream of `datasets` gives its share of the files alone, unless one takes care."""
    options = {"seq_len": 4, "batch": 2, "packing": "pad", "reading": "stream", "shuffle_window": 4}
    options["source"] = "huggingface"
    rows = {}
    for num_workers in (0, 2):
        loader = build_loader(str(folder), **options, num_workers=num_workers)
        rows[num_workers] = [rows_of(next(loader)) for _ in range(20)]
        loader.close()
    assert rows[2] == rows[0]


def test_a_name_that_the_hub_does_not_know(hub):
    with pytest.raises(ConfigError) as caught:
        build_loader("owner/nubmers", seq_len=4)
    assert str(caught.value) == (
        "dataloader.path: the data set owner/nubmers on the Hugging Face hub cannot be loaded "
        "(Dataset 'owner/nubmers' doesn't exist on the Hub); mend the name, subset or split, or the connection"
    )


def test_a_split_that_is_not_there(hub):
    with pytest.raises(ConfigError, match=r"owner/numbers on the Hugging Face hub cannot be loaded \(.*validation"):
        build_loader("owner/numbers", seq_len=4, split="validation")


def test_an_unknown_column_lists_those_that_there_are(folder):
    with pytest.raises(ConfigError) as caught:
        build_loader(str(folder), seq_len=4, source="huggingface", text_field="body")
    assert str(caught.value) == (
        f"dataloader.text_field: 'body' is not in {folder} train row 1, which has 'text'; name the field with the text"
    )
