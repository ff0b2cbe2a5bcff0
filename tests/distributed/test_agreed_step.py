from __future__ import annotations

import time

import torch
import torch.distributed as dist

from hyper_parallel.distributed.agreed_step import AgreedStep
from tests.distributed_world import run_world


def test_a_process_by_itself_needs_no_other_step() -> None:
    agreed = AgreedStep()
    assert not agreed.due(1)
    agreed.request(2)
    assert [agreed.due(step) for step in (2, 3)] == [True, False]
    agreed.request(5)
    assert agreed.due(5)


def _steps(asked: dict[int, list[int]]) -> list[int]:
    """The steps that were due, where rank r asks at the end of the steps `asked[r]`; one or the other is slow."""
    agreed, due = AgreedStep(), []
    for step in range(1, 13):
        dist.all_reduce(torch.ones(1))  # of the step
        if dist.get_rank() == step % dist.get_world_size():
            time.sleep(0.02)
        if step in asked.get(dist.get_rank(), ()):
            agreed.request(step)
        if agreed.due(step):
            due.append(step)
    return due


def _two_runs(count: int) -> list[list[int]]:
    return [_steps({0: [3]} if run == 0 else {}) for run in range(count)]


def test_what_one_run_asked_for_is_nothing_to_the_next() -> None:
    assert run_world(2, _two_runs, 2) == [[[4], []]] * 2


def test_all_ranks_do_it_after_the_same_step() -> None:
    assert run_world(3, _steps, {1: [3]}) == [[4]] * 3
    # Who asks again before it was done asks for nothing; who asks after it, for another.
    assert run_world(3, _steps, {0: [3, 8], 2: [3, 4]}) == [[4, 9]] * 3
