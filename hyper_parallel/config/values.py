"""One converter from what a user writes (YAML values, command-line words) to what a field's annotation asks for.

Annotations decide: a whole number is fine for a float, the text ``1e-4`` (which YAML 1.1 does not take for a number)
is a float for a float field, a bool is never an int, and the words on, off, yes and no survive a `Literal` although
YAML reads them as booleans.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections import abc
from collections.abc import Iterable
from enum import Enum
from pathlib import PurePath
from typing import Any, Literal, Union

import yaml

from hyper_parallel.config.annotations import class_annotations
from hyper_parallel.config.configurable import ConfigNode, join
from hyper_parallel.config.errors import ConfigError, Fault, did_you_mean

_BOOLEAN_WORDS = {True: ("on", "yes", "true", "y"), False: ("off", "no", "false", "n")}
_NULL_WORDS = ("None", "null", "Null", "NULL")
_LISTS = (list, abc.Sequence, abc.Iterable, abc.Collection)
_MAPPINGS = (dict, abc.Mapping)
_CONTAINERS = (*_LISTS, *_MAPPINGS, tuple)
_SCALARS = (bool, int, float, str)
_NO_YAML = (yaml.YAMLError, ValueError, KeyError, RecursionError)
"""What PyYAML raises, also for the day 2024-02-31 and for numbers that Python does not read."""
_REMEDIES = {
    bool: "give true or false",
    int: "give a whole number",
    float: "give a number",
    str: "give text",
}


class Word(str):
    """One word of the command line: text for a `str` field as it stands, a YAML scalar for any other."""

    __slots__ = ()

    def read(self) -> Any:
        """The word as YAML reads it; text that is no YAML stays text."""
        try:
            return yaml.safe_load(self)
        except _NO_YAML:
            return str(self)

    def read_items(self) -> Any:
        """A flow list ``[a, b]`` or mapping ``{a: b}`` of words; the word itself when it is neither."""
        try:
            return _as_words(yaml.load(self, yaml.BaseLoader))
        except _NO_YAML:
            return self


def coerce(value: Any, annotation: Any, path: str) -> Any:
    """`value` as `annotation` wants it.

    Raises:
        ConfigError: it cannot be; with every fault inside a list, mapping or nested dataclass, not only the first.
    """
    annotation, origin, arguments = _unfold(annotation)
    if annotation is Any or isinstance(annotation, typing.TypeVar):
        return value.read() if isinstance(value, Word) else value
    if origin in (Union, types.UnionType):
        return _coerce_union(value, annotation, arguments, path)
    if origin is Literal:
        return _coerce_literal(value, arguments, path)
    if origin in _LISTS:
        return _coerce_items(value, annotation, arguments[0] if arguments else Any, path)
    if origin is tuple:
        return _coerce_tuple(value, annotation, arguments, path)
    if origin in _MAPPINGS:
        return _coerce_dict(value, annotation, arguments or (Any, Any), path)
    if not isinstance(origin, type):
        return value
    if origin in _SCALARS:
        return _coerce_scalar(value, origin, path)
    if origin is types.NoneType:
        if value is None or value in _NULL_WORDS:
            return None
        raise _unexpected(value, annotation, path, "leave it out")
    if issubclass(origin, Enum):
        return _coerce_enum(value, origin, path)
    if issubclass(origin, PurePath) and isinstance(value, (str, PurePath)):
        return origin(value)
    if dataclasses.is_dataclass(origin):
        return _coerce_dataclass(value, origin, path)
    if not _is_checkable(origin) or isinstance(value, origin):
        return value
    raise _unexpected(value, annotation, path, f"give {_a(describe(annotation))}, which only Python can")


def describe(annotation: Any) -> str:
    """An annotation in a user's words: ``int``, ``float or None``, ``one of none, full``, ``list of int``."""
    annotation, origin, arguments = _unfold(annotation)
    if origin in (Union, types.UnionType):
        members = sorted(arguments, key=lambda member: member is types.NoneType)
        return " or ".join(describe(member) for member in members)
    if origin is Literal:
        return "one of " + ", ".join(str(choice) for choice in arguments)
    if origin in _LISTS:
        return f"list of {describe(arguments[0])}" if arguments else "list"
    if origin is tuple:
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return f"list of {describe(arguments[0])}"
        return f"({', '.join(map(describe, arguments))})" if arguments else "list"
    if origin in _MAPPINGS:
        return "mapping of {} to {}".format(*map(describe, arguments)) if arguments else "mapping"
    if annotation is types.NoneType:
        return "None"
    if annotation is Any or isinstance(annotation, typing.TypeVar):
        return "anything"
    return getattr(origin, "__qualname__", str(annotation))


