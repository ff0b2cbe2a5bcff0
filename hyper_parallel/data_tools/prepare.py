"""Text into a pair PREFIX.bin, PREFIX.idx, tokenised by several processes.

The parent reads and writes; worker processes tokenise batches of texts, without torch. Batches are written in the order
in which they were read, and now and then the position behind the last one is put beside them, so the same command, run
again after it was killed, goes on from there and ends in the same bytes. Memory holds a few batches, whatever the size
of the input.
"""

from __future__ import annotations

import argparse
import glob
import itertools
import json
import logging
import multiprocessing
import os
import shutil
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from filelock import FileLock, Timeout
from tqdm import tqdm

from hyper_parallel.components.data.indexed.indexed_dataset import IndexedDataset
from hyper_parallel.components.data.indexed.indexed_writer import (
    IndexedWriter,
    finished_folder,
    partial_folder,
    publish,
)
from hyper_parallel.components.data.indexed.pair_format import pair_paths
from hyper_parallel.components.data.sources import FileSource, HuggingFaceSource, IndexedSource, choose_source
from hyper_parallel.components.data.transforms import PlainTextTransform
from hyper_parallel.config.errors import ConfigError, Fault, RunError, raise_faults
from hyper_parallel.data_tools.fast_tokenizer import FastTokenizer
from hyper_parallel.data_tools.workers import encode, start_worker

logger = logging.getLogger(__name__)

_PROGRESS = "progress.json"
SAVE_SECONDS = 2.0
"""Least time between two positions that are saved."""

_BATCH_TEXTS = 512
_BATCH_CHARACTERS = 1 << 17  # what tokenizers makes beside the ids is a hundred bytes a token
_MANAGER_SECONDS = 3.0
"""How long Python's own thread has to clean up behind a dead worker."""
_FLAGS = {"dataloader.path": "--input", "dataloader.text_field": "--text-field", "dataloader.subset": "--subset"}
"""Where sources say that a fault is -> the flag that gave it."""


class WorkerError(RunError):
    """A process that tokenises has ended."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The tool's command line."""
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="FILE|GLOB", help="what to read; a file is read once")
    add("--output-prefix", required=True, metavar="PREFIX", help="write PREFIX.bin and PREFIX.idx")
    add("--tokenizer", required=True, metavar="FOLDER", help="folder with a tokenizer.json")
    add("--subset", metavar="NAME", help="of a Hugging Face data set")
    add("--split", metavar="NAME", help="of a Hugging Face data set (default: train)")
    add("--text-field", default="text", metavar="NAME", help="field or column that holds the text (default: text)")
    add("--workers", type=int, default=2, metavar="N", help="processes that tokenise (default: 2)")
    add("--append-eod", action="store_true", help="end each document in the tokenizer's EOS token")
    add("--pack-to-seq-len", type=int, metavar="N", help="write records of N + 1 tokens; the last tokens are dropped")
    add("--partitions", type=int, default=1, metavar="K", help="deal documents to K parts, written one after the other")
    add("--on-error", choices=("raise", "skip"), default="raise", help="at a document that cannot be read (or: skip)")


def run(arguments: argparse.Namespace) -> None:
    """Prepares the pair, or goes on where an earlier run was killed.

    Raises:
        ConfigError: an argument is wrong, or the input cannot be read.
        WorkerError: a worker process was killed.
    """
    raise_faults(_faults(arguments))
    tokenizer = FastTokenizer(arguments.tokenizer)
    folder = partial_folder(arguments.output_prefix)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / "lock", timeout=0):
            try:
                _Preparation(arguments, tokenizer).run()
            except ConfigError as error:
                raise ConfigError(
                    Fault(_FLAGS.get(fault.path, fault.path), fault.fact, fault.remedy) for fault in error.faults
                ) from error
            finally:
                if not (folder / _PROGRESS).exists():
                    shutil.rmtree(folder, ignore_errors=True)  # nothing to go on from
    except Timeout as error:
        fact = f"another process is writing {arguments.output_prefix}"
        raise ConfigError.one("--output-prefix", fact, "wait for it, or give another prefix") from error
    except OSError as error:
        fact = f"{arguments.output_prefix} cannot be written ({error})"
        raise ConfigError.one("--output-prefix", fact, "mend that; the same command goes on from there") from error


