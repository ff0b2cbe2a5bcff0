"""A short list of runs in which everything that goes together occurs together.

The greedy algorithm of AETG (Cohen et al., "The AETG system", 1997): each run starts from what is not covered yet, and
takes for one factor after the other the value that covers most. What is legal is asked of a function, of whole runs:
libraries for pairwise tests filter by rules over the factors, which would be a second copy of ours.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

Choice = dict[str, Any]
"""Factor -> value."""


class Space(NamedTuple):
    """All runs that there could be."""

    factors: Mapping[str, Sequence[Any]]
    """The values of each. The first is the one that asks for nothing and rules nothing out."""
    flexible: Sequence[str]
    """Factors of which others may demand another than the first value."""
    is_legal: Callable[[Choice], bool]
    """Of a value for every factor. Switching things off must not make a run illegal."""
    goals: Callable[[Choice], frozenset[Hashable]]
    """What a legal run covers."""

    def least(self, chosen: Choice) -> Choice | None:
        """The legal run with these values that has least beside them. None: there is none."""
        free = [name for name in self.flexible if name not in chosen]
        rest = {name: values[0] for name, values in self.factors.items()} | chosen
        for values in itertools.product(*(self.factors[name] for name in free)):
            run = rest | dict(zip(free, values, strict=True))
            if self.is_legal(run):
                return run
        return None

    def reachable(self) -> dict[Hashable, Choice]:
        """All that a legal run can cover, each with values that lead to it."""
        found: dict[Hashable, Choice] = {}
        for (first, ones), (second, others) in itertools.combinations(self.factors.items(), 2):
            for values in itertools.product(ones, others):
                chosen = dict(zip((first, second), values, strict=True))
                if (run := self.least(chosen)) is not None:
                    for goal in self.goals(run):
                        found.setdefault(goal, chosen)
        return found


def cover(space: Space, begin: Sequence[Choice] = (), *, tries: int = 3, seed: int = 0) -> Iterator[Choice]:
    """Legal runs that cover all that any legal one can; first one for each choice of `begin` that is legal.

    `tries`: runs that are thought of for each one that is taken.
    """
    draw = random.Random(seed)
    reachable = space.reachable()
    left = dict.fromkeys(reachable)  # a set that keeps its order

    def taken(run: Choice) -> Choice:
        for goal in space.goals(run):
            left.pop(goal, None)
        return run

    for chosen in begin:
        if space.least(chosen) is not None:
            yield taken(_grown(space, chosen, left, draw))
    while left:
        starts = [reachable[goal] for goal in draw.sample(list(left), min(tries, len(left)))]
        # The last covers its goal for certain; what grows may grow away from it.
        runs = [*(_grown(space, chosen, left, draw) for chosen in starts), space.least(starts[0])]
        yield taken(max(filter(None, runs), key=lambda run: len(space.goals(run) & left.keys())))


def _grown(space: Space, chosen: Choice, left: Mapping[Hashable, Any], draw: random.Random) -> Choice:
    """A legal run with the values `chosen`, which can be had, and others that cover much of what is left."""
    chosen = dict(chosen)
    names = [name for name in space.factors if name not in chosen]
    draw.shuffle(names)
    # Factors that others depend on come first.
    for name in sorted(names, key=lambda name: name not in space.flexible):
        best = -1
        for value in space.factors[name]:
            run = space.least(chosen | {name: value})
            if run is not None and (gain := len(space.goals(run) & left.keys())) > best:
                best, taken = gain, run[name]
        chosen[name] = taken  # of equal ones the first, which asks for least
    return chosen
