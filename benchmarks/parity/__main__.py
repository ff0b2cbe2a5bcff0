"""Trains every combination of the parity matrix on gloo ranks of this machine, and holds it against one process.

Exit codes: 0 all pass; 1 one does not.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path("outputs/parity")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the matrix, prints its table and writes it; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parity", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=50, metavar="N", help="optimizer steps of each run (default: 50)")
    parser.add_argument("--ranks", type=int, nargs="+", metavar="N", help="only runs of so many ranks")
    parser.add_argument("--only", default="", metavar="TEXT", help="only runs with this in their name, as --list shows")
    parser.add_argument("--short", action="store_true", help="only what the tests run: every two features, few ranks")
    parser.add_argument("--list", action="store_true", help="show the runs, and train none")
    parser.add_argument("--resume", action="store_true", help="train only what an interrupted run of this has not")
    parser.add_argument("--output", metavar="FILE", help="the table as Markdown (default: outputs/parity/table.md)")
    arguments = parser.parse_args(argv)

    # For every process that is started from here: gloo ranks, and no look at the network.
    os.environ |= {"HYPER_PARALLEL_DEVICE": "cpu", "HF_HUB_OFFLINE": "1"}
    from benchmarks.parity.matrix import short_matrix, whole_matrix
    from benchmarks.parity.run import run, table

    chosen = [
        each
        for each in (short_matrix() if arguments.short else whole_matrix())
        if each.world_size in (arguments.ranks or (each.world_size,)) and arguments.only in each.name
    ]
    if arguments.list or not chosen:
        print("\n".join(f"{each.world_size} ranks: {each.name}" for each in chosen) or "there is no such run")
        return 0 if chosen else 2
    results = list(run(chosen, FOLDER, arguments.steps, resume=arguments.resume))
    text = table(results, arguments.steps)
    print(text)
    output = Path(arguments.output or FOLDER / "table.md")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text + "\n", encoding="utf-8")
    return 0 if all(result.passes for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