def _faults(arguments: argparse.Namespace) -> Iterator[Fault]:
    for name in ("workers", "partitions", "pack_to_seq_len"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            yield Fault(f"--{name.replace('_', '-')}", f"{value} is too small", "give 1 or more")


class _Batch(NamedTuple):
    texts: list[str]
    position: dict[str, Any]
    """Behind its last text."""


class _Preparation:
    """One run of the tool."""

    def __init__(self, arguments: argparse.Namespace, tokenizer: FastTokenizer) -> None:
        self._arguments, self._tokenizer = arguments, tokenizer
        self._transform = PlainTextTransform.Config(field=arguments.text_field).build(tokenizer=tokenizer, seq_len=1)
        self._paths = find_inputs(arguments.input)
        self._sources = [self._source(path) for path in self._paths]
        self._folder = partial_folder(arguments.output_prefix)
        self._what = {
            "--input": [[path, source.fingerprint] for path, source in zip(self._paths, self._sources, strict=True)],
            "--subset": arguments.subset,
            "--split": arguments.split,
            "--tokenizer": tokenizer.fingerprint,
            "--text-field": arguments.text_field,
            "--append-eod": arguments.append_eod,
            "--pack-to-seq-len": arguments.pack_to_seq_len,
            "--partitions": arguments.partitions,
            "--on-error": arguments.on_error,
        }
        self._position: dict[str, Any] = {"input": 0, "source": None, "skipped": 0}
        self._documents = self._empty = 0
        self._saved_at = time.monotonic()

    def run(self) -> None:
        """Prepares the pair."""
        arguments = self._arguments
        if self._publish_finished():
            return
        saved = self._load()
        packing = arguments.pack_to_seq_len
        prefixes = [arguments.output_prefix]
        if arguments.partitions > 1:
            prefixes = [str(self._folder / f"part{k}") for k in range(arguments.partitions)]
        states = [None] * len(prefixes) if saved is None else saved["outputs"]
        self._outputs = [
            _Output(prefix, self._tokenizer.dtype, packing and packing + 1, state, is_part=len(prefixes) > 1)
            for prefix, state in zip(prefixes, states, strict=True)
        ]
        with tqdm(initial=self._documents, unit=" documents", unit_scale=True, disable=None) as bar:
            for position, ids, lengths in self._encoded():
                if len(lengths):  # the last batch may hold none
                    self._add(ids, lengths)
                self._position = position
                bar.update(len(lengths))
                if time.monotonic() - self._saved_at >= SAVE_SECONDS:
                    self._save()
        self._finish()

    def _finish(self) -> None:
        prefix = self._arguments.output_prefix
        tokens = sum(output.tokens for output in self._outputs)
        dropped = sum(len(output.rest) for output in self._outputs)
        if tokens == 0:
            (self._folder / _PROGRESS).unlink(missing_ok=True)  # there is nothing to go on from
            remedy = "give more text or a smaller --pack-to-seq-len"
            fact = f"{', '.join(self._arguments.input)} gives no document" + f" ({dropped} tokens)" * bool(dropped)
            raise ConfigError.one("--input", fact, remedy)
        self._save()
        for output in self._outputs:
            output.finalize()
        if len(self._outputs) > 1:
            with IndexedWriter(prefix, self._tokenizer.dtype) as writer:
                for output in self._outputs:
                    writer.add_dataset(IndexedDataset(output.prefix))
        notes = [
            f"{number:,} {what}"
            for number, what in (
                (self._empty, "empty documents left out"),
                (self._position["skipped"], "unreadable documents skipped"),
                (dropped, "tokens at the end dropped"),
            )
            if number
        ]
        logger.info(
            "%s: %s documents, %s tokens of %s%s",
            prefix,
            f"{self._documents - self._empty:,}",
            f"{tokens:,}",
            self._tokenizer.dtype,
            "".join(f"; {note}" for note in notes),
        )

    def _add(self, ids: npt.NDArray[Any], lengths: npt.NDArray[np.int32]) -> None:
        """Writes the documents of a batch; empty ones are counted."""
        parts = len(self._outputs)
        owners = (self._documents + np.arange(len(lengths))) % parts
        for k, output in enumerate(self._outputs):
            if parts == 1:
                output.add(ids, lengths[lengths > 0])
            else:
                mine = owners == k
                output.add(ids[np.repeat(mine, lengths)], lengths[mine & (lengths > 0)])
        self._documents += len(lengths)
        self._empty += int(np.count_nonzero(lengths == 0))

    def _encoded(self) -> Iterator[tuple[dict[str, Any], npt.NDArray[Any], npt.NDArray[np.int32]]]:
        """(position behind it, ids, lengths) of each batch, in the order of the input."""
        arguments = self._arguments
        pool = ProcessPoolExecutor(
            arguments.workers,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=start_worker,
            initargs=(arguments.tokenizer, arguments.append_eod),
        )
        running: deque[tuple[dict[str, Any], Future[tuple[npt.NDArray[Any], npt.NDArray[np.int32]]]]] = deque()
        batches = self._batches()
        try:
            while True:
                for batch in itertools.islice(batches, 2 * arguments.workers + 2 - len(running)):
                    running.append((batch.position, pool.submit(encode, batch.texts)))
                if not running:
                    return
                position, future = running.popleft()
                yield position, *future.result()
        except (BrokenProcessPool, BrokenPipeError) as error:  # the latter: it died while it started
            # Some Pythons wait for a thread that writes to the dead worker's full pipe, which somebody must close
            # (https://github.com/python/cpython/issues/94777). Others close it, and fall if it is closed already.
            manager = pool._executor_manager_thread  # type: ignore[attr-defined]
            if manager is not None:
                manager.join(_MANAGER_SECONDS)
            if manager is not None and manager.is_alive():
                pool._call_queue._reader.close()  # type: ignore[attr-defined]
            raise WorkerError(
                f"a worker process was killed near document {self._documents} (is there enough memory?); the same "
                "command goes on from there"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)

    def _batches(self) -> Iterator[_Batch]:
        """The texts from the position on."""
        texts: list[str] = []
        characters = skipped_texts = 0
        first, skipped_before = self._position["input"], self._position["skipped"]
        for number in range(first, len(self._sources)):
            source = self._sources[number]
            if number == first and self._position["source"] is not None:
                source.load_state_dict(self._position["source"])
            for record in source:
                try:
                    text = self._transform.read(record)
                except ConfigError as error:
                    if self._arguments.on_error == "raise":
                        raise
                    skipped_texts += 1
                    logger.warning("skipped: %s", error)
                    continue
                texts.append(text)
                characters += len(text)
                if len(texts) == _BATCH_TEXTS or characters >= _BATCH_CHARACTERS:
                    skipped = skipped_before + skipped_texts + getattr(source, "skipped", 0)
                    yield _Batch(texts, {"input": number, "source": source.state_dict(), "skipped": skipped})
                    texts, characters = [], 0
            skipped_before += getattr(source, "skipped", 0)
        # Also without texts, for the documents that were skipped at the very end.
        yield _Batch(texts, {"input": len(self._sources), "source": None, "skipped": skipped_before + skipped_texts})

    def _source(self, path: str) -> FileSource | HuggingFaceSource | IndexedSource:
        arguments = self._arguments
        config = choose_source(path, subset=arguments.subset, split=arguments.split or "train")
        if arguments.split is not None and not isinstance(config, HuggingFaceSource.Config):
            fact = f"{arguments.split!r} is given, but {path} is no Hugging Face data set"
            raise ConfigError.one("--split", fact, "remove it")
        return config.build(on_error=arguments.on_error)

    def _publish_finished(self) -> bool:
        """Whether an earlier run of this command had written all but the final names."""
        prefix = self._arguments.output_prefix
        file = finished_folder(prefix) / _PROGRESS
        finished = file.exists() and json.loads(file.read_text())["what"] == json.loads(json.dumps(self._what))
        publish(prefix)
        if finished:
            logger.info("%s: was finished by an earlier run", prefix)
        return finished

    def _save(self) -> None:
        outputs = [output.checkpoint() for output in self._outputs]
        counts = {"documents": self._documents, "empty": self._empty}
        progress = {"what": self._what, "position": self._position, "outputs": outputs, **counts}
        file = self._folder / _PROGRESS
        file.with_suffix(".new").write_text(json.dumps(progress))
        file.with_suffix(".new").replace(file)
        self._saved_at = time.monotonic()

    def _load(self) -> dict[str, Any] | None:
        file = self._folder / _PROGRESS
        if not file.exists():
            return None
        saved = json.loads(file.read_text())
        remedy = f"give what it was begun with, or remove {self._folder}"
        raise_faults(
            Fault(
                flag, f"{_short(value)} here, but {self._folder} was begun with {_short(saved['what'][flag])}", remedy
            )
            for flag, value in json.loads(json.dumps(self._what)).items()
            if saved["what"][flag] != value
        )
        self._position, self._documents, self._empty = saved["position"], saved["documents"], saved["empty"]
        logger.info("%s: going on after %s documents", self._folder, f"{self._documents:,}")
        return saved


class _Output:
    """One pair that is written: documents as they come, or records of one length."""

    def __init__(
        self, prefix: str, dtype: Any, record: int | None, state: dict[str, Any] | None, *, is_part: bool
    ) -> None:
        self.prefix = prefix
        self._state = state or {}
        # A part whose pair is there was finished before the run was killed.
        is_finished = is_part and state is not None and pair_paths(prefix).idx.exists()
        self._writer = None if is_finished else IndexedWriter(prefix, dtype, state=state and state["writer"])
        self._record = record
        self.rest = np.array([] if state is None else state["rest"], dtype)
        """Tokens that do not fill a record yet."""

    @property
    def tokens(self) -> int:
        """Written so far."""
        return self._state["writer"]["tokens"] if self._writer is None else self._writer.tokens

    def finalize(self) -> None:
        """Makes the pair whole."""
        if self._writer is not None:
            self._writer.finalize()

    def add(self, ids: npt.NDArray[Any], lengths: npt.NDArray[np.int32]) -> None:
        """Adds documents, one after the other in `ids`."""
        assert self._writer is not None, "a part is finished after all documents"
        if self._record is None:
            self._writer.add_documents(ids, lengths)
            return
        stream = np.concatenate((self.rest, ids))
        records = len(stream) // self._record
        self._writer.add_documents(stream[: records * self._record], np.full(records, self._record))
        self.rest = stream[records * self._record :]

    def checkpoint(self) -> dict[str, Any]:
        """The state, with all that was added on the disk."""
        if self._writer is None:
            return self._state
        return {"writer": self._writer.checkpoint(), "rest": self.rest.tolist()}


def find_inputs(given: Sequence[str]) -> list[str]:
    """The files that are meant, each once, in the order given; what is no file stands as it is.

    Raises:
        ConfigError: a pattern matches nothing.
    """
    paths: dict[str, str] = {}
    for name in given:
        found = [name]
        if glob.has_magic(name) and not Path(name).exists():
            found = sorted(file for file in glob.glob(name, recursive=True) if Path(file).is_file())
            if not found:
                raise ConfigError.one("--input", f"{name} matches no file", "mend the pattern")
        for path in found:
            paths.setdefault(os.path.realpath(path), path)
    return list(paths.values())


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) < 100 else f"{text[:97]}..."
