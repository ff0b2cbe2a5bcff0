from __future__ import annotations

import logging

import pytest

from hyper_parallel.components.data import TextDataLoader
from hyper_parallel.config.errors import ConfigError
from hyper_parallel.config.target import Target
from hyper_parallel.trainer.phases import plan_steps
from tests.components.data.numbers import EOS, build_loader, counted_documents, rows_of, write_documents
from tests.trainer.runs import tiny_config

LENGTHS = [3, 7, 2, 9, 1, 5, 4, 8, 6, 2, 3, 11, 1]
OPTIONS = {"seq_len": 4, "micro": 2, "batch": 4, "reading": "stream", "shuffle_window": 4}


@pytest.fixture
def path(tmp_path):
    return write_documents(tmp_path / "numbers.jsonl", counted_documents(LENGTHS))


def steps_of(loader, count: int) -> list[list[tuple[int, ...]]]:
    steps = [rows_of(next(loader)) for _ in range(count)]
    loader.close()
    return steps


class Lines:
    """A user's source: the numbers of a list, and the epoch, one document each; notes what it is told."""

    def __init__(self, count: int, tell_epoch: bool = False) -> None:
        self.count, self.tell_epoch = count, tell_epoch
        self.epoch = self.position = 0
        self.calls: list[str] = []

    def __iter__(self):
        while self.position < self.count:
            self.position += 1
            yield {"text": f"{100 * (self.epoch + 1) + self.position if self.tell_epoch else self.position}"}

    def set_epoch(self, epoch):
        self.calls.append(f"epoch {epoch}")
        self.epoch = epoch

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.calls.append(f"position {state['position']}")
        self.position = state["position"]


class NoSource:
    """Has no position."""

    def __iter__(self):
        return iter([{"text": "1"}])


