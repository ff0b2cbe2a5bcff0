from __future__ import annotations

import errno
import gzip
import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from hyper_parallel.assets import CORPUS_FILES, TOKENIZER_FOLDER
from hyper_parallel.components.data.indexed import IndexedDataset, IndexedWriter
from hyper_parallel.components.tokenizer import HuggingFaceTokenizer
from hyper_parallel.data_tools import __main__ as command_line
from hyper_parallel.data_tools.fast_tokenizer import FastTokenizer
from hyper_parallel.data_tools.prepare import find_inputs
from tests.components.data.indexed.pairs import write_pair
from tests.data_tools.tool import EOS, documents_of, number_tokenizer, pair_of, run_tool, text_of, write_lines


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    return number_tokenizer(tmp_path_factory.mktemp("tokenizer") / "numbers")


def numbered(count: int, *, seed: int = 0, longest: int = 30) -> list[list[int]]:
    """Documents of 1 to `longest` ids, each beginning with its own number in two ids."""
    random = np.random.default_rng(seed)
    return [
        [number // 1000, number % 1000, *random.integers(0, 1000, random.integers(0, longest)).tolist()]
        for number in range(count)
    ]


def prepare(tokenizer: Path, prefix: Path, *arguments, code: int = 0) -> str:
    """What the tool says."""
    result = run_tool("prepare", "--tokenizer", tokenizer, "--output-prefix", prefix, *arguments)
    assert result.returncode == code, result.stderr
    return result.stderr


@pytest.mark.parametrize("append_eod", [False, True])
def test_every_document_is_written_in_the_order_of_the_file(tmp_path, tokenizer, append_eod):
    documents = numbered(3000)
    lines = write_lines(tmp_path / "data.jsonl", documents)
    flags = ["--append-eod"] if append_eod else []
    said = prepare(tokenizer, tmp_path / "data", "--input", lines, "--workers", 2, *flags)
    expected = [[*document, EOS] for document in documents] if append_eod else documents
    write_pair(tmp_path / "expected", expected, np.uint16)
    assert pair_of(tmp_path / "data") == pair_of(tmp_path / "expected")
    tokens = sum(map(len, expected))
    assert f"{tmp_path}/data: 3,000 documents, {tokens:,} tokens of uint16" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "data.bin", "data.idx", "data.jsonl", "expected.bin", "expected.idx",
    ]  # fmt: skip


def test_ids_are_those_of_the_tokenizer_that_trains(tmp_path):
    corpus = CORPUS_FILES["validation"]
    prepare(TOKENIZER_FOLDER, tmp_path / "data", "--input", corpus)
    with gzip.open(corpus, "rt") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    reference = HuggingFaceTokenizer.Config().build()
    assert documents_of(tmp_path / "data") == reference.encode_batch(texts)
    fast = FastTokenizer(str(TOKENIZER_FOLDER))
    assert (fast.eos_id, fast.vocab_size) == (reference.eos_id, reference.vocab_size)
    text = "A <|endoftext|> in the middle, and 中文 🙂"
    assert fast.encode(text) == reference.encode(text)
    assert fast.decode(fast.encode(text)) == text


def test_files_of_several_kinds_patterns_and_doubles_are_read_once(tmp_path, tokenizer):
    one = write_lines(tmp_path / "b.jsonl", [[1], [2]])
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(write_lines(tmp_path / "x", [[3]]).read_bytes()))
    (tmp_path / "c.txt").write_text("4 5\n6")
    inputs = [one, tmp_path / "*.jsonl*", tmp_path / "c.txt", tmp_path / "." / "b.jsonl"]
    prepare(tokenizer, tmp_path / "data", "--input", *inputs)
    assert documents_of(tmp_path / "data") == [[1], [2], [3], [4, 5, 6]]
    assert find_inputs([str(tmp_path / "*.jsonl*")]) == [str(tmp_path / "a.jsonl.gz"), str(one)]


def test_tables_and_hugging_face_data_sets_are_read(tmp_path, tokenizer):
    import datasets

    data = datasets.DatasetDict(
        {split: datasets.Dataset.from_dict({"body": bodies}) for split, bodies in (("a", ["1 2"]), ("b", ["3", "4"]))}
    )
    data.save_to_disk(str(tmp_path / "saved"))
    data["b"].to_parquet(str(tmp_path / "b.parquet"))
    field = ["--text-field", "body"]
    prepare(tokenizer, tmp_path / "saved-b", "--input", tmp_path / "saved", "--split", "b", *field)
    prepare(tokenizer, tmp_path / "parquet", "--input", tmp_path / "*.parquet", *field)
    assert documents_of(tmp_path / "saved-b") == documents_of(tmp_path / "parquet") == [[3], [4]]


