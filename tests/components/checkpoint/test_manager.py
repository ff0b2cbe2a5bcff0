from __future__ import annotations

import errno
import logging
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hyper_parallel.components.checkpoint import CheckpointError, CheckpointManager
from tests.components.checkpoint.run import Run
from tests.distributed import tiny_decoder
from tests.distributed_world import run_world

DROPOUT = {"dropout": 0.2}


def folders(run: Run | Path) -> list[str]:
    root = run if isinstance(run, Path) else run.manager._root
    return sorted(folder.name for folder in root.iterdir())


# Resume


def _straight_and_resumed(folder: str, steps: int) -> dict[str, Any]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    straight = Run(folder, model=DROPOUT)
    random.seed(rank), np.random.seed(rank)
    straight.train(steps)
    straight.manager.save(steps)
    saved = straight.tensors()
    random_state = (torch.get_rng_state(), random.getstate(), np.random.get_state())
    draws = straight.draws()
    torch.set_rng_state(random_state[0])
    losses = straight.train(steps)

    random.seed(99), np.random.seed(99)
    resumed = Run(folder, model=DROPOUT)
    step = resumed.manager.load()
    loaded = resumed.tensors()
    resumed_state = torch.get_rng_state()
    resumed_draws = resumed.draws()
    torch.set_rng_state(resumed_state)
    return {
        "step": step,
        "loaded": (saved, loaded),
        "draws": (draws, resumed_draws),
        "losses": (losses, resumed.train(steps)),
        "end": (straight.tensors(), resumed.tensors()),
        "counters": [c.loaded for c in (resumed.lr_schedulers, resumed.dataloader, resumed.train_state)],
    }


@pytest.mark.parametrize("nproc", [1, 2])
def test_resumed_run_is_bitwise_the_straight_one(nproc: int, tmp_path: Path) -> None:
    results = (
        [_straight_and_resumed(str(tmp_path), 3)]
        if nproc == 1
        else run_world(nproc, _straight_and_resumed, str(tmp_path), 3)
    )
    for result in results:
        assert result["step"] == 3
        assert result["counters"] == [[6], [3], [9]]
        for key in ("loaded", "end"):
            one, other = result[key]
            assert one.keys() == other.keys()
            assert any("exp_avg_sq" in name for name in one)
            for name in one:
                assert torch.equal(one[name], other[name]), (key, name)
        assert result["draws"][0] == result["draws"][1]
        assert result["losses"][0] == result["losses"][1]
    if nproc == 2:
        assert results[0]["draws"] != results[1]["draws"]  # every rank has its own


def _save(folder: str, tied: bool) -> dict[str, torch.Tensor]:
    run = Run(folder, model={"tied": tied})
    run.train(2)
    run.manager.save(2)
    saved = run.tensors()
    return saved | {"next": torch.tensor(run.train(2))}


def _load(folder: str, tied: bool) -> dict[str, Any]:
    run = Run(folder, model={"tied": tied})
    assert run.manager.load() == 2
    loaded = run.tensors()
    kept = torch.equal(torch.get_rng_state(), _fresh_state(run))
    return {"tensors": loaded | {"next": torch.tensor(run.train(2))}, "kept_rng": kept}


def _fresh_state(run: Run) -> torch.Tensor:
    return torch.Generator().manual_seed(100 + run.dims.dp_rank).get_state()