def is_writable(annotation: Any) -> bool:
    """Whether a user can write a value of this annotation as text: data, and no object of a program."""
    annotation, origin, arguments = _unfold(annotation)
    if annotation is Any or isinstance(annotation, typing.TypeVar) or origin is Literal:
        return True
    if origin in (Union, types.UnionType):
        return any(is_writable(member) for member in arguments if member is not types.NoneType)
    if origin in _CONTAINERS:
        return all(is_writable(argument) for argument in arguments if argument is not Ellipsis)
    return isinstance(origin, type) and (
        issubclass(origin, (*_SCALARS, types.NoneType, Enum, PurePath))
        or (dataclasses.is_dataclass(origin) and not issubclass(origin, ConfigNode))
    )


def is_optional(annotation: Any) -> bool:
    """Whether None is a value of this annotation."""
    return types.NoneType in _unfold(annotation)[2] or annotation in (None, types.NoneType, Any)


def takes_many(annotation: Any) -> bool:
    """Whether a field of this annotation takes several words of the command line."""
    _, origin, arguments = _unfold(annotation)
    if origin in (Union, types.UnionType):
        return any(map(takes_many, arguments))
    return origin in (*_LISTS, tuple)


def takes_bool(annotation: Any) -> bool:
    """Whether a field of this annotation is a switch, so that its bare flag means true."""
    _, origin, arguments = _unfold(annotation)
    if origin in (Union, types.UnionType):
        return any(map(takes_bool, arguments))
    return origin is bool


def shown(value: Any) -> str:
    """A value in a fault, with its kind, since ``3`` and ``'3'`` look alike once printed."""
    if isinstance(value, Word):
        value = value.read()
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return f"bool {str(value).lower()}"
    if isinstance(value, str):
        return f"text {str(value)!r}"
    if isinstance(value, (int, float)):
        return f"{type(value).__name__} {value}"
    if isinstance(value, dict):
        return f"a mapping of {', '.join(map(str, value))}" if value else "an empty mapping"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    return _a(type(value).__qualname__)


def _coerce_scalar(value: Any, kind: type, path: str) -> Any:
    if isinstance(value, Word):
        if kind is str:
            return str(value)
        value = value.read()
    if kind is float and isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            pass
    elif kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    elif isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    remedy = _REMEDIES[kind]
    if kind is str and value is not None and not isinstance(value, (list, dict)):
        remedy = "put it in quotes"
    elif kind is int and isinstance(value, str) and value.isdecimal():
        remedy = "give a whole number, without quotes"
    raise _unexpected(value, kind, path, remedy)


def _coerce_union(value: Any, annotation: Any, members: tuple[Any, ...], path: str) -> Any:
    read = value.read() if isinstance(value, Word) else value
    if types.NoneType in members and (value is None or (isinstance(value, str) and value in _NULL_WORDS)):
        return None
    members = tuple(member for member in members if member is not types.NoneType)
    # What already has the type of a member is that member, or `float | int` would turn every int into a float.
    for member in members:
        if member in (int, float) and type(read) is member:
            return read
    faults: tuple[Fault, ...] = ()
    for member in sorted(members, key=lambda member: member is str):
        try:
            return coerce(value, member, path)
        except ConfigError as error:
            faults = error.faults
    if len(members) == 1 and not (
        len(faults) == 1 and faults[0].path == path and faults[0].fact.startswith("expected")
    ):
        raise ConfigError(faults)
    remedy = faults[0].remedy if len(members) == 1 else f"give {_a(describe(annotation))}"
    raise _unexpected(value, annotation, path, remedy)


def _coerce_literal(value: Any, choices: tuple[Any, ...], path: str) -> Any:
    read = value.read() if isinstance(value, Word) else value
    for candidate in (str(value), read) if isinstance(value, Word) else (value,):
        for choice in choices:
            if type(choice) is type(candidate) and choice == candidate:
                return choice
    if isinstance(read, bool) and not isinstance(value, Word):
        # YAML 1.1 reads on, off, yes and no as booleans; a Literal that has the word meant the word.
        spelled = [c for c in choices if isinstance(c, str) and c.lower() in _BOOLEAN_WORDS[read]]
        if len(spelled) == 1:
            return spelled[0]
    words = [str(choice) for choice in choices]
    given = str(value) if isinstance(value, str) else str(read)
    raise ConfigError.one(
        path, f"expected {describe(Literal.__getitem__(choices))}, got {shown(value)}", did_you_mean(given, words)
    )


def _coerce_enum(value: Any, kind: type[Enum], path: str) -> Enum:
    if isinstance(value, kind):
        return value
    for member in kind:
        if value == member.value or (isinstance(value, Word) and value.read() == member.value):
            return member
    choices = [str(member.value) for member in kind]
    raise ConfigError.one(
        path, f"expected one of {', '.join(choices)}, got {shown(value)}", did_you_mean(str(value), choices)
    )