@pytest.mark.parametrize("partitions", [1, 3])
def test_records_are_cut_in_each_partition_and_its_tail_is_dropped(tmp_path, tokenizer, partitions):
    documents = numbered(1000)
    lines = write_lines(tmp_path / "data.jsonl", documents)
    said = prepare(
        tokenizer, tmp_path / "data", "--input", lines, "--append-eod", "--pack-to-seq-len", 16,
        "--partitions", partitions,
    )  # fmt: skip
    expected, dropped = [], 0
    for part in range(partitions):
        flat = list(itertools.chain.from_iterable([*document, EOS] for document in documents[part::partitions]))
        expected += [flat[17 * i : 17 * i + 17] for i in range(len(flat) // 17)]
        dropped += len(flat) % 17
    assert documents_of(tmp_path / "data") == expected
    assert f"{dropped} tokens at the end dropped" in said


@pytest.mark.parametrize("partitions", [2, 7])
def test_partitions_neither_lose_nor_double_a_document(tmp_path, tokenizer, partitions):
    documents = numbered(2000)
    files = [write_lines(tmp_path / f"{i}.jsonl", documents[i * 500 : i * 500 + 500]) for i in range(4)]
    prepare(tokenizer, tmp_path / "data", "--input", *files, "--partitions", partitions)
    dealt = [document for part in range(partitions) for document in documents[part::partitions]]
    assert documents_of(tmp_path / "data") == dealt
    assert not Path(f"{tmp_path}/data.partial").exists()


def test_empty_documents_are_left_out_and_counted(tmp_path, tokenizer):
    lines = write_lines(tmp_path / "data.jsonl", [[1], [], [2, 3], []])
    said = prepare(tokenizer, tmp_path / "data", "--input", lines, "--append-eod")
    assert documents_of(tmp_path / "data") == [[1, EOS], [2, 3, EOS]]
    assert "2 documents, 5 tokens of uint16; 2 empty documents left out" in said


def test_documents_that_cannot_be_read_are_counted_or_an_error(tmp_path, tokenizer):
    lines = tmp_path / "data.jsonl"
    lines.write_bytes(b'{"text": "1"}\n{"text": 1}\nbroken\n{"body": "2"}\n{"text": "3"}\n{"text": "\xff"}\n')
    said = prepare(tokenizer, tmp_path / "data", "--input", lines, "--on-error", "skip")
    assert documents_of(tmp_path / "data") == [[1], [3]]
    assert "2 documents, 2 tokens of uint16; 4 unreadable documents skipped" in said
    before = pair_of(tmp_path / "data")
    said = prepare(tokenizer, tmp_path / "data", "--input", lines, code=2)
    assert said.startswith(f"--text-field: 'text' in {lines}:2 is 1, not text; name a field that holds text\n")
    assert pair_of(tmp_path / "data") == before  # of the run before
    assert not Path(f"{tmp_path}/data.partial").exists()


def test_wrong_input_is_named_with_its_flag(tmp_path, tokenizer):
    good = write_lines(tmp_path / "good.jsonl", [[1]])
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "1"}\n{"text"\n')
    cases = [
        (["--input", broken], f"--input: {broken}:2 is not JSON (Expecting ':' delimiter at column 8); mend or remove"),
        (["--input", tmp_path / "no.jsonl"], f"--input: {tmp_path}/no.jsonl does not exist; "),
        (["--input", tmp_path / "no*.jsonl"], f"--input: {tmp_path}/no*.jsonl matches no file; mend the pattern"),
        (
            ["--input", good, "--text-field", "body"],
            f"--text-field: 'body' is not in {good}:1, which has 'text'; name the field with the text",
        ),
        (["--input", good, "--split", "test"], f"--split: 'test' is given, but {good} is no Hugging Face data set"),
        (
            ["--input", good, "--workers", 0, "--partitions", -1],
            "--workers: 0 is too small; give 1 or more\n--partitions: -1 is too small; give 1 or more",
        ),
        (
            ["--input", good, "--pack-to-seq-len", 8],
            f"--input: {good} gives no document (1 tokens); give more text or a smaller --pack-to-seq-len",
        ),
        (["--input", good, "--tokenizer", tmp_path], f"--tokenizer: {tmp_path} holds no tokenizer.json; give a folder"),
    ]
    for arguments, message in cases:
        said = prepare(tokenizer, tmp_path / "data", *arguments, code=2)
        assert said.startswith(message), said
        assert "Traceback" not in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken.jsonl", "good.jsonl"]


def test_a_tokenizer_that_transformers_would_change_is_refused(tmp_path):
    lines = write_lines(tmp_path / "data.jsonl", [[1]])
    for name, config, fact in (
        ("added", {"added_tokens_decoder": {"1001": {"content": "<x>"}}}, "adds the token '<x>', which tokenizer.json"),
        ("none", {"eos_token": None}, "names no EOS token"),
        ("other", {"eos_token": {"content": "</s>"}}, "lacks the EOS token"),
    ):
        folder = number_tokenizer(tmp_path / name, **config)
        said = prepare(folder, tmp_path / "data", "--input", lines, code=2)
        assert said.startswith("--tokenizer: ")
        assert fact in said


def start_and_kill(arguments: list, folder: Path) -> bool:
    """Starts the tool, saving its position after every batch, and kills it after a new one; False if it ended first."""
    code = (
        "import sys; from hyper_parallel.data_tools import __main__, prepare; prepare.SAVE_SECONDS = 0; "
        "sys.exit(__main__.main(sys.argv[1:]))"
    )
    progress = folder / "progress.json"
    before = progress.read_bytes() if progress.exists() else None
    process = subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], stderr=subprocess.PIPE)
    children: set[int] = set()
    while process.poll() is None:
        children |= {int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()}
        if progress.exists() and progress.read_bytes() != before:
            os.kill(process.pid, signal.SIGKILL)
            break
        time.sleep(0.005)
    process.communicate()
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in children):  # workers end with their parent
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    "flags", [[], ["--pack-to-seq-len", "100"], ["--partitions", "3", "--pack-to-seq-len", "33"]], ids=str
)
def test_killed_and_started_again_it_ends_in_the_same_bytes(tmp_path, tokenizer, flags):
    documents = numbered(30_000, longest=60)
    files = [write_lines(tmp_path / f"{i}.jsonl", documents[i::3]) for i in range(3)]
    arguments = ["--input", *files, "--append-eod", *flags]
    prepare(tokenizer, tmp_path / "straight", *arguments)
    command = ["prepare", "--tokenizer", tokenizer, "--output-prefix", tmp_path / "data", *arguments]
    kills = 0
    while kills < 2 and start_and_kill(command, tmp_path / "data.partial"):
        kills += 1
        assert not (tmp_path / "data.bin").exists()
        assert not (tmp_path / "data.idx").exists()
    assert kills == 2
    position = json.loads((tmp_path / "data.partial/progress.json").read_text())["documents"]
    assert 0 < position < 30_000
    said = prepare(tokenizer, tmp_path / "data", *arguments)
    assert f"data.partial: going on after {position:,} documents" in said
    assert pair_of(tmp_path / "data") == pair_of(tmp_path / "straight")
    assert not (tmp_path / "data.partial").exists()


