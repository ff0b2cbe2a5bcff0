"""Names of modules in a model: which fit a pattern, which are near to it, and those of the modules around one."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase

from hyper_parallel.config.errors import Fault


def matching(pattern: str, names: Iterable[str], path: str) -> tuple[list[str], list[Fault]]:
    """Those of `names` that fit `pattern`, which is written at `path`; and the fault where none does."""
    names = list(names)
    found = [name for name in names if fnmatchcase(name, pattern)]
    fact = f"[HP-REPLACE-001] {pattern!r} names no module of the model"
    return found, [] if found else [Fault(path, fact, near_names(pattern, names))]


def near_names(pattern: str, names: Iterable[str]) -> str:
    """The remedy for a pattern that fits none: what it may have been meant for, layers alike told once."""
    near = get_close_matches(pattern, dict.fromkeys(map(of_all_layers, names)), n=3, cutoff=0.4)
    return f"near: {', '.join(near) or 'none'}"


def with_outer(name: str) -> list[str]:
    """Names of the modules that the module `name` is in, the outermost first, and its own."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def of_all_layers(name: str) -> str:
    """`name` of a module, with * for its numbers."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