@pytest.mark.parametrize("packing", ["concat", "best_fit", "pad"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_interrupted_at_every_step_and_resumed(path, packing, num_workers):
    """Thirty steps are five epochs and more; every one of them is begun anew."""
    options = {**OPTIONS, "packing": packing, "num_workers": num_workers}
    straight = build_loader(path, **OPTIONS, packing=packing)
    expected, states = [], []
    for _ in range(30):
        states.append(straight.state_dict())
        expected.append(rows_of(next(straight)))
    straight.close()
    assert max(stream["epoch"] for stream in states[-1]["streams"]) >= 4
    assert len({step for step in map(tuple, expected)}) > 25
    for step, state in enumerate(states):
        assert state["samples_consumed"] == 4 * step
        resumed = build_loader(path, **options)
        resumed.load_state_dict(state)
        assert steps_of(resumed, min(8, 30 - step)) == expected[step : step + 8]


def test_resuming_in_another_world_continues_the_same_rows(path):
    expected = steps_of(build_loader(path, **OPTIONS), 12)
    first = [build_loader(path, **{**OPTIONS, "rank": rank, "size": 2}) for rank in range(2)]
    for _ in range(4):
        items = [rows_of(next(loader)) for loader in first]
    assert [row for item in items for row in item] == expected[3]
    states = [loader.state_dict() for loader in first]
    assert str(states[0]) == str(states[1])
    second = [
        build_loader(path, **{**OPTIONS, "micro": 1, "rank": r, "size": 4, "num_workers": r % 2}) for r in range(4)
    ]
    for loader in second:
        loader.load_state_dict(states[0])
    assert [[row for loader in second for row in rows_of(next(loader))] for _ in range(4)] == expected[4:8]
    alone = build_loader(path, **{**OPTIONS, "micro": 4})
    alone.load_state_dict(second[0].state_dict())
    assert steps_of(alone, 4) == expected[8:]
    for loader in (*first, *second):
        loader.close()


@pytest.mark.parametrize("packing", ["concat", "pad"])
def test_no_token_is_lost_or_doubled(path, packing):
    """What is trained is every pair of neighbours in a document once an epoch; rows cut none away."""
    documents = counted_documents(LENGTHS)
    pairs = [pair for ids in documents for pair in zip(ids, [*ids[1:], EOS], strict=True)]
    loader = build_loader(path, **{**OPTIONS, "micro": 1, "batch": 1, "packing": packing})
    seen: list[tuple[int, int]] = []
    for _ in range(200):
        (batch,) = next(loader)
        trained = batch["labels"] != -100
        seen += zip(batch["input_ids"][trained].tolist(), batch["labels"][trained].tolist(), strict=True)
        if max(map(seen.count, set(seen))) == 4:
            break
    loader.close()
    # Within a window more or less, every pair was seen three times when the first was seen a fourth time.
    counts = {pair: seen.count(pair) for pair in pairs}
    assert set(seen) == set(pairs)
    assert set(counts.values()) <= {2, 3, 4}


def test_rows_are_shuffled_within_windows_and_otherwise_in_order(tmp_path):
    path = write_documents(tmp_path / "n.jsonl", [[i] for i in range(1000, 1020)])
    options = {"seq_len": 1, "reading": "stream", "packing": "pad", "shuffle_window": 5}
    in_order = [row[0][0] for row in steps_of(build_loader(path, **options, shuffle=False), 40)]
    assert in_order == [*range(1000, 1020)] * 2
    shuffled = [row[0][0] for row in steps_of(build_loader(path, **options), 40)]
    windows = [shuffled[i : i + 5] for i in range(0, 40, 5)]
    assert [sorted(window) for window in windows] == [in_order[i : i + 5] for i in range(0, 40, 5)]
    orders = {tuple(i % 5 for i in window) for window in windows}
    assert len(orders) > 4
    assert steps_of(build_loader(path, **options, seed=1), 40) != steps_of(build_loader(path, **options), 40)


def test_a_stream_may_be_cut_to_its_first_documents(tmp_path):
    path = write_documents(tmp_path / "n.jsonl", [[i] for i in range(1000, 1020)])
    options = {"seq_len": 1, "reading": "stream", "packing": "pad", "shuffle": False, "documents": 7}
    for window in (3, 4, 7):
        loader, rows, states = build_loader(path, **options, shuffle_window=window), [], []
        for _ in range(14):
            states.append(loader.state_dict())
            rows.append(rows_of(next(loader))[0][0])
        loader.close()
        assert rows == [*range(1000, 1007)] * 2
        for step, state in enumerate(states):
            resumed = build_loader(path, **options, shuffle_window=window)
            resumed.load_state_dict(state)
            assert [row[0][0] for row in steps_of(resumed, 14 - step)] == rows[step:]


def test_a_source_of_ones_own():
    source = Target.of(Lines, count=6)
    options = {"seq_len": 1, "packing": "pad", "shuffle": False, "sources": (source,)}
    for reading in ("ahead", "stream"):
        assert [row[0][0] for row in steps_of(build_loader(None, reading=reading, **options), 9)] == [
            *range(1, 7),
            *range(1, 4),
        ]


def test_the_epoch_is_told_before_the_position(monkeypatch):
    made: list[Lines] = []
    monkeypatch.setattr(Lines, "__init__", _noting(Lines.__init__, made))
    source = Target.of(Lines, count=3, tell_epoch=True)
    options = {"seq_len": 1, "packing": "pad", "shuffle": False, "sources": (source,), "reading": "stream"}
    loader = build_loader(None, **options, shuffle_window=2, prefetch=0)
    rows = [rows_of(next(loader))[0][0] for _ in range(4)]
    assert rows == [101, 102, 103, 201]
    resumed = build_loader(None, **options, shuffle_window=2, prefetch=0)
    resumed.load_state_dict(loader.state_dict())
    assert [row[0][0] for row in steps_of(resumed, 3)] == [202, 203, 301]
    assert made[1].calls[:2] == ["epoch 1", "position 0"]


def _noting(init, made):
    def noted(self, count: int, tell_epoch: bool = False) -> None:
        init(self, count, tell_epoch)
        made.append(self)

    return noted


def test_what_is_no_source_is_refused():
    with pytest.raises(ConfigError) as caught:
        build_loader(None, seq_len=4, sources=(Target.of(NoSource),))
    assert str(caught.value) == (
        "dataloader.sources.0: NoSource has no state_dict, load_state_dict; "
        "write them, as hyper_parallel...sources.Source says"
    )


def test_what_cannot_be_sent_to_a_worker_is_refused():
    class Local(Lines):
        """No other process can import it."""

    loader = build_loader(None, seq_len=4, sources=(Target.of(Local, count=9),), reading="stream", num_workers=1)
    with pytest.raises(ConfigError) as caught:
        next(loader)
    assert str(caught.value).startswith("dataloader.num_workers: 1 processes, but the data cannot be sent to them (")
    assert str(caught.value).endswith("); give 0, or sources and transforms that can be pickled")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_bad_document_stops_the_run_with_its_place(tmp_path, num_workers, caplog):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "1 2 3 4 5"}\n' * 9 + "broken\n")
    loader = build_loader(str(path), seq_len=4, reading="stream", shuffle_window=4, num_workers=num_workers)
    with pytest.raises(ConfigError, match=rf"^dataloader\.path: {path}:10 is not JSON \(Expecting value at column 1\)"):
        steps_of(loader, 30)
    loader.close()
    skipping = build_loader(str(path), seq_len=4, reading="stream", shuffle_window=4, on_error="skip")
    with caplog.at_level(logging.INFO, logger="hyper_parallel"):
        assert len(steps_of(skipping, 30)) == 30
    told = [line.split() for line in caplog.messages if line.startswith("streamed data: ")]
    assert [line[3:] for line in told] == [["unreadable", "documents", "skipped"]]
    assert int(told[0][2]) >= 2  # once an epoch, as far as the windows were read


def test_a_stream_without_rows_is_refused(tmp_path):
    for texts, fact in (([], "JsonLinesSource gives no document"), ([[]], "all of JsonLinesSource gives not one row")):
        loader = build_loader(write_documents(tmp_path / "few.jsonl", texts), seq_len=4, reading="stream")
        with pytest.raises(ConfigError, match=rf"^dataloader\.path: {fact}; "):
            next(loader)
        loader.close()


def test_other_data_and_another_window_are_refused(path, tmp_path):
    state = build_loader(path, **OPTIONS).state_dict()
    other = write_documents(tmp_path / "other.jsonl", counted_documents([*LENGTHS, 3]))

    def refused(path, **options) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            build_loader(path, **{**OPTIONS, **options}).load_state_dict(state)
        return [fault.path for fault in caught.value.faults]

    assert refused(other) == ["dataloader.path"]
    assert refused(path, shuffle_window=5) == ["dataloader.shuffle_window"]
    assert refused(path, documents=3, packing="pad") == ["dataloader.documents", "dataloader.packing"]
    assert refused(path, reading="ahead", shuffle_window=None) == ["dataloader.path"]


def test_the_length_of_a_stream_is_not_known(path, tmp_path):
    assert build_loader(path, **OPTIONS).rows_per_epoch is None
    config = tiny_config(tmp_path, steps=5, epochs=2)
    config.training.steps = None
    config.dataloader = TextDataLoader.Config(path=path, reading="stream", source="jsonl")
    with pytest.raises(ConfigError) as caught:
        plan_steps(config, build_loader(path, **OPTIONS))
    assert str(caught.value) == (
        "training.epochs: 2 is given, but nobody knows the length of streamed data; give training.steps instead"
    )


def test_settings_without_effect_are_refused(path):
    def faults_of(**config) -> list[str]:
        return [str(fault) for fault in TextDataLoader.Config(**config).faults()]

    assert faults_of(path=path, shuffle_window=8) == [
        "shuffle_window: 8 is given, but reading is ahead, which shuffles all documents; "
        "remove it, or set reading stream"
    ]
    assert faults_of(source="synthetic", reading="stream") == [
        "reading: stream is given, but synthetic data is drawn at once; set ahead"
    ]
    assert faults_of(sources=(Target.of(Lines, count=1),) * 2, reading="stream", stopping="all_exhausted") == [
        "stopping: all_exhausted is given, but streamed data has no known end; set repeat, or reading ahead"
    ]
    assert faults_of(path=path, weights=(1.0,), packing_cost="trained") == [
        "weights: [1.0] are given, but no sources; give sources, or remove them",
        "packing_cost: trained is given, but packing is concat; set best_fit",
    ]
    assert faults_of(sources=(Target.of(Lines, count=1),), path=path, weights=(1.0, -2.0), source="csv") == [
        f"path: {path} is given, and sources too; remove one of the two",
        "source: csv is given, and sources too; remove one of the two",
        "weights: 2 for 1 sources; give each one",
        "weights: [1.0, -2.0] are not all above 0; leave out sources without weight",
    ]
    assert faults_of(source="csv") == ["path: not given, but source is csv; give a path"]