@pytest.mark.parametrize(("saver", "loader", "tied"), [(1, 2, False), (2, 1, True), (2, 3, False)])
def test_another_number_of_ranks(saver: int, loader: int, tied: bool, tmp_path: Path) -> None:
    """State is equal, the curve goes on, and a rank that the checkpoint does not know keeps its own random state."""

    def on(nproc: int, function: Any) -> list[Any]:
        return [function(str(tmp_path), tied)] if nproc == 1 else run_world(nproc, function, str(tmp_path), tied)

    saved = on(saver, _save)[0]
    results = on(loader, _load)
    for rank, result in enumerate(results):
        assert result["tensors"].keys() == saved.keys()
        for name, tensor in saved.items():
            tolerance = 1e-12 if name == "next" else 0.0
            if name == "next" and loader == 3:
                continue  # 8 rows do not divide by 3
            torch.testing.assert_close(result["tensors"][name], tensor, rtol=0, atol=tolerance)
        if rank >= saver:
            assert result["kept_rng"]


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    from torch.distributed.checkpoint import FileSystemReader

    run = Run(tmp_path, model={"tied": True})
    run.manager.save(1)
    names = FileSystemReader(run.manager._root / "step-1").read_metadata().state_dict_metadata
    assert [name for name in names if name in ("model.embed.weight", "model.lm_head.weight")] == ["model.embed.weight"]


