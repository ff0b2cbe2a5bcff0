"""What a user can get wrong, through the front door: the message, the exit code, and what is left."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hyper_parallel import train as cli
from hyper_parallel.assets import TOKENIZER_FOLDER
from hyper_parallel.components.checkpoint.storage import complete_steps
from tests.trainer.runs import metrics

RECIPE = ("--recipe", "tests.trainer.runs.saved_every_second_step")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")


Train = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def train(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Train:
    """Trains in this process, or on two ranks under a launcher: the exit code, and the lines on stderr that are not log
    lines, which begin with a time of day."""
    # Or a handler would go on to write to this test's stderr, in the next one too.
    monkeypatch.setattr(logging.getLogger("hyper_parallel"), "handlers", [logging.NullHandler()])

    def trained(folder: Path, *argv: str, ranks: int = 1) -> tuple[int, list[str]]:
        words = [*RECIPE, "--dump_folder", str(folder), *argv]
        if ranks == 1:
            code = cli.main(words)
        else:
            command = [sys.executable, *TORCHRUN, "-m", "hyper_parallel.train", *words]
            code = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=200).returncode
        return code, [line for line in capfd.readouterr().err.splitlines() if not line[:2].isdigit()]

    return trained


def test_empty_corpus(tmp_path: Path, train: Train) -> None:
    corpus = tmp_path / "empty.jsonl"
    corpus.write_text("")
    code, (line,) = train(tmp_path / "out", "--dataloader.path", str(corpus))
    assert code == 2
    assert line.startswith(f"dataloader.path: {corpus}") and "; " in line


def test_tokenizer_without_an_end_of_sequence(tmp_path: Path, train: Train) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes((TOKENIZER_FOLDER / "tokenizer.json").read_bytes())
    settings = json.loads((TOKENIZER_FOLDER / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in settings.items() if k != "eos_token"}))
    code, (line,) = train(tmp_path / "out", "--hf_assets_path", str(folder))
    assert code == 2
    assert line.startswith("hf_assets_path: ") and str(folder) in line and "eos_token" in line


def test_more_token_ids_than_the_model_embeds(tmp_path: Path, train: Train) -> None:
    code, lines = train(tmp_path / "out", "--model_spec.model.vocab_size", "100")
    assert code == 2
    assert lines == [
        "tokenizer: it has 4096 entries, but the model's vocab_size is 100; choose a tokenizer with 100 entries or "
        "fewer, or a model with a larger vocab_size"
    ]


@pytest.mark.parametrize(("ranks", "mode"), [(1, "none"), (2, "thread")])
def test_a_loss_that_is_not_finite_stops_every_rank(tmp_path: Path, train: Train, ranks: int, mode: str) -> None:
    """A learning rate beyond all reason: the weights of step 2 are finite, their loss or its gradient is not."""
    explode = ("--optimizer.lr", "1e300", "--lr_scheduler.warmup_steps", "2", "--training.max_grad_norm", "None")
    code, lines = train(tmp_path, *explode, "--checkpoint.async_mode", mode, ranks=ranks)
    # torchrun reports a failed rank by a code of its own, which is also 1.
    assert code == 1
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 1, lines
    what = r"error: step 3: the (loss|gradient norm) is (nan|inf), so no weight was changed; "
    assert re.match(what + "the last finite checkpoint is ", errors[0]), errors[0]
    assert "step-2" in errors[0] and "lower optimizer.lr" in errors[0]
    assert complete_steps(tmp_path / "checkpoint") == [2]
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2]


def test_a_dump_folder_that_cannot_be_made(tmp_path: Path, train: Train) -> None:
    (tmp_path / "file").write_text("")
    code, (line,) = train(tmp_path / "file" / "out")
    assert code == 2
    assert line.startswith(f"dump_folder: '{tmp_path / 'file' / 'out'}' cannot be written: Not a directory; ")


def test_a_disk_that_is_full_when_the_run_is_saved(tmp_path: Path, train: Train) -> None:
    """A real small disk, which holds the first checkpoint and not the second."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=11m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("a small disk can be mounted by root only")
    try:
        code, lines = train(disk / "out", "--checkpoint.keep_latest_k", "None")
        assert code == 1
        (error,) = [line for line in lines if line.startswith("error: ")]
        assert "No space left on device" in error and f"{disk / 'out' / 'checkpoint' / 'step-2'}" in error
        assert complete_steps(disk / "out" / "checkpoint") == [2]
        before = metrics(disk / "out")
        subprocess.run(["mount", "-o", "remount,size=100m", str(disk)], check=True)
        assert train(disk / "out")[0] == 0
        after = metrics(disk / "out")
        assert [line["step"] for line in after] == list(range(1, 21))
        assert [line["loss"] for line in after[: len(before)]] == [line["loss"] for line in before]
    finally:
        subprocess.run(["umount", str(disk)], check=True)