def _coerce_items(value: Any, annotation: Any, item: Any, path: str) -> list[Any]:
    items = value.read_items() if isinstance(value, Word) else value
    if not isinstance(items, (list, tuple)):
        raise _unexpected(value, annotation, path, "give a list such as [a, b]")
    return _collect((each, item, join(path, str(i))) for i, each in enumerate(items))


def _coerce_tuple(value: Any, annotation: Any, arguments: tuple[Any, ...], path: str) -> tuple[Any, ...]:
    if not arguments or (len(arguments) == 2 and arguments[1] is Ellipsis):
        return tuple(_coerce_items(value, annotation, arguments[0] if arguments else Any, path))
    items = value.read_items() if isinstance(value, Word) else value
    if not isinstance(items, (list, tuple)):
        raise _unexpected(value, annotation, path, f"give a list of {len(arguments)} values")
    if len(items) != len(arguments):
        raise ConfigError.one(
            path, f"expected {len(arguments)} values {describe(annotation)}, got {len(items)}", "give exactly that many"
        )
    return tuple(
        _collect((each, kind, join(path, str(i))) for i, (each, kind) in enumerate(zip(items, arguments, strict=True)))
    )


def _coerce_dict(value: Any, annotation: Any, arguments: tuple[Any, ...], path: str) -> dict[Any, Any]:
    mapping = value.read_items() if isinstance(value, Word) else value
    if not isinstance(mapping, abc.Mapping):
        raise _unexpected(value, annotation, path, "give a mapping such as {name: value}")
    key_kind, value_kind = arguments
    keys = _collect((key, key_kind, join(path, str(key))) for key in mapping)
    return dict(
        zip(keys, _collect((item, value_kind, join(path, str(key))) for key, item in mapping.items()), strict=True)
    )


def _coerce_dataclass(value: Any, kind: type, path: str) -> Any:
    if isinstance(value, kind):
        return value
    mapping = value.read_items() if isinstance(value, Word) else value
    if not isinstance(mapping, abc.Mapping):
        raise _unexpected(value, kind, path, "give a mapping of its fields")
    fields = {f.name: f for f in dataclasses.fields(kind) if f.init}
    hints = class_annotations(kind)
    faults: list[Fault] = []
    given: dict[str, Any] = {}
    for name in mapping:
        if name in fields:
            given[name] = mapping[name]
        else:
            remedy = did_you_mean(str(name), fields)
            faults.append(Fault(join(path, str(name)), f"{kind.__qualname__} has no such field", remedy))
    for name, f in fields.items():
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if required and name not in given:
            faults.append(Fault(join(path, name), "is missing", f"give {_a(describe(hints[name]))}"))
    try:
        values = _collect((item, hints[name], join(path, name)) for name, item in given.items())
    except ConfigError as error:
        faults.extend(error.faults)
    if faults:
        raise ConfigError(faults)
    try:
        return kind(**dict(zip(given, values, strict=True)))
    except ConfigError:
        raise
    except Exception as error:  # what a class of the user's refuses by itself, in its __post_init__
        fact = f"{kind.__qualname__} raised {type(error).__name__}: {error}"
        raise ConfigError.one(path, fact, "give values that it takes") from error


def _collect(items: Iterable[tuple[Any, Any, str]]) -> list[Any]:
    """Every (value, annotation, path) coerced, or one error with the faults of all."""
    values: list[Any] = []
    faults: list[Fault] = []
    for value, annotation, path in items:
        try:
            values.append(coerce(value, annotation, path))
        except ConfigError as error:
            faults.extend(error.faults)
    if faults:
        raise ConfigError(faults)
    return values


def _unfold(annotation: Any) -> tuple[Any, Any, tuple[Any, ...]]:
    """(annotation without Annotated and NewType, its origin or itself, its arguments)."""
    while True:
        if typing.get_origin(annotation) is typing.Annotated:
            annotation = typing.get_args(annotation)[0]
        elif isinstance(annotation, typing.NewType):
            annotation = annotation.__supertype__
        else:
            break
    if annotation is None:
        annotation = types.NoneType
    return annotation, typing.get_origin(annotation) or annotation, typing.get_args(annotation)


def _is_checkable(kind: type) -> bool:
    """Whether isinstance says something: not so for a Protocol, which is a promise about methods."""
    return not getattr(kind, "_is_protocol", False)


def _as_words(value: Any) -> Any:
    if isinstance(value, list):
        return [_as_words(item) for item in value]
    if isinstance(value, dict):
        return {Word(key): _as_words(item) for key, item in value.items()}
    return Word(value)


def _unexpected(value: Any, annotation: Any, path: str, remedy: str) -> ConfigError:
    return ConfigError.one(path, f"expected {describe(annotation)}, got {shown(value)}", remedy)


def _a(noun: str) -> str:
    return noun if noun.startswith(("one of", "(", "list", "mapping", "anything")) else f"a value of type {noun}"