def test_fresh_run_starts_at_0(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.manager.load() == 0
    assert run.manager.last_complete_step is None
    assert list(tmp_path.iterdir()) == []  # looking leaves nothing behind


def test_load_step_goes_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(tmp_path)
    for step in (2, 4):
        run.train_state.value = step
        run.manager.save(step)
    back = Run(tmp_path, load_step=2)
    assert back.manager.load() == 2
    assert back.train_state.value == 2
    assert (run.manager.last_complete_step, back.manager.last_complete_step) == (4, 2)
    assert "checkpoint: steps [4] stay and are later than checkpoint.load_step 2: without it" in caplog.text
    with pytest.raises(CheckpointError, match=r"step-3 is not complete: there is no such folder; .* \[2, 4\]"):
        Run(tmp_path, load_step=3).manager.load()


# When, and what is kept


def test_saves_when_due_and_at_the_last_step(tmp_path: Path) -> None:
    run = Run(tmp_path, interval_steps=3)
    assert [run.manager.maybe_save(step, last=step == 5) for step in range(1, 6)] == [False, False, True, False, True]
    assert folders(run) == ["step-3", "step-5"]


def test_disabled_neither_saves_nor_loads(tmp_path: Path) -> None:
    Run(tmp_path).manager.save(1)
    run = Run(tmp_path, enable=False, interval_steps=1)
    assert run.manager.load() == 0
    assert not run.manager.maybe_save(2, last=True)
    assert folders(run) == ["step-1"]


def test_saves_also_by_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hyper_parallel.components.checkpoint import manager

    seconds = [0.0]
    monkeypatch.setattr(manager.time, "monotonic", lambda: seconds[0])
    run, saved = Run(tmp_path, interval_steps=4, interval_minutes=1.5), []
    for step in range(1, 9):  # 40 seconds each
        seconds[0] += 40.0
        if run.manager.maybe_save(step):
            saved.append(step)
    assert saved == [3, 4, 7, 8]


def _by_the_clock(folder: str) -> list[int]:
    from hyper_parallel.components.checkpoint import manager

    seconds = [0.0]
    manager.time.monotonic = lambda: seconds[0]
    run, saved = Run(folder, interval_steps=4, interval_minutes=1.0), []
    for step in range(1, 8):
        seconds[0] += 15.0
        if run.manager.maybe_save(step):
            saved.append(step)
    return saved


def test_the_clock_asks_for_no_save_beside_one_that_is_due_anyway(tmp_path: Path) -> None:
    """A minute has passed after step 4, which is saved; ranks would otherwise save 5 too."""
    assert run_world(2, _by_the_clock, str(tmp_path)) == [[4]] * 2


def test_weights_alone(tmp_path: Path) -> None:
    run = Run(tmp_path, what="model")
    run.train(1)
    run.manager.save(1)
    weights = {name: value.clone() for name, value in run.model.state_dict().items()}
    with pytest.raises(
        CheckpointError, match=r"step-1 holds the weights alone \(checkpoint.what model\), from which no"
    ):
        Run(tmp_path).manager.load()
    other = Run(tmp_path / "other", load_from=str(tmp_path))
    assert other.manager.load() == 0
    assert all(torch.equal(weights[name], value) for name, value in other.model.state_dict().items())
    flip_a_byte(tmp_path / "checkpoint/step-1/__0_0.distcp")
    with pytest.raises(CheckpointError, match=r"load_from: .*step-1 is damaged: __0_0.distcp is not what was written"):
        Run(tmp_path / "third", load_from=str(tmp_path)).manager.load()


def _retention(folder: str) -> list[str]:
    run = Run(folder, keep_latest_k=2)
    for step in (2, 4, 6):
        run.manager.save(step)
    dist.barrier()  # rank 0 removes, and is not waited for
    return folders(run)


def test_retention_and_a_killed_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Keep 2 of 2, 4, 6; 8 was killed before its marker: 4 and 6 stay, resume takes 6 and says so."""
    assert run_world(2, _retention, str(tmp_path)) == [["step-4", "step-6"]] * 2
    root = tmp_path / "checkpoint"
    shutil.copytree(root / "step-6", root / "step-8")
    (root / "step-8" / "complete.json").unlink()
    shutil.copytree(root / "step-6", root / "step-10.partial")
    run = Run(tmp_path, keep_latest_k=2)
    with caplog.at_level(logging.WARNING):
        assert run.manager.load() == 6
    assert run.manager.last_complete_step == 6
    assert "step-8 is left out: it has no complete.json, so its save did not finish" in caplog.text
    assert "step-10.partial is left out" in caplog.text
    assert Run(tmp_path, load_step=4).manager.load() == 4

    run.manager.save(8)  # over what the kill left
    run.manager.save(10)
    assert folders(run) == ["step-10", "step-8"]
    assert Run(tmp_path).manager.load() == 10


def test_later_steps_of_a_run_gone_back_from_are_left_alone(tmp_path: Path) -> None:
    run = Run(tmp_path, keep_latest_k=1)
    for step in (30, 20, 10):
        run.manager.save(step)
    run.manager.save(15)
    assert folders(run) == ["step-15", "step-20", "step-30"]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.manager.save(2)
    run.train_state.value = 5
    run.manager.save(2)
    again = Run(tmp_path)
    again.manager.load()
    assert again.train_state.value == 5
    assert folders(run) == ["step-2"]


# Damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
        (lambda folder: (folder / ".metadata").write_bytes(b"x"), r".metadata has 1 bytes, \d+ were written"),
        *(
            (lambda folder, text=text: (folder / "complete.json").write_bytes(text), "its complete.json is damaged")
            for text in (b"", b"{", b"[1]", b"{}", b'{"files": []}', b"\xff\xfe")
        ),
    ],
)
def test_a_damaged_step_is_left_out(
    damage: Any, message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path)
    run.manager.save(2)
    run.manager.save(4)
    damage(run.manager._root / "step-4")
    with caplog.at_level(logging.WARNING):
        assert Run(tmp_path).manager.load() == 2
    with pytest.raises(CheckpointError, match=message):
        Run(tmp_path, load_step=4).manager.load()


def flip_a_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def _with_damage(folder: str, file: str) -> list[str]:
    """What is said of a step of the right sizes: where it is the newest of two, is asked for, and is the only one."""
    run = Run(folder)
    run.train_state.value = 7
    run.manager.save(2)
    run.manager.save(4)
    if run.dims.dp_rank == 0:
        flip_a_byte(run.manager._root / "step-4" / file)
    if dist.is_initialized():
        dist.barrier()
    again = Run(folder)
    assert again.manager.load() == 2
    assert again.train_state.value == 7
    with pytest.raises(CheckpointError) as asked:
        Run(folder, load_step=4).manager.load()
    if run.dims.dp_rank == 0:
        shutil.rmtree(run.manager._root / "step-2")
    if dist.is_initialized():
        dist.barrier()
    with pytest.raises(CheckpointError) as alone:
        Run(folder).manager.load()
    return [str(asked.value), str(alone.value)]


@pytest.mark.parametrize(("nproc", "file"), [(1, ".metadata"), (1, "__0_0.distcp"), (2, "__1_0.distcp")])
def test_a_flipped_byte_is_found_before_anything_is_loaded(
    nproc: int, file: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "checkpoint"
    folder = str(tmp_path)
    for asked, alone in [_with_damage(folder, file)] if nproc == 1 else run_world(nproc, _with_damage, folder, file):
        assert asked.startswith(f"checkpoint.load_step: {root}/step-4 is damaged: {file} is not what was written (dig")
        assert alone == (
            f"all checkpoints in {root} are damaged; restore one, or give another dump_folder to start anew"
        )
    if nproc == 1:
        assert f"checkpoint: {root}/step-4 is left out: {file} is not what was written" in caplog.text


def test_a_flipped_byte_is_found_wherever_it_is(tmp_path: Path) -> None:
    """In every file of a step, the marker included, at places spread over it."""
    for step in (2, 4):
        Run(tmp_path).manager.save(step)
    newest = tmp_path / "checkpoint" / "step-4"
    for file in sorted(newest.iterdir()):
        content, again = file.read_bytes(), Run(tmp_path)
        for place in range(0, len(content), len(content) // 12):
            file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
            assert again.manager.load() == 2, (file.name, place)
        file.write_bytes(content)
    assert again.manager.load() == 4


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    root = tmp_path / "checkpoint"
    for mode in ("none", "thread"):
        run = Run(tmp_path, keep_latest_k=1, async_mode=mode)
        with torch.no_grad():
            run.model.embed.weight[0, :2] = 1e308  # finite, though their sum is not
        run.manager.save(2)
        run.manager.wait_copied()
        with torch.no_grad():
            run.model.layers[1].norm.weight[0] = torch.inf
            run.model.lm_head.weight[3, 1] = torch.nan
        with pytest.raises(CheckpointError) as error:
            run.manager.save(4)
            run.manager.wait()
        assert str(error.value) == (
            f"the checkpoint of step 4 could not be saved in {root}: layers.1.norm.weight and 1 more are not finite; "
            f"the last complete checkpoint is {root}/step-2; start again with a lower optimizer.lr"
        )
        assert folders(run) == ["step-2"]
        run.manager.close()


# Another model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"layers": 2}, "model.layers.2.norm.weight is not in this run"),
        ({"layers": 4}, "model.layers.3.norm.weight is not in the checkpoint"),
        ({"tied": True}, "model.lm_head.weight is not in this run"),
    ],
)
def test_another_model_is_refused_by_name(model: dict, message: str, tmp_path: Path) -> None:
    Run(tmp_path).manager.save(2)
    run = Run(tmp_path, model=model)
    before = run.tensors()
    with pytest.raises(CheckpointError, match=message) as error:
        run.manager.load()
    assert "set model_spec" in str(error.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in run.tensors().items())


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"layers": 2}, "model.layers.2.norm.weight is not in this run"),
        ({"layers": 4}, "model.layers.3.norm.weight is not in the checkpoint"),
    ],
)
def test_initial_weights_of_another_model_are_refused_by_name(model: dict, message: str, tmp_path: Path) -> None:
    Run(tmp_path / "other").manager.save(2)
    step = tmp_path / "other/checkpoint/step-2"
    run = Run(tmp_path, model=model, load_from=str(step))
    with pytest.raises(CheckpointError) as error:
        run.manager.load()
    assert str(error.value).startswith(f"checkpoint.load_from: {step} is of another model: ")
    assert message in str(error.value)


def test_another_shape_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Run(tmp_path).manager.save(2)
    monkeypatch.setattr(tiny_decoder, "VOCAB", 22)
    with pytest.raises(
        CheckpointError, match=r"of another model: model\.embed\.weight is \[21, 6\] in the checkpoint, "
    ):
        Run(tmp_path / "new", load_from=str(tmp_path)).manager.load()
    message = r"model\.embed\.weight is float64 \[21, 6\] in the checkpoint, float64 \[22, 6\] in this run"
    with pytest.raises(CheckpointError, match=message):
        Run(tmp_path).manager.load()


def test_another_type_is_refused(tmp_path: Path) -> None:
    Run(tmp_path).manager.save(2)
    message = r"model\.embed\.weight is float64 \[21, 6\] in the checkpoint, float32 \[21, 6\] in this run"
    with pytest.raises(CheckpointError, match=message):
        Run(tmp_path, dtype="float32").manager.load()


# Disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1.5 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small tmpfs needs root: " + mounted.stderr.decode())
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def _fill_the_disk(folder: str) -> str:
    run = Run(folder)
    run.manager.save(2)
    run.train_state.value = 1
    if run.dims.dp_rank == run.dims.dp_size - 1:
        free = shutil.disk_usage(folder).free
        (Path(folder) / "other files").write_bytes(bytes(free - 150_000))
    if dist.is_initialized():
        dist.barrier()
    with pytest.raises(CheckpointError) as error:
        run.manager.save(4)
    assert folders(run) == ["step-2"]
    again = Run(folder)
    assert again.manager.load() == 2
    return str(error.value)


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_full_disk_leaves_the_older_checkpoint(nproc: int, small_disk: Path) -> None:
    folder = str(small_disk)
    messages = [_fill_the_disk(folder)] if nproc == 1 else run_world(nproc, _fill_the_disk, folder)
    for message in messages:
        assert message.startswith(f"the checkpoint of step 4 could not be saved in {small_disk}/checkpoint: ")
        assert "No space left on device" in message
        assert f"the last complete checkpoint is {small_disk}/checkpoint/step-2; free space" in message


def _below_a_file(folder: str) -> str:
    run = Run(folder, folder="a file/checkpoint")
    with pytest.raises(CheckpointError) as error:
        run.manager.save(4)
    return str(error.value)


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "a file").touch()
    for message in run_world(2, _below_a_file, str(tmp_path)):
        assert "NotADirectoryError" in message
        assert "(on rank 0)" in message
        assert "none is complete yet" in message


def _writer_fails_on_rank_1(folder: str) -> str:
    from torch.distributed.checkpoint import FileSystemWriter

    run = Run(folder)
    run.manager.save(2)
    if dist.get_rank() == 1:

        def full(self: Any, *args: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        FileSystemWriter.write_data = full
    with pytest.raises(CheckpointError) as error:
        run.manager.save(4)
    assert folders(run) == ["step-2"]
    return str(error.value)


def test_one_rank_that_cannot_write_fails_all(tmp_path: Path) -> None:
    for message in run_world(2, _writer_fails_on_rank_1, str(tmp_path)):
        assert "OSError: [Errno 28] No space left on device" in message
        assert "step-2;" in message


# Config


def test_faults() -> None:
    config = CheckpointManager.Config(
        enable=False,
        interval_steps=0,
        keep_latest_k=0,
        interval_minutes=0.0,
        export_hf="last",
        load_step=3,
    )
    assert [fault.path for fault in config.faults()] == [
        "interval_steps", "keep_latest_k", "interval_minutes", "export_hf", "load_step",
    ]  # fmt: skip


def test_states_are_opaque_to_torch(tmp_path: Path) -> None:
    """A state of another structure than the current one loads: nothing takes it apart."""
    run = Run(tmp_path)
    run.dataloader.state_dict = lambda: {"value": 3, "order": [(1, "two"), {"three": None}]}
    run.manager.save(2)
    again, seen = Run(tmp_path), []
    again.dataloader.load_state_dict = seen.append
    again.manager.load()
    assert seen == [{"value": 3, "order": [(1, "two"), {"three": None}]}]
