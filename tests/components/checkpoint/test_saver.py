"""Saves behind the training."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hyper_parallel.components.checkpoint import CheckpointError, step_writer
from hyper_parallel.components.checkpoint.step_locks import remove_unused
from hyper_parallel.components.checkpoint.step_writer import StepWriter
from hyper_parallel.components.checkpoint.verification import damage
from hyper_parallel.config.sections import CommConfig
from hyper_parallel.distributed.process_group import destroy_distributed, init_distributed
from tests.components.checkpoint.run import Run
from tests.distributed_world import run_world


def _may_have_children() -> None:
    """Ranks of a test are daemons; those of a launcher are not."""
    multiprocessing.current_process()._config["daemon"] = False


def _saved_behind_the_training(folder: str, mode: str) -> dict[str, Any]:
    _may_have_children()
    run = Run(folder, async_mode=mode, keep_latest_k=1)
    run.train(1)
    run.manager.save(1)
    saved = run.tensors()
    running = (run.manager.last_step, run.manager.last_complete_step)
    run.manager.wait_copied()
    run.train(3)  # changes the weights in place, while they are written
    run.manager.wait()
    complete = (run.manager.last_step, run.manager.last_complete_step)
    figures = run.manager.take_figures()
    resumed = Run(folder)
    step = resumed.manager.load()
    loaded = resumed.tensors()
    run.manager.save(2)
    run.manager.wait()
    run.manager.close()
    dist.barrier()
    return {
        "running": running,
        "complete": complete,
        "figures": figures,
        "again": run.manager.take_figures().keys() == figures.keys() and run.manager.take_figures() == {},
        "step": step,
        "equal": [torch.equal(saved[name], loaded[name]) for name in saved],
        "folders": sorted(path.name for path in (Path(folder) / "checkpoint").iterdir()),
    }


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_what_is_saved_is_what_was_there_when_the_save_began(mode: str, tmp_path: Path) -> None:
    for rank, result in enumerate(run_world(2, _saved_behind_the_training, str(tmp_path), mode)):
        assert result["running"] == (1, None)
        assert result["complete"] == (1, 1)
        assert result["step"] == 1
        assert result["equal"] and all(result["equal"])
        assert result["folders"] == ["step-2"]  # 1 was removed when 2 was complete
        assert result["again"]
        figures = result["figures"]
        assert 0 < figures["checkpoint_stall_seconds"] <= figures["checkpoint_seconds"]
        if rank == 0:
            assert figures["checkpoint_bytes"] > 1000


def test_without_waiting_a_step_is_complete_when_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, finish = threading.Event(), StepWriter.finish

    def held_up(self: StepWriter, **arguments: Any) -> None:
        assert go_on.wait(60)
        finish(self, **arguments)

    monkeypatch.setattr(StepWriter, "finish", held_up)
    run = Run(tmp_path, async_mode="thread", interval_steps=2)
    assert run.manager.maybe_save(2)
    assert not run.manager.maybe_save(3)
    assert (run.manager.last_step, run.manager.last_complete_step, run.manager.take_figures()) == (2, None, {})
    assert Run(tmp_path).manager.load() == 0  # nothing of it can be taken for a checkpoint
    go_on.set()
    run.manager._saver._running.write.result()
    assert not run.manager.maybe_save(5)
    assert run.manager.last_complete_step == 2
    run.manager.close()


def _one_rank_sees_it_first(folder: str) -> tuple[int, list[int]]:
    run = Run(folder, async_mode="thread")
    run.manager.save(2)
    run.manager._saver._running.write.result()
    if dist.get_rank() == 0:
        run.manager.maybe_save(3)  # as if the other had asked a moment earlier
    run.manager.wait()
    last, ranks = run.manager.last_complete_step, [0, 0]
    dist.all_gather_object(ranks, dist.get_rank())
    run.manager.close()
    return last, ranks


def test_ranks_that_learn_of_a_complete_step_at_different_moments_stay_together(tmp_path: Path) -> None:
    assert run_world(2, _one_rank_sees_it_first, str(tmp_path)) == [(2, [0, 1])] * 2


def _fails_on_rank_1(folder: str) -> list[str]:
    run = Run(folder, async_mode="thread")
    run.manager.save(2)
    run.manager.wait()
    if dist.get_rank() == 1:

        def full(self: Any, *args: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        StepWriter.write_data = full
    run.manager.save(4)
    assert run.manager.maybe_save(5) is False  # whatever is known of it by now: that is for the next save
    with pytest.raises(CheckpointError) as error:
        run.manager.save(6)
    assert run.manager.last_step == 2
    assert Run(folder).manager.load() == 2
    return [str(error.value), *sorted(path.name for path in (Path(folder) / "checkpoint").iterdir())]


def test_an_error_is_told_on_all_ranks_at_the_next_save(tmp_path: Path) -> None:
    root = tmp_path / "checkpoint"
    for message, *folders in run_world(2, _fails_on_rank_1, str(tmp_path)):
        assert message.startswith(f"the checkpoint of step 4 could not be saved in {root}: OSError: [Errno 28] No spa")
        assert f"; the last complete checkpoint is {root}/step-2; free space" in message
        assert folders == ["step-2"]


class Spoiled(StepWriter):
    """What happens to the disk while the last rank writes. A class of this file, so that a writing process knows it."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        if dist.get_rank() == dist.get_world_size() - 1:
            match self._about["validation_loss"]:  # which says here what is to happen
                case errno.ENOSPC | errno.EROFS as number:
                    raise OSError(number, os.strerror(number))
                case errno.ENOENT:
                    shutil.rmtree(self.path)
        return super().write_data(plan, planner)


