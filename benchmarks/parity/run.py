"""Trains combinations, many in each spawned world, and holds each against its single process."""

from __future__ import annotations

import faulthandler
import gc
import logging
import math
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.parity.combination import Combination
from hyper_parallel import loss_compare
from tests.distributed_world import RankError, run_world

TOLERANCE = 1e-9
"""Of the loss and of the gradient norm, at any step, in float64."""
ROW_SECONDS = 600
"""How long one run may take before its ranks are ended, with a traceback of where each stood."""
_START_SECONDS = 120
_DONE = "done"


@dataclass(frozen=True, slots=True)
class Result:
    """How far a combination went from one process."""

    combination: Combination
    loss: float = math.nan
    """Largest |difference| at any step; NaN if it did not get through all steps."""
    grad_norm: float = math.nan
    seconds: float = math.nan
    error: str = ""
    """What ended the run, if it did not end by itself."""

    @property
    def passes(self) -> bool:
        """Whether both differences are small enough; what is not a number is not."""
        return self.loss <= TOLERANCE and self.grad_norm <= TOLERANCE


@contextmanager
def quiet() -> Iterator[None]:
    """Runs within say nothing on the way, which would drown what their judge says. Warnings are still shown."""
    logger, handler = logging.getLogger("hyper_parallel"), logging.NullHandler()
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def run(combinations: Sequence[Combination], folder: Path, steps: int, *, resume: bool = False) -> Iterator[Result]:
    """Trains all, few ranks first, with their metrics below `folder`.

    Args:
        resume: take what an interrupted call, of the same code, has trained to its end there. Else it is emptied.
    """
    for place in folder.iterdir() if folder.exists() else ():
        if not (resume and (place / _DONE).exists()):
            shutil.rmtree(place)
    with quiet():
        for reference in dict.fromkeys(each.reference for each in combinations):
            _train_reference(reference, folder, steps)
    for size in sorted({each.world_size for each in combinations}):
        rows = [each for each in combinations if each.world_size == size]
        left = [row for row in rows if not (folder / row.name / _DONE).exists()]
        errors = _run_in_worlds(size, left, folder, steps)
        yield from (_result(row, errors.get(row, ""), folder, steps) for row in rows)


def _train_reference(reference: Combination, folder: Path, steps: int) -> None:
    """In this process, which has no process group. Every run of the model starts from its seed."""
    seed = folder / "seeds" / reference.model
    if not seed.exists():
        with reference.config(seed, steps, enable=True, create_seed=True).build() as trainer:
            trainer.train()
    with reference.config(folder / reference.name, steps, load_from=str(seed)).build() as trainer:
        trainer.train()


def _run_in_worlds(size: int, rows: list[Combination], folder: Path, steps: int) -> dict[Combination, str]:
    """One world for all `rows`, and a new one behind each that brings it down. Returns what those said."""
    errors: dict[Combination, str] = {}
    left = rows
    while left:
        try:
            run_world(size, train_rows, left, folder, steps, timeout=_START_SECONDS + ROW_SECONDS * len(left))
            break
        except RankError as error:
            begun = [row for row in left if (folder / row.name).exists()]
            guilty = (begun or left)[-1]
            errors[guilty] = str(error)
            print(f"{guilty.name}: {error}", file=sys.stderr, flush=True)
            left = left[left.index(guilty) + 1 :]
    return errors


def train_rows(rows: Sequence[Combination], folder: Path, steps: int) -> None:
    """On each rank: trains `rows` one after the other."""
    for number, row in enumerate(rows, 1):
        faulthandler.dump_traceback_later(ROW_SECONDS, exit=True)
        start = time.perf_counter()
        place = folder / row.name
        with quiet(), row.config(place, steps, load_from=str(folder / "seeds" / row.model)).build() as trainer:
            place.mkdir(parents=True, exist_ok=True)
            trainer.train()
        del trainer
        gc.collect()
        torch._dynamo.reset()  # after some compilations of the same function it would stop to compile
        dist.barrier()
        if dist.get_rank() == 0:
            seconds = time.perf_counter() - start
            (place / _DONE).write_text(f"{seconds}")
            print(f"{number}/{len(rows)} on {row.world_size} ranks, {seconds:.0f} s: {row.name}", file=sys.stderr)
    faulthandler.cancel_dump_traceback_later()


def _result(row: Combination, error: str, folder: Path, steps: int) -> Result:
    place = folder / row.name
    if error or not (place / _DONE).exists():
        return Result(row, error=error or "it was not run")
    single, other = (loss_compare.read(str(folder / name / "metrics.jsonl")) for name in (row.reference.name, row.name))
    if not list(single.steps) == list(other.steps) == list(range(1, steps + 1)):
        return Result(row, error=f"it took other steps than 1 to {steps}")
    found = [loss_compare.differences(single, other, name, list(single.steps)) for name in loss_compare.QUANTITIES]
    worst = [math.nan if each.not_finite else each.max_abs for each in found]
    return Result(row, *worst, seconds=float((place / _DONE).read_text()))


def table(results: Sequence[Result], steps: int) -> str:
    """The results as Markdown."""
    failed = sum(not result.passes for result in results)
    lines = [
        f"{len(results)} combinations, {steps} steps in float64, each against one process of the same model, data and "
        f"initial weights. Largest |difference| at any step; up to {TOLERANCE:g} passes.",
        "",
        "| ranks | combination | loss | grad_norm | seconds | |",
        "|---|---|---|---|---|---|",
    ]
    for result in results:
        numbers = f"{result.loss:.1e} | {result.grad_norm:.1e} | {result.seconds:.0f}"
        verdict = "PASS" if result.passes else "FAIL"
        lines.append(f"| {result.combination.world_size} | {result.combination.name} | {numbers} | {verdict} |")
    for result in results:
        if result.error:
            lines += ["", f"{result.combination.name}:", *("    " + line for line in result.error.splitlines())]
    return "\n".join([*lines, "", f"{len(results) - failed} passed, {failed} failed: {'FAIL' if failed else 'PASS'}"])
