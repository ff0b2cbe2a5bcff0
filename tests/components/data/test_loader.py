from __future__ import annotations

import logging
import multiprocessing
import pickle
import subprocess
import sys
import threading
from multiprocessing import resource_sharer
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch

from hyper_parallel.components.data import TextDataLoader
from hyper_parallel.components.data.indexed import IndexedWriter
from hyper_parallel.components.data.rows import read_sources
from hyper_parallel.components.tokenizer import HuggingFaceTokenizer
from hyper_parallel.config.errors import ConfigError
from tests.components.data.numbers import NumberTokenizer, build_loader, counted_documents, rows_of, write_documents

SEQ_LEN = 4


@pytest.fixture
def path(tmp_path):
    """34 tokens with the EOS of each document: eight rows of four an epoch."""
    return write_documents(tmp_path / "numbers.jsonl", counted_documents([6, 1, 10, 3, 9]))


def steps_of(loader, count: int) -> list[list[tuple[int, ...]]]:
    steps = [rows_of(next(loader)) for _ in range(count)]
    loader.close()
    return steps


# What a step holds


def test_an_epoch_has_every_row_once_and_the_next_another_order(path):
    loader = build_loader(path, seq_len=SEQ_LEN, batch=2, packing="pad")
    rows_per_epoch = loader.rows_per_epoch
    assert rows_per_epoch == 2 + 1 + 3 + 1 + 3
    first, second = steps_of(loader, 5), steps_of(loader, 5)
    rows = [row for step in first for row in step]
    assert len(set(rows)) == rows_per_epoch
    assert sorted(row for step in second for row in step) == sorted(rows)
    assert first != second


def test_seed_epoch_and_shuffle_decide_the_order(path):
    steps = {
        (seed, shuffle): steps_of(build_loader(path, seq_len=SEQ_LEN, batch=2, seed=seed, shuffle=shuffle), 8)
        for seed in (42, 43)
        for shuffle in (True, False)
    }
    assert steps[42, True] != steps[43, True]
    assert steps[42, True] == steps_of(build_loader(path, seq_len=SEQ_LEN, batch=2, seed=42), 8)
    assert steps[42, False] == steps[43, False]
    assert steps[42, False][0] == [(1000, 1001, 1002, 1003), (1004, 1005, 9, 1006)]
    assert steps[42, False][:4] == steps[42, False][4:]


