"""YAML files with the line of every value, so that a fault can say where it stands."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hyper_parallel.config.configurable import join
from hyper_parallel.config.errors import ConfigError, Fault, raise_faults

_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


@dataclass(frozen=True, slots=True)
class YamlFile:
    """A mapping that was read from a file."""

    name: str
    """The file, as the user named it."""
    content: dict[str, Any]
    """What it says, in dicts, lists and scalars."""
    lines: dict[str, int]
    """Dotted path of each value -> the line of its name, counted from 1."""

    def placed(self, faults: Iterable[Fault]) -> list[Fault]:
        """`faults` with the line of the value each is about, or of the nearest group that the file names."""
        return [fault if fault.place else dataclasses.replace(fault, place=self._place(fault.path)) for fault in faults]

    def _place(self, path: str) -> str:
        while path and path not in self.lines:
            path = path.rpartition(".")[0]
        return f"{self.name}:{self.lines[path]}" if path else self.name


def read(path: str) -> YamlFile:
    """The mapping in the YAML file at `path`.

    Raises:
        ConfigError: it cannot be read, is no YAML, is empty, holds no mapping, or names something twice; all names
            that are given twice are told.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError.one(path, "there is no such file", "give a YAML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError.one(path, f"cannot be read ({error})", "give a readable file of UTF-8 text") from error
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            raise ConfigError.one(path, "the file is empty", "say what to train, as `model:` with a `_target_`")
        if not isinstance(node, yaml.MappingNode):
            kind = "list" if isinstance(node, yaml.SequenceNode) else "single value"
            raise ConfigError.one(path, f"the file holds a {kind}", "write groups, as in `model:` and `training:`")
        lines: dict[str, int] = {}
        raise_faults(_read_lines(node, "", path, lines, set()))
        return YamlFile(path, loader.construct_document(node), lines)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{path}:{mark.line + 1}" if mark else ""
        problem = " ".join(filter(None, (error.context, error.problem)))
        raise ConfigError([Fault(path, f"is no YAML: {problem}", "mend the line", place)]) from error
    except RecursionError:
        raise ConfigError.one(path, "its lists and mappings are nested too deep", "write it flatter") from None
    except (yaml.YAMLError, ValueError, KeyError) as error:  # characters that no YAML may hold, days no month has
        raise ConfigError.one(path, f"is no YAML: {' '.join(str(error).split())}", "mend it") from error


def _read_lines(node: yaml.Node, path: str, file: str, lines: dict[str, int], above: set[int]) -> list[Fault]:
    """Fills `lines` with what lies below `node`; returns a fault for each name that a mapping gives twice."""
    if id(node) in above:
        fact, place = "an alias stands inside its own anchor", f"{file}:{node.start_mark.line + 1}"
        return [Fault(path, fact, "write the value out", place)]
    above = above | {id(node)}
    faults: list[Fault] = []
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            if (
                key.value == "<<"
            ):  # its own names win over merged ones, and what is merged was looked at where it stands
                _read_lines(value, path, file, lines, above)
        for key, value in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            where = join(path, name)
            if name == "<<":
                continue
            if key.tag not in _NUMBERS:
                key.tag = "tag:yaml.org,2002:str"  # a name such as `on` is a word, though YAML 1.1 makes it a boolean
            if name in seen:
                fact = f"is given twice, on lines {seen[name]} and {line}"
                faults.append(Fault(where, fact, "keep one of them", f"{file}:{line}"))
            seen.setdefault(name, line)
            lines[where] = line
            faults.extend(_read_lines(value, where, file, lines, above))
    elif isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            where = join(path, str(i))
            lines[where] = item.start_mark.line + 1
            faults.extend(_read_lines(item, where, file, lines, above))
    return faults
