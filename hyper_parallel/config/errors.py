"""Faults that a user can mend, collected before any is raised.

Every message has one shape, ``path: fact; remedy``: where the value stands, what is wrong with it (the value
included), and what to write instead.
"""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    """One mistake in a configuration."""

    path: str
    """Dotted path of the field, as the user wrote it."""
    fact: str
    """What is wrong, with the value."""
    remedy: str
    """What to write instead."""
    place: str = ""
    """File and line of the value, as ``run.yaml:12``, where it stands in a file."""

    def __str__(self) -> str:
        place = f" ({self.place})" if self.place else ""
        return f"{self.path}: {self.fact}{place}; {self.remedy}"


class ConfigError(Exception):
    """A configuration that cannot be trained. Front doors print one line per fault and exit with code 2."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = tuple(faults)
        super().__init__("\n".join(map(str, self.faults)))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Fault, ...]]]:
        return type(self), (self.faults,)  # worker processes hand it on

    @classmethod
    def one(cls, path: str, fact: str, remedy: str) -> ConfigError:
        """The error of a single fault."""
        return cls([Fault(path, fact, remedy)])

    @classmethod
    def raised(cls, path: str, name: str, error: BaseException) -> ConfigError:
        """The error of a user's callable `name` that raised `error`, with the line that did."""
        at = traceback.extract_tb(error.__traceback__)[-1]
        return cls.one(path, f"{name} raised {type(error).__name__}: {error}", f"see {at.filename}:{at.lineno}")


def raise_faults(faults: Iterable[Fault]) -> None:
    """Raises ConfigError with all `faults`; returns when there are none."""
    collected = tuple(faults)
    if collected:
        raise ConfigError(collected)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` was probably meant to be."""
    near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.6)
    return near[0] if near else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The remedy for an unknown `name`: the nearest known one where there is one, else the whole list."""
    known = sorted(known)
    near = nearest(name, known)
    if near:
        return f"did you mean {near!r}?"
    return f"choose one of {', '.join(known)}" if known else "remove it: nothing can be set here"


class RunError(Exception):
    """A run that cannot go on, for a reason whose message is all that a user needs: shown without a traceback."""