def _disks_that_fail(folder: str, mode: str) -> list[tuple[str, list[str], str | None, int]]:
    """For each failure: the error, what is left, whether it is damaged, and what a run goes on from."""
    _may_have_children()
    step_writer.StepWriter = Spoiled
    run = Run(folder, async_mode=mode, keep_latest_k=1)
    run.manager.save(2)
    run.manager.wait()
    root, results = Path(folder) / "checkpoint", []
    for step, failure in enumerate((errno.ENOSPC, errno.EROFS, errno.ENOENT), 3):
        run.manager.save(step, validation_loss=failure)
        run.train(1)  # as if nothing were wrong
        with pytest.raises(CheckpointError) as error:
            run.manager.wait()
        left, reason = sorted(path.name for path in root.iterdir()), damage(root / "step-2")
        results.append((str(error.value), left, reason, Run(folder).manager.load()))
    if dist.get_rank() == dist.get_world_size() - 1:
        run.model.embed.weight.detach().to_local()[-1] = torch.nan
    run.manager.save(6)
    with pytest.raises(CheckpointError) as error:
        run.manager.wait()
    results.append((str(error.value), sorted(path.name for path in root.iterdir()), damage(root / "step-2"), 2))
    assert run.manager.load() == 2
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(root)  # all of it, between two saves
    dist.barrier()
    run.manager.save(9)
    run.manager.wait()
    results.append(("", sorted(path.name for path in root.iterdir()), damage(root / "step-9"), 0))
    run.manager.close()
    return results


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_a_disk_that_fails_behind_the_training_costs_no_older_checkpoint(mode: str, tmp_path: Path) -> None:
    root = tmp_path / "checkpoint"
    for *failures, spoiled, again in run_world(2, _disks_that_fail, str(tmp_path), mode):
        causes = "No space left on device", "Read-only file system", "No such file or directory"
        for step, ((message, left, reason, resumed), cause) in enumerate(zip(failures, causes, strict=True), 3):
            assert message.startswith(f"the checkpoint of step {step} could not be saved in {root}: "), message
            assert cause in message
            assert f"; the last complete checkpoint is {root}/step-2; free space or set checkpoint.folder" in message
            assert (left, reason, resumed) == (["step-2"], None, 2)
        assert spoiled[0].endswith("; start again with a lower optimizer.lr") and spoiled[1:] == (["step-2"], None, 2)
        assert ": embed.weight are not finite" in spoiled[0]
        assert again == ("", ["step-9"], None, 0)


def test_while_a_step_is_written_nobody_removes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finish, removed = StepWriter.finish, []

    def asked_for(self: StepWriter, **arguments: Any) -> None:
        removed.append(remove_unused(Path(self.path)))
        finish(self, **arguments)

    monkeypatch.setattr(StepWriter, "finish", asked_for)
    run = Run(tmp_path)
    run.manager.save(2)
    assert removed == [False]
    assert "writing.lock" not in [path.name for path in (tmp_path / "checkpoint/step-2").iterdir()]
    assert remove_unused(tmp_path / "checkpoint/step-2")


def test_the_group_of_saves_waits_as_long_as_that_of_the_run(tmp_path: Path) -> None:
    init_distributed(CommConfig(timeout_seconds=17), even_alone=True)
    try:
        run = Run(tmp_path, async_mode="thread")
        run.manager.save(2)
        group = run.manager._saver._group
        assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=17)
        run.manager.close()
    finally:
        destroy_distributed()


def _writing_process_is_killed(folder: str) -> str:
    _may_have_children()
    run = Run(folder, async_mode="process")
    run.manager.save(2)
    run.manager.wait()
    for child in multiprocessing.active_children():
        child.kill()
        child.join()
    run.manager.save(4)
    with pytest.raises(CheckpointError) as error:
        run.manager.wait()
    assert Run(folder).manager.load() == 2
    return str(error.value)


def test_a_writing_process_that_is_killed_ends_no_checkpoint(tmp_path: Path) -> None:
    for message in run_world(2, _writing_process_is_killed, str(tmp_path)):
        beginning = f"the checkpoint of step 4 could not be saved in {tmp_path}/checkpoint: "
        causes = ("BrokenPipeError: ", "RuntimeError: Checkpoint background process is dead")
        assert message.startswith(tuple(f"{beginning}{cause}" for cause in causes)), message