def test_it_does_not_go_on_with_something_else(tmp_path, tokenizer):
    lines = write_lines(tmp_path / "data.jsonl", numbered(20_000, longest=60))
    command = ["prepare", "--tokenizer", tokenizer, "--output-prefix", tmp_path / "data", "--input", lines]
    assert start_and_kill(command, tmp_path / "data.partial")
    said = prepare(tokenizer, tmp_path / "data", "--input", lines, "--append-eod", code=2)
    partial = tmp_path / "data.partial"
    assert said == (
        f"--append-eod: True here, but {partial} was begun with False; give what it was begun with, or remove "
        f"{partial}\n"
    )
    lines.write_text(lines.read_text() + '{"text": "7"}\n')
    said = prepare(tokenizer, tmp_path / "data", "--input", lines, code=2)
    assert said.startswith(f"--input: [['{lines}', '")


@pytest.mark.parametrize("partitions", [1, 2])
@pytest.mark.parametrize("finished", [0, 1, 2])
def test_killed_while_it_finishes_it_is_finished_by_the_next(tmp_path, tokenizer, monkeypatch, partitions, finished):
    documents = numbered(300)
    lines = write_lines(tmp_path / "data.jsonl", documents)
    arguments = ["prepare", "--tokenizer", str(tokenizer), "--input", str(lines), "--partitions", str(partitions)]
    finalize, done = IndexedWriter.finalize, []

    def killed(self):
        if len(done) == finished:
            raise KeyboardInterrupt
        done.append(self)
        finalize(self)

    monkeypatch.setattr(IndexedWriter, "finalize", killed)
    finals = 1 if partitions == 1 else partitions + 1
    code = command_line.main([*arguments, "--output-prefix", str(tmp_path / "data")])
    assert code == (130 if finished < finals else 0)
    monkeypatch.undo()
    assert command_line.main([*arguments, "--output-prefix", str(tmp_path / "data")]) == 0
    assert documents_of(tmp_path / "data") == [d for part in range(partitions) for d in documents[part::partitions]]


