"""Command-line words onto a composed tree.

``--a.b 3`` and ``--a.b=3`` set a value; a bare flag is true where the field is a switch. A list takes its items as
words (``--betas 0.9 0.95``) or as one flow list (``--betas [0.9,0.95]``); items of a tuple of components have numbers
(``--metrics.sinks.0.folder x``). Hyphens and underscores in a name are the same. A flag given again replaces what it
said before, as in a script that appends ``"$@"``; the same field under two of its names is a fault.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hyper_parallel.config.configurable import ConfigNode, join
from hyper_parallel.config.errors import ConfigError, Fault, nearest
from hyper_parallel.config.schema import Setting, settings
from hyper_parallel.config.values import Word, coerce, describe, takes_bool, takes_many

_FLAG = re.compile(r"--[A-Za-z_].*|-[A-Za-z]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Override:
    """One flag of the command line."""

    name: str
    """As the user wrote it, without the dashes in front."""
    words: tuple[str, ...]
    """What follows it, untouched."""


def parse(argv: Iterable[str]) -> tuple[list[Override], list[str]]:
    """(the flags of a command line with their words, the words in front of the first flag)."""
    overrides: list[Override] = []
    positional: list[str] = []
    for token in argv:
        if _FLAG.fullmatch(token):
            name, equals, word = token.removeprefix("--").partition("=")
            overrides.append(Override(name, (word,) if equals else ()))
        elif overrides:
            last = overrides[-1]
            overrides[-1] = Override(last.name, (*last.words, token))
        else:
            positional.append(token)
    return overrides, positional


def apply(tree: ConfigNode, overrides: Iterable[Override]) -> dict[str, str]:
    """Sets every override on `tree`; returns canonical path -> the name that the user wrote, for later faults.

    Raises:
        ConfigError: with all faults: unknown paths, fields given under two names, values of another type, stray words.
    """
    found = settings(tree)
    index = {each.path: each for each in found}
    for each in found:
        for name in each.names:
            index.setdefault(name, each)
    written: dict[str, str] = {}
    faults: list[Fault] = []
    for override in overrides:
        setting = index.get(normalized(override.name))
        if setting is None:
            faults.append(_unknown(override.name, index))
            continue
        earlier = written.setdefault(setting.path, override.name)
        if normalized(earlier) != normalized(override.name):
            faults.append(Fault(override.name, f"{earlier} is the same setting and is given too", "keep one of them"))
            continue
        try:
            setattr(setting.node, setting.field, _value(override, setting))
        except ConfigError as error:
            faults.extend(error.faults)
    if faults:
        raise ConfigError(faults)
    return written


def stray(words: Iterable[str], after: str = "") -> list[Fault]:
    """A fault for each word that belongs to no flag."""
    place = f"the word after --{after} belongs to no flag" if after else "the word belongs to no flag"
    return [Fault(word, place, "write --name value or --name=value") for word in words]


def _value(override: Override, setting: Setting) -> object:
    words = override.words
    if not words:
        if takes_bool(setting.annotation) or setting.stands_for(override.name):
            return setting.coerced(True, override.name)
        raise ConfigError.one(
            override.name, f"expected {describe(setting.annotation)}, got nothing", f"write --{override.name} VALUE"
        )
    if takes_many(setting.annotation) and not _is_one_word(words):
        return coerce([Word(word) for word in words], setting.annotation, override.name)
    if len(words) > 1:
        raise ConfigError(stray(words[1:], after=override.name))
    return setting.coerced(Word(words[0]), override.name)


def _is_one_word(words: Sequence[str]) -> bool:
    """Whether the words are a flow list by themselves, or the word for no list at all."""
    return len(words) == 1 and (words[0].startswith("[") or Word(words[0]).read() in (None, "None"))


def _unknown(name: str, index: Mapping[str, Setting]) -> Fault:
    spelled = normalized(name)
    parent, _, last = spelled.rpartition(".")
    if last == "_target_":
        return Fault(name, "a class cannot be changed on the command line", "choose it in a recipe or in YAML")
    inside = next((known for known in index if known.startswith(f"{spelled}.")), None)
    if inside:
        return Fault(name, "is a group of settings", f"set what is in it, as in --{inside}")
    return Fault(name, "is no setting", _remedy(spelled, parent, last, index))


def _remedy(spelled: str, parent: str, last: str, index: Mapping[str, Setting]) -> str:
    """The nearest sibling, else the same field elsewhere (`--lr`), else the siblings, else whatever looks alike."""
    siblings = [known.rpartition(".")[2] for known in index if known.rpartition(".")[0] == parent]
    namesakes = [known for known in index if known.rpartition(".")[2] == last]
    if near := nearest(last, siblings):
        return f"did you mean {join(parent, near)!r}?"
    if namesakes:
        return f"did you mean {(nearest(spelled, namesakes) or namesakes[0])!r}?"
    if parent and siblings:
        return f"choose one of {', '.join(siblings)}"
    near = nearest(spelled, index)
    return f"did you mean {near!r}?" if near else "--help lists all settings"


def normalized(name: str) -> str:
    """The name of a flag as fields are written: hyphens and underscores are the same."""
    return name.replace("-", "_")
