"""What a user can get wrong, through the front door: the message, the exit code, and what is left."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hyper_parallel.assets import TOKENIZER_FOLDER
from hyper_parallel.components.checkpoint.storage import complete_steps
from tests.trainer.runs import metrics

RECIPE = ("--recipe", "tests.trainer.runs.saved_every_second_step")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")


def train(folder: Path, *argv: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    launcher = TORCHRUN if ranks == 2 else ()
    return subprocess.run(
        [sys.executable, *launcher, "-m", "hyper_parallel.train", *RECIPE, "--dump_folder", str(folder), *argv],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )


def faults(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Lines on stderr that are not log lines, which begin with a time of day."""
    return [line for line in done.stderr.splitlines() if not line[:2].isdigit()]


def test_empty_corpus(tmp_path: Path) -> None:
    corpus = tmp_path / "empty.jsonl"
    corpus.write_text("")
    done = train(tmp_path / "out", "--dataloader.path", str(corpus))
    assert done.returncode == 2
    (line,) = faults(done)
    assert line.startswith(f"dataloader.path: {corpus}") and "; " in line


def test_tokenizer_without_an_end_of_sequence(tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes((TOKENIZER_FOLDER / "tokenizer.json").read_bytes())
    settings = json.loads((TOKENIZER_FOLDER / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in settings.items() if k != "eos_token"}))
    done = train(tmp_path / "out", "--hf_assets_path", str(folder))
    assert done.returncode == 2
    (line,) = faults(done)
    assert line.startswith("hf_assets_path: ") and str(folder) in line and "eos_token" in line


def test_more_token_ids_than_the_model_embeds(tmp_path: Path) -> None:
    done = train(tmp_path / "out", "--model_spec.model.vocab_size", "100")
    assert done.returncode == 2
    assert faults(done) == [
        "tokenizer: it has 4096 entries, but the model's vocab_size is 100; choose a tokenizer with 100 entries or "
        "fewer, or a model with a larger vocab_size"
    ]


@pytest.mark.parametrize(("ranks", "mode"), [(1, "none"), (2, "thread")])
def test_a_loss_that_is_not_finite_stops_every_rank(tmp_path: Path, ranks: int, mode: str) -> None:
    """A learning rate beyond all reason: the weights of step 2 are finite, their loss or its gradient is not."""
    explode = ("--optimizer.lr", "1e300", "--lr_scheduler.warmup_steps", "2", "--training.max_grad_norm", "None")
    done = train(tmp_path, *explode, "--checkpoint.async_mode", mode, ranks=ranks)
    # torchrun reports a failed rank by a code of its own, which is also 1.
    assert done.returncode == 1
    errors = [line for line in faults(done) if line.startswith("error: ")]
    assert len(errors) == 1, done.stderr
    what = r"error: step 3: the (loss|gradient norm) is (nan|inf), so no weight was changed; "
    assert re.match(what + "the last finite checkpoint is ", errors[0]), errors[0]
    assert "step-2" in errors[0] and "lower optimizer.lr" in errors[0]
    assert complete_steps(tmp_path / "checkpoint") == [2]
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2]


def test_a_dump_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = train(tmp_path / "file" / "out")
    assert done.returncode == 2
    (line,) = faults(done)
    assert line.startswith(f"dump_folder: '{tmp_path / 'file' / 'out'}' cannot be written: Not a directory; ")


def test_a_disk_that_is_full_when_the_run_is_saved(tmp_path: Path) -> None:
    """A real small disk, which holds the first checkpoint and not the second."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=11m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("a small disk can be mounted by root only")
    try:
        done = train(disk / "out", "--checkpoint.keep_latest_k", "None")
        assert done.returncode == 1
        (error,) = [line for line in faults(done) if line.startswith("error: ")]
        assert "No space left on device" in error and f"{disk / 'out' / 'checkpoint' / 'step-2'}" in error
        assert complete_steps(disk / "out" / "checkpoint") == [2]
        before = metrics(disk / "out")
        subprocess.run(["mount", "-o", "remount,size=100m", str(disk)], check=True)
        assert train(disk / "out").returncode == 0
        after = metrics(disk / "out")
        assert [line["step"] for line in after] == list(range(1, 21))
        assert [line["loss"] for line in after[: len(before)]] == [line["loss"] for line in before]
    finally:
        subprocess.run(["umount", str(disk)], check=True)
