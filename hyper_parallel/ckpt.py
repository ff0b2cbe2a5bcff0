"""Checkpoints for people.

    python -m hyper_parallel.ckpt ls outputs
    python -m hyper_parallel.ckpt verify outputs
    python -m hyper_parallel.ckpt diff outputs/checkpoint/step-500 other_run/checkpoint/step-500
    python -m hyper_parallel.ckpt rm outputs 100 200

Exit codes: 0 done, nothing wrong; 1 something is damaged, differs, or is left because it is in use; 2 a wrong
argument (`path: fact; remedy`).
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyper_parallel.config.errors import ConfigError
from hyper_parallel.platform.environment import prepare_environment

if TYPE_CHECKING:
    import torch

    from hyper_parallel.components.checkpoint.step_reader import StepReader

UNITS = ("B", "kB", "MB", "GB", "TB")


def main(argv: Sequence[str] | None = None) -> int:
    """Does what `argv` (default: this process's command line) asks for; returns the exit code."""
    parser = argparse.ArgumentParser(prog="hyper_parallel.ckpt", description="Look at checkpoints, and remove them.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for function, text in ((ls, "the steps of a run"), (verify, "read every file and compare it with its digest")):
        command = commands.add_parser(function.__name__, help=text, description=function.__doc__)
        command.set_defaults(run=function)
        command.add_argument("folder", type=Path, help="a dump folder, a folder of steps, or one step-N")
    command = commands.add_parser("diff", help="what differs between two checkpoints", description=diff.__doc__)
    command.set_defaults(run=diff)
    command.add_argument("a", type=Path, help="a step-N, or a run, for its newest step")
    command.add_argument("b", type=Path, help="the same")
    command = commands.add_parser("rm", help="remove steps", description=rm.__doc__)
    command.set_defaults(run=rm)
    command.add_argument("folder", type=Path, help="a dump folder, or a folder of steps")
    command.add_argument("steps", type=int, nargs="*", help="which to remove")
    command.add_argument("--unfinished", action="store_true", help="remove what killed saves left")
    command.add_argument("--force", action="store_true", help="also the newest complete step")
    arguments = vars(parser.parse_args(argv))
    prepare_environment()
    from hyper_parallel.distributed.last_words import run_tool

    return run_tool(lambda: arguments.pop("run")(**arguments))


def ls(folder: Path) -> int:
    """Steps, sizes, and whether they are complete."""
    from hyper_parallel.components.checkpoint import storage

    rows = [("step", "size", "saved", "ranks", "what", "validation loss", "state")]
    damaged = False
    for place, step, reason in _steps(folder):
        size = _size(sum(file.stat().st_size for file in place.rglob("*") if file.is_file()))
        saved = datetime.fromtimestamp(place.stat().st_mtime).isoformat(" ", "seconds")
        about, state = ("-", "-", "-"), f"incomplete: {reason}"
        if reason is None:
            marker = storage.read_marker(place)
            loss = marker["validation_loss"]
            about = (str(marker["world_size"]), marker["what"], "-" if loss is None else f"{loss:.4f}")
            state = "complete"
        damaged |= reason is not None
        rows.append((place.name.removeprefix("step-") if reason else str(step), size, saved, *about, state))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return int(damaged)


def verify(folder: Path) -> int:
    """Reads every file of every finished step."""
    from tqdm import tqdm

    from hyper_parallel.components.checkpoint.step_locks import being_read
    from hyper_parallel.components.checkpoint.verification import damage

    verdicts = []
    for place, _, reason in tqdm(_steps(folder), unit=" steps", leave=False, disable=None):
        if reason is None:
            with being_read(place):
                reason = damage(place)
        verdicts.append((place, reason))
    for place, reason in verdicts:
        print(f"{place}: {reason or 'as written'}")
    return int(any(reason is not None for _, reason in verdicts))


def diff(a: Path, b: Path) -> int:
    """Names, types and shapes that differ, and by how much the values of tensors do, one tensor in memory at a time."""
    from hyper_parallel.components.checkpoint import storage
    from hyper_parallel.components.checkpoint.model_state import kind_of
    from hyper_parallel.components.checkpoint.reading import open_step, saved_entries
    from hyper_parallel.components.checkpoint.step_locks import being_read

    places = [storage.complete_checkpoint("a", a), storage.complete_checkpoint("b", b)]
    with being_read(places[0]), being_read(places[1]):
        readers = [open_step(place) for place in places]
        entries = [saved_entries(reader) for reader in readers]
        lines = []
        for own, other, place in ((*entries, places[0]), (*entries[::-1], places[1])):
            lines += [f"{name}: only in {place}" for name in own if name not in other]
        shared = [name for name in entries[0] if name in entries[1]]
        equal = 0
        for name in shared:
            kinds = [kind_of(of[name]) for of in entries]
            if kinds[0] != kinds[1]:
                lines.append(f"{name}: {kinds[0]} and {kinds[1]}")
                continue
            values = [_read(reader, name, of[name]) for reader, of in zip(readers, entries, strict=True)]
            if (difference := _difference(*values)) is None:
                equal += 1
            else:
                lines.append(f"{name}: {difference}")
    for line in lines:
        print(line)
    print(f"{equal} of {len(shared)} shared entries are equal in every bit")
    return int(bool(lines))


def rm(folder: Path, steps: list[int], *, unfinished: bool, force: bool) -> int:
    """Removes whole steps. The newest complete one stays, unless it is forced, and so does what is in use."""
    from hyper_parallel.components.checkpoint.step_locks import remove_unused

    found = list(_steps(folder))
    complete = {step: place for place, step, reason in found if reason is None}
    finished = {step: place for place, step, _ in found if place.name == f"step-{step}"}
    if not steps and not unfinished:
        raise ConfigError.one("steps", "none is given", "give numbers of steps, or --unfinished")
    if missing := [step for step in steps if step not in finished]:
        fact = f"{', '.join(map(str, missing))} not in {folder}"
        raise ConfigError.one("steps", fact, f"choose of {', '.join(map(str, finished)) or 'none'}")
    if complete and max(complete) in steps and not force:
        raise ConfigError.one("steps", f"{max(complete)} is the newest complete step", "add --force to remove it")
    chosen = [finished[step] for step in steps]
    if unfinished:
        chosen += [place for place, _, reason in found if reason is not None and place not in chosen]
    left = [place for place in chosen if not remove_unused(place)]
    for place in chosen:
        is_left = place in left
        print(f"{place}: {'left, it is in use' if is_left else 'removed'}", file=sys.stderr if is_left else sys.stdout)
    return int(bool(left))


def _steps(folder: Path) -> list[tuple[Path, int, str | None]]:
    """Place, step and incompleteness of what lies in `folder`.

    Raises:
        ConfigError: there is nothing of the kind.
    """
    from hyper_parallel.components.checkpoint import storage

    for root in (folder, folder / storage.DEFAULT_FOLDER):
        if found := storage.scan(root):
            return [(root / name, step, reason) for name, (step, reason) in found.items()]
    if found := storage.scan(folder.parent).get(folder.name):
        return [(folder, *found)]
    fact = f"{folder} holds no checkpoint" if folder.exists() else f"{folder} is missing"
    raise ConfigError.one("folder", fact, "give a dump folder, or the folder of its steps")


def _read(reader: StepReader, name: str, entry: Any) -> Any:
    import torch

    from hyper_parallel.components.checkpoint.reading import read

    # What is no tensor is read anew, whatever stands there.
    empty = torch.empty(entry.size, dtype=entry.properties.dtype) if hasattr(entry, "properties") else None
    state = {name: empty}
    read(reader, state)
    return state[name]


def _difference(a: Any, b: Any) -> str | None:
    """In words; None: not a bit."""
    import torch

    if not isinstance(a, torch.Tensor):
        return None if a == b else "other content"
    if torch.equal(_bits(a), _bits(b)):
        return None
    wide = (a.double() - b.double()).abs()
    return f"max |difference| {wide.max().item():.3e}, in {int((wide != 0).sum())} of {a.numel()} values"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor.reshape(1).view(torch.uint8)


def _size(size_bytes: float) -> str:
    power = min(int(math.log(max(size_bytes, 1), 1000)), len(UNITS) - 1)
    return f"{size_bytes / 1000**power:.3g} {UNITS[power]}"


if __name__ == "__main__":
    sys.exit(main())
