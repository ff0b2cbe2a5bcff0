"""Files whose groups do not all say what they are: what leaves no choice is filled in before they are resolved."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hyper_parallel.config.annotations import is_node
from hyper_parallel.config.configurable import ConfigNode, join, target_path
from hyper_parallel.config.errors import ConfigError, Fault, did_you_mean
from hyper_parallel.config.resolver import TARGET, YAML_NAMES, fields_by_name
from hyper_parallel.config.schema import Setting, default_config, field_types, settings


@dataclass(frozen=True, slots=True)
class Filled:
    """What `resolver.resolve` takes."""

    content: dict[str, Any]
    written: dict[str, str]
    """Canonical path -> the path that the user wrote, of each value that was moved."""
    faults: list[Fault]
    """What could not be moved: no setting answers to it, or its setting is given by itself as well."""


def fill_targets(raw: Mapping[str, Any], root: type[ConfigNode]) -> Filled:
    """`raw` with the `_target_` of each group that leaves no choice.

    There is no choice in a section of plain data, and in a slot whose declared class is what its default makes. Groups
    that the root does not have, such as ``accelerator``, give their values to the settings that answer to them.
    """
    filled = {str(name): value for name, value in raw.items()}
    written: dict[str, str] = {}
    faults = list(_move_groups(filled, root, written))
    types = field_types(root)
    for name, f in fields_by_name(root).items():
        value, cls = filled.get(name), _only_class(f, types[f.name])
        if isinstance(value, Mapping) and TARGET not in value and cls is not None:
            filled[name] = {TARGET: target_path(cls), **value}
    return Filled(filled, written, faults)


def _only_class(f: dataclasses.Field[Any], annotation: Any) -> type | None:
    """The class that a group for the field `f` must be; None where there is a choice."""
    default = default_config(f)
    if f.name in YAML_NAMES or not isinstance(default, ConfigNode):
        return None
    if is_node(annotation):
        return type(default)
    return type(default) if getattr(default, "owner", None) in typing.get_args(annotation) else None


def _move_groups(filled: dict[str, Any], root: type[ConfigNode], written: dict[str, str]) -> Iterator[Fault]:
    known = settings(root())
    homes = {alias: each for each in known for alias in each.names}
    own = fields_by_name(root)
    for group in [name for name in filled if name in own and isinstance(filled[name], Mapping)]:
        # A group of the root may also hold, under its alias, what belongs to another one.
        for name, value in list(filled[group].items()):
            home = homes.get(f"{group}.{name}")
            if home is not None and home.path.partition(".")[0] != own[group].name:
                filled[group] = {each: v for each, v in filled[group].items() if each != name}
                yield from _move(f"{group}.{name}", value, home, filled, written, own)
    for group in [name for name in filled if name not in own]:
        answering = [alias for alias in homes if alias.startswith(f"{group}.")]
        if answering:
            for path, value in _leaves(filled.pop(group), group):
                if path in homes:
                    yield from _move(path, value, homes[path], filled, written, own)
                else:
                    yield Fault(path, "no setting answers to it", did_you_mean(path, answering))


def _move(
    path: str,
    value: Any,
    home: Setting,
    filled: dict[str, Any],
    written: dict[str, str],
    own: Mapping[str, dataclasses.Field[Any]],
) -> Iterator[Fault]:
    for name in home.names:
        group, _, field = name.partition(".")
        if isinstance(filled.get(group), Mapping) and field in filled[group]:
            yield Fault(path, f"{name} is the same setting and is given too", "keep one of them")
            return
    first, _, field = home.path.partition(".")
    group = next((name for name, f in own.items() if f is own[first] and name in filled), first)
    if isinstance(filled.get(group, {}), Mapping):
        if home.stands_for(path):
            try:
                value = home.coerced(value, path)
            except ConfigError as error:
                yield from error.faults
                return
        filled[group] = {**filled.get(group, {}), field: value}
        written[home.path] = path


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _leaves(item, join(path, str(name)))
    else:
        yield path, value
