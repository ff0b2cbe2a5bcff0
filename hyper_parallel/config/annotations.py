"""What the annotation of a field says about the components that it holds."""

from __future__ import annotations

import functools
import inspect
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Union

from hyper_parallel.config.configurable import Buildable, ConfigNode, Configurable


def resolved(annotation: Any, names: Mapping[str, Any]) -> Any:
    """`annotation` with its texts evaluated among `names`; Any where they name what exists for type checkers only."""
    holder = types.SimpleNamespace(__annotations__={"it": annotation})
    try:
        return typing.get_type_hints(holder, dict(names))["it"]
    except (NameError, AttributeError, TypeError, SyntaxError):
        return Any


@functools.cache
def class_annotations(cls: type) -> Mapping[str, Any]:
    """The resolved annotations of a class and its bases."""
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        names = {**getattr(sys.modules.get(base.__module__), "__dict__", {}), **vars(base)}
        found |= {name: resolved(each, names) for name, each in inspect.get_annotations(base).items()}
    return found


def members(annotation: Any) -> Iterator[Any]:
    """What an annotation holds beside None: of a union its members, of a list or tuple of components their class."""
    origin = typing.get_origin(annotation)
    if origin in (Union, types.UnionType):
        for member in typing.get_args(annotation):
            if member is not type(None):
                yield from members(member)
    elif origin in (list, tuple):
        yield from members(typing.get_args(annotation)[0])
    else:
        yield annotation


def is_target(annotation: Any) -> bool:
    """Whether a field of this annotation holds something to build, chosen by a `_target_`."""
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return any(map(is_target, typing.get_args(annotation)))
    kind = typing.get_origin(annotation) or annotation
    return kind is Buildable or (isinstance(kind, type) and issubclass(kind, Configurable.Config))


def is_named(value: Any, annotation: Any) -> bool:
    """Whether `value` is text in a field of this annotation that takes a name as well as something to build."""
    return isinstance(value, str) and str in members(annotation)


def holds_targets(annotation: Any) -> bool:
    """Whether a field of this annotation holds a list of such."""
    return typing.get_origin(annotation) in (list, tuple) and is_target(typing.get_args(annotation)[0])


def holds_nodes(annotation: Any) -> bool:
    """Whether a field of this annotation holds a list of sections of plain data."""
    if typing.get_origin(annotation) not in (list, tuple):
        return False
    item = typing.get_args(annotation)[0]
    return is_node(item) and not is_target(item)


def is_node(annotation: Any) -> bool:
    """Whether a field of this annotation holds a Config or a section itself."""
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return any(is_node(m) for m in typing.get_args(annotation))
    return isinstance(annotation, type) and issubclass(annotation, ConfigNode)