def test_a_second_one_at_the_same_prefix_is_refused(tmp_path, tokenizer):
    from filelock import FileLock

    (tmp_path / "data.partial").mkdir()
    lines = write_lines(tmp_path / "data.jsonl", [[1]])
    with FileLock(tmp_path / "data.partial" / "lock"):
        said = prepare(tokenizer, tmp_path / "data", "--input", lines, code=2)
    assert said == (
        f"--output-prefix: another process is writing {tmp_path}/data; wait for it, or give another prefix\n"
    )


def test_a_worker_that_is_killed_is_told_and_the_next_run_goes_on(tmp_path, tokenizer):
    documents = numbered(60_000, longest=60)
    lines = write_lines(tmp_path / "data.jsonl", documents)
    command = [sys.executable, "-m", "hyper_parallel.data_tools", "prepare", "--tokenizer", tokenizer]
    command += ["--output-prefix", tmp_path / "data", "--input", lines, "--workers", "1"]
    process = subprocess.Popen([*map(str, command)], stderr=subprocess.PIPE, text=True)
    workers: list[int] = []
    while not workers and process.poll() is None:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        workers = [int(pid) for pid in children if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()]
    time.sleep(0.1)
    os.kill(workers[0], signal.SIGKILL)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "a worker process was killed near document" in said
    assert "the same command goes on from there" in said
    assert "Traceback" not in said
    prepare(tokenizer, tmp_path / "data", "--input", lines)
    assert documents_of(tmp_path / "data") == documents


def test_a_worker_that_is_killed_while_it_starts_is_no_fault_of_the_output(tmp_path, tokenizer, monkeypatch, capsys):
    """Its parent then fails to write to it: an OSError, as when the output cannot be written."""

    def start(self: object, *arguments: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(multiprocessing.get_context("spawn").Process, "start", start)
    lines = write_lines(tmp_path / "data.jsonl", [[1]])
    arguments = ["--tokenizer", str(tokenizer), "--output-prefix", str(tmp_path / "data"), "--input", str(lines)]
    assert command_line.main(["prepare", *arguments]) == 1
    assert capsys.readouterr().err.startswith("a worker process was killed near document 0 ")


def peak_kilobytes(tokenizer: Path, prefix: Path, lines: Path) -> tuple[int, int]:
    """The largest resident sets, in KiB, of the tool and of one of its workers."""
    code = (
        "import pathlib, re, resource, sys; from hyper_parallel.data_tools.__main__ import main; "
        "code = main(sys.argv[1:]); "
        # Of itself, ru_maxrss would be that of the process that has forked it.
        "own = re.search(r'VmHWM:\\s+(\\d+)', pathlib.Path('/proc/self/status').read_text())[1]; "
        "print(code, own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    command = [sys.executable, "-c", code, "prepare", "--tokenizer", tokenizer, "--input", lines]
    command += ["--output-prefix", prefix]
    result = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=200, check=True)
    code, own, workers = map(int, result.stdout.split())
    assert code == 0
    return own, workers


def test_memory_does_not_grow_with_the_input(tmp_path, tokenizer):
    text = json.dumps({"text": text_of(range(200, 700))}) + "\n"  # 2 KB, 500 tokens
    peaks = []
    for kilobytes in (4_000, 40_000):
        lines = tmp_path / f"{kilobytes}.jsonl"
        lines.write_text(text * (kilobytes // 2))
        peaks.append(peak_kilobytes(tokenizer, tmp_path / "data", lines))
    for small, large in zip(*peaks, strict=True):
        assert large - small < 12_000, peaks


def test_it_starts_without_torch():
    code = (
        "import sys; import hyper_parallel.data_tools.__main__, hyper_parallel.data_tools.prepare, "
        "hyper_parallel.data_tools.workers; "
        "print([name for name in ('torch', 'transformers', 'datasets', 'pyarrow') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_a_pair_is_read_by_megatron_core(tmp_path, tokenizer):
    pytest.importorskip("megatron.core", reason="megatron-core is in the dev extra")
    from tests.components.data.indexed import megatron

    documents = numbered(200)
    prepare(tokenizer, tmp_path / "data", "--input", write_lines(tmp_path / "data.jsonl", documents), "--append-eod")
    megatron.write_pair(tmp_path / "theirs", [[*document, EOS] for document in documents], np.uint16)
    assert pair_of(tmp_path / "data") == pair_of(tmp_path / "theirs")
    assert len(IndexedDataset(tmp_path / "data")) == 200