@pytest.mark.parametrize("packing", ["concat", "pad"])
@pytest.mark.parametrize(("size", "micro"), [(1, 8), (1, 1), (2, 4), (2, 1), (4, 2), (4, 1)])
def test_every_world_and_accumulation_trains_the_same_rows(path, size, micro, packing):
    options = {"seq_len": SEQ_LEN, "batch": 8, "packing": packing, "prefetch": 0}
    expected = steps_of(build_loader(path, micro=2, **options), 5)
    ranks = [build_loader(path, micro=micro, rank=rank, size=size, **options) for rank in range(size)]
    for step in range(5):
        items = [next(rank) for rank in ranks]  # every rank has its item: none ends before another
        assert {len(item) for item in items} == {8 // (micro * size)}
        assert {batch["input_ids"].shape for item in items for batch in item} == {(micro, SEQ_LEN)}
        # Row by row in the global order: micro-batch, then rank, then row.
        rows = [rows_of([batch]) for micro_batches in zip(*items, strict=True) for batch in micro_batches]
        assert [row for part in rows for row in part] == expected[step]


def test_what_a_micro_batch_holds(path):
    item = next(build_loader(path, seq_len=SEQ_LEN, micro=2, batch=4, shuffle=False))
    assert len(item) == 2
    assert item[0]["input_ids"].tolist() == [[1000, 1001, 1002, 1003], [1004, 1005, 9, 1006]]
    assert item[0]["labels"].tolist() == [[1001, 1002, 1003, 1004], [1005, 9, -100, 9]]
    assert item[0]["position_ids"].tolist() == [[0, 1, 2, 3], [0, 1, 2, 0]]
    assert item[0]["cu_seqlens"] == [0, 4, 7, 8]


# The position


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(("seq_len", "batch"), [(4, 2), (5, 4)], ids=["edge-between-steps", "edge-within-a-step"])
def test_interrupted_at_every_step_and_resumed(path, seq_len, batch, num_workers):
    options = {"seq_len": seq_len, "micro": 2, "batch": batch, "num_workers": num_workers}
    straight = build_loader(path, **options)
    rows_per_epoch = straight.rows_per_epoch
    assert (rows_per_epoch, rows_per_epoch % batch) == ((8, 0) if batch == 2 else (6, 2))
    steps = -(-2 * rows_per_epoch // batch)
    expected, states = [], []
    for _ in range(steps):
        states.append(straight.state_dict())
        expected.append(rows_of(next(straight)))
    straight.close()
    assert len({tuple(step) for step in expected}) == steps
    for step, state in enumerate(states):
        assert state["samples_consumed"] == step * batch
        resumed = build_loader(path, **options)
        resumed.load_state_dict(state)
        assert steps_of(resumed, steps - step) == expected[step:]


def test_worker_processes_change_no_row_and_are_no_copies_of_this_one(path):
    options = {"seq_len": SEQ_LEN, "micro": 2, "batch": 4}
    others = set(multiprocessing.active_children())
    loader = build_loader(path, num_workers=2, **options)
    first = rows_of(next(loader))
    workers = set(multiprocessing.active_children()) - others
    assert [first, *steps_of(loader, 8)] == steps_of(build_loader(path, **options), 9)
    assert {type(worker) for worker in workers} == {multiprocessing.get_context("forkserver").Process}


def test_a_worker_maps_the_numbers_of_a_file_and_is_sent_none(tmp_path):
    lines = tmp_path / "lines.jsonl"
    write_documents(lines, counted_documents([80] * 2000))
    with IndexedWriter(tmp_path / "pair") as writer:
        for n in range(2000):
            writer.add_document([n % 250] * 80)
    for source in (lines, tmp_path / "pair"):
        config = TextDataLoader.Config(path=str(source))
        ((_, documents),) = read_sources(config, NumberTokenizer(), 32, 0)
        sent = ForkingPickler.dumps(documents.token_ids)
        assert len(sent) < 1000 < documents.token_ids.nbytes // 100
        assert pickle.loads(sent).tolist() == documents.token_ids.tolist()
        assert pickle.loads(pickle.dumps(documents.token_ids[5:9])).tolist() == documents.token_ids[5:9].tolist()
    resource_sharer.stop()  # the thread that hands files to other processes


def test_resuming_in_another_world_continues_the_same_rows(path):
    options = {"seq_len": SEQ_LEN, "batch": 4}
    expected = steps_of(build_loader(path, micro=4, **options), 9)
    first = [build_loader(path, micro=2, rank=rank, size=2, **options) for rank in range(2)]
    for _ in range(3):
        states = [(next(loader), loader.state_dict())[1] for loader in first]
    assert states[0] == states[1]
    second = [build_loader(path, micro=1, rank=rank, size=4, num_workers=rank % 2, **options) for rank in range(4)]
    for loader in second:
        loader.load_state_dict(states[0])
    assert [[row for loader in second for row in rows_of(next(loader))] for _ in range(6)] == expected[3:]
    for loader in (*first, *second):
        loader.close()


def test_another_batch_size_continues_after_the_rows_already_trained(path):
    expected = [row for step in steps_of(build_loader(path, seq_len=SEQ_LEN, batch=1), 16) for row in step]
    loader = build_loader(path, seq_len=SEQ_LEN, batch=2)
    steps_of(loader, 3)
    wider = build_loader(path, seq_len=SEQ_LEN, batch=5)
    wider.load_state_dict(loader.state_dict())
    assert [row for step in steps_of(wider, 2) for row in step] == expected[6:16]


def test_the_state_is_that_of_the_last_item_handed_out_however_far_the_thread_is(path):
    loader = build_loader(path, seq_len=SEQ_LEN, batch=2, prefetch=4)
    next(loader)
    prefetcher = loader._items
    wait_until(prefetcher._queue.full)
    assert loader.state_dict()["samples_consumed"] == 2
    loader.close()
    fresh = build_loader(path, seq_len=SEQ_LEN, batch=2)
    next(fresh)
    assert rows_of(next(loader)) == rows_of(next(fresh))  # closing loses nothing either
    for one in (loader, fresh):
        one.close()


def test_going_back_to_a_state_repeats_the_rows(path):
    loader = build_loader(path, seq_len=SEQ_LEN, batch=2)
    state = loader.state_dict()
    first = [rows_of(next(loader)) for _ in range(3)]
    loader.load_state_dict(state)
    assert steps_of(loader, 3) == first


def test_other_data_is_refused_by_the_name_of_what_differs(path, tmp_path):
    state = build_loader(path, seq_len=SEQ_LEN).state_dict()

    def refused(path=path, **options) -> list[str]:
        loader = build_loader(path, **{"seq_len": SEQ_LEN, **options})
        with pytest.raises(ConfigError) as caught:
            loader.load_state_dict(state)
        assert loader.state_dict()["samples_consumed"] == 0
        return [fault.path for fault in caught.value.faults]

    other = write_documents(tmp_path / "other.jsonl", counted_documents([6, 1, 10, 3, 8]))
    assert refused(other) == ["dataloader.path"]
    assert refused(eos_id=8) == ["tokenizer"]
    assert refused(seq_len=5) == ["training.seq_len"]
    assert refused(packing="pad") == ["dataloader.packing"]
    assert refused(seed=43) == ["training.seed"]
    assert refused(shuffle=False) == ["dataloader.shuffle", "training.seed"]
    assert refused(other, seq_len=3, packing="pad") == ["dataloader.path", "training.seq_len", "dataloader.packing"]
    with pytest.raises(ConfigError, match=r"training\.seq_len: 5 here, but the position was saved with 4; resume with"):
        build_loader(path, seq_len=5).load_state_dict(state)


def test_joining_two_texts_is_other_data(tmp_path):
    apart, joined = tmp_path / "apart.jsonl", tmp_path / "joined.jsonl"
    apart.write_text('{"text": "1 2"}\n{"text": "3 4 5"}\n')
    joined.write_text('{"text": "1 23 4 5"}\n')
    state = build_loader(str(apart), seq_len=2).state_dict()
    with pytest.raises(ConfigError, match=r"^dataloader\.path: text"):
        build_loader(str(joined), seq_len=2).load_state_dict(state)


# What is left behind


def wait_until(happened, seconds: float = 20.0) -> None:
    event = threading.Event()
    for _ in range(int(seconds / 0.01)):
        if happened():
            return
        event.wait(0.01)
    raise AssertionError(f"did not happen within {seconds} s")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_close_leaves_no_thread_and_no_process(path, num_workers):
    threads, processes = set(threading.enumerate()), set(multiprocessing.active_children())
    loader = build_loader(path, seq_len=SEQ_LEN, batch=2, num_workers=num_workers)
    next(loader)
    assert {thread.name for thread in set(threading.enumerate()) - threads} >= {"data-prefetch"}
    assert len(set(multiprocessing.active_children()) - processes) == num_workers
    loader.close()
    loader.close()
    assert not [thread for thread in set(threading.enumerate()) - threads if thread.name == "data-prefetch"]
    assert set(multiprocessing.active_children()) <= processes
    wait_until(lambda: set(threading.enumerate()) <= threads)  # torch's queues end their own threads a moment later


def test_a_killed_trainer_leaves_no_process(path):
    script = (
        "import multiprocessing; from tests.components.data.numbers import build_loader\n"
        f"loader = build_loader({path!r}, seq_len={SEQ_LEN}, num_workers=1); next(loader)\n"
        "(worker,) = multiprocessing.active_children(); print(worker.pid, flush=True); input()"
    )
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", script], **options) as trainer:
        worker = int(trainer.stdout.readline())
        _, server = state_and_parent(worker)
        assert [state_and_parent(pid)[0] in "RS" for pid in (worker, server)] == [True, True]
        assert server != trainer.pid
        trainer.kill()
    wait_until(lambda: state_and_parent(worker)[0] == state_and_parent(server)[0] == "Z")


def state_and_parent(pid: int) -> tuple[str, int]:
    """As proc_pid_stat(5) says; of a process that is gone too, whether or not somebody has taken notice of it."""
    try:
        state, parent, *_ = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except FileNotFoundError:
        return "Z", 0
    return state, int(parent)


def test_without_prefetch_there_is_no_thread(path):
    threads = set(threading.enumerate())
    loader = build_loader(path, seq_len=SEQ_LEN, batch=2, prefetch=0)
    first = rows_of(next(loader))
    assert set(threading.enumerate()) <= threads
    assert first == steps_of(build_loader(path, seq_len=SEQ_LEN, batch=2), 1)[0]


def test_loading_data_draws_nothing_from_the_global_generator(path):
    before = torch.get_rng_state()
    steps_of(build_loader(path, seq_len=SEQ_LEN, batch=2, num_workers=2), 2)
    steps_of(build_loader(path, seq_len=SEQ_LEN, batch=2), 2)
    assert torch.equal(torch.get_rng_state(), before)


# Mistakes


def faults_of(path=None, **config) -> list[str]:
    return [str(fault) for fault in TextDataLoader.Config(path=path, **config).faults()]


def test_settings_that_cannot_work_are_found_before_anything_is_built(tmp_path):
    missing, other = tmp_path / "missing.jsonl", tmp_path / "data.doc"
    other.write_text("a,b\n")
    assert faults_of() == []
    known = ".txt, .jsonl, .jsonl.gz, .jsonl.zst, .parquet, .arrow, .csv, .pt, .idx, .bin"
    assert faults_of(str(missing)) == [f"path: {missing} does not exist; give a file of text ({known})"]
    assert faults_of(str(other)) == [
        f"path: {other} is of an unknown kind; give a file that ends in one of {known}, or say what it is with source"
    ]
    assert faults_of(str(tmp_path)) == [f"path: {tmp_path} holds no file of a known kind; give files of {known}"]
    assert faults_of(str(tmp_path / "*.doc")) == [
        f"path: {tmp_path / '*.doc'} holds no file of a known kind; give files of {known}"
    ]
    assert faults_of(str(other), source="jsonl", subset="en") == [
        f"subset: 'en' is given, but {other} is no Hugging Face data set; remove it"
    ]
    assert faults_of(text_field="body") == [
        "text_field: 'body' is given, but the corpus in the package has no such fields; remove it"
    ]
    assert faults_of(num_workers=-1, prefetch=-2) == [
        "num_workers: -1 is below 0; give 0 or more",
        "prefetch: -2 is below 0; give 0 or more",
    ]
    assert faults_of(num_workers=2, prefetch=0) == ["prefetch: 0 leaves 2 workers nothing to do; give 1 or more"]
    with pytest.raises(ConfigError, match=rf"^dataloader\.path: {missing} does not exist"):
        build_loader(str(missing), seq_len=4)


@pytest.mark.parametrize(
    ("documents", "documents_tokens_rows"),
    [([], "0 documents, 0 tokens) gives 0 rows"), ([[1], []], "1 documents, 2 tokens) gives 0 rows")],
    ids=["empty", "too-short"],
)
@pytest.mark.parametrize("packing", ["concat", "pad"])
def test_less_data_than_one_step_is_refused(tmp_path, documents, documents_tokens_rows, packing):
    path = write_documents(tmp_path / "few.jsonl", documents)
    if packing == "pad" and documents:
        documents_tokens_rows = documents_tokens_rows.replace("0 rows", "1 rows")
    with pytest.raises(ConfigError) as caught:
        build_loader(path, seq_len=4, batch=2, packing=packing)
    assert str(caught.value) == (
        f"dataloader.path: {path} ({documents_tokens_rows} of training.seq_len 4, "
        "fewer than training.global_batch_size 2; give more text or smaller sizes"
    )


def test_batch_sizes_that_do_not_divide_are_refused(path):
    with pytest.raises(ConfigError) as caught:
        build_loader(path, seq_len=4, batch=10, micro=4, size=2)
    assert str(caught.value) == (
        "training.global_batch_size: 10 is not a multiple of training.micro_batch_size 4 x data-parallel size 2; "
        "give a multiple of 8"
    )


# The text


def test_empty_texts_are_left_out_and_counted(tmp_path, caplog):
    path = write_documents(tmp_path / "some.jsonl", [[1, 2], [], [3], []])
    with caplog.at_level(logging.INFO, logger="hyper_parallel"):
        loader = build_loader(path, seq_len=2, packing="pad", shuffle=False)
    assert steps_of(loader, 2) == [[(1, 2)], [(3, 0)]]
    assert "train data: 2 documents, 5 tokens; 2 empty texts left out" in caplog.messages


def test_the_embedded_corpus(caplog):
    tokenizer = HuggingFaceTokenizer.Config().build()
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="hyper_parallel"):
        loaders = {
            split: TextDataLoader.Config(split=split).build(
                tokenizer=tokenizer, seq_len=256, micro_batch_size=4, global_batch_size=8, dp_rank=0, dp_size=1, seed=42
            )
            for split in ("train", "validation")
        }
    assert {split: loader.rows_per_epoch for split, loader in loaders.items()} == {"train": 6099, "validation": 348}
    assert caplog.messages == [
        "train data: no path given, using the embedded Shakespeare corpus shakespeare.train.jsonl.gz",
        "train data: 805 documents, 1,561,552 tokens",
        "validation data: no path given, using the embedded Shakespeare corpus shakespeare.valid.jsonl.gz",
        "validation data: 175 documents, 89,273 tokens",
    ]
    for loader in loaders.values():
        item = next(loader)
        loader.close()
        assert [batch["input_ids"].shape for batch in item] == [(4, 256), (4, 256)]
        assert max(int(batch["input_ids"].max()) for batch in item) < tokenizer.vocab_size


def test_a_tokenizer_with_a_large_vocabulary_keeps_its_ids(tmp_path):
    """Ids beyond 16 bits must not wrap around in memory."""
    tokenizer = NumberTokenizer()
    assert tokenizer.vocab_size > 2**16
    path = write_documents(tmp_path / "large.jsonl", [[70_000, 65_536, 99_999]])
    assert steps_of(build_loader(path, seq_len=3, packing="pad"), 1) == [[(70_000, 65_536, 99_999)]]
