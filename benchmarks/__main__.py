"""Runs the benchmarks that are named, or all: python -m benchmarks [NAME ...] [--quick]

Exit codes: 0 all gates are kept; 1 one is not.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from benchmarks.report import markdown, write_json

DATA_NAMES = ("prepare_data", "indexed_samples")
NAMES = (
    *("start_up", "debug_run", "chunked_loss", "unpacked_rows", "packed_rows", "tensor_parallel_modes"),
    *("activation_memory", "checkpoint_throughput", *DATA_NAMES),
)
FOLDER = Path("outputs/bench")
THREADS = "2"


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the table and writes outputs/bench/results.json; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[*NAMES, []], help=", ".join(NAMES))
    parser.add_argument("--quick", action="store_true", help="the shortest runs that show that all works")
    arguments = parser.parse_args(argv)

    # For every process that is started from here: the same threads, and no look at the network.
    os.environ |= {"OMP_NUM_THREADS": THREADS, "HYPER_PARALLEL_DEVICE": "cpu", "HF_HUB_OFFLINE": "1"}
    reports = []
    for name in arguments.names or NAMES:
        print(f"{name} ...", file=sys.stderr, flush=True)
        reports.append(importlib.import_module(f"benchmarks.{name}").measure(FOLDER, quick=arguments.quick))
    print(markdown(reports))
    packages = {
        name: version(name)
        for name in ("torch", "transformers", "accelerate", "tokenizers", "datasets", "megatron-core")
    }
    machine = {"processor": platform.processor() or platform.machine(), "threads": int(THREADS)}
    write_json(reports, FOLDER / "results.json", quick=arguments.quick, machine=machine, packages=packages)
    if arguments.quick:
        print("quick: too short to judge any gate by")
        return 0
    return 0 if all(gate.is_kept for report in reports for gate in report.gates) else 1


if __name__ == "__main__":
    sys.exit(main())
