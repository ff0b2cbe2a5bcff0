"""Tools for data on disk.

Exit codes: 0 all is well; 1 the tool could not go on; 2 the command line or the data is wrong.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
from collections.abc import Sequence

from hyper_parallel.config.errors import ConfigError, RunError

TOOLS = {
    "prepare": "tokenise text into a pair PREFIX.bin, PREFIX.idx",
    "validate": "check a pair PREFIX.bin, PREFIX.idx to the last token",
    "inspect": "print documents of a pair PREFIX.bin, PREFIX.idx",
    "stats": "count what the dataloader of a configuration reads, and how well it is packed",
}
"""Name of each tool, and of its module here, to what it does."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one tool; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python -m hyper_parallel.data_tools", description=__doc__)
    tools = parser.add_subparsers(dest="tool", required=True, metavar="TOOL")
    for name, summary in TOOLS.items():
        tool_parser = tools.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        if name in argv[:1]:  # the others need not be imported
            importlib.import_module(f"hyper_parallel.data_tools.{name}").add_arguments(tool_parser)
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        importlib.import_module(f"hyper_parallel.data_tools.{arguments.tool}").run(arguments)
    except (ConfigError, RunError) as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
