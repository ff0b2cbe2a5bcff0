"""What the annotation of a field says about the components that it holds."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from typing import Any, Union

from hyper_parallel.config.configurable import Buildable, ConfigNode, Configurable


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


def holds_targets(annotation: Any) -> bool:
    """Whether a field of this annotation holds a list of such."""
    return typing.get_origin(annotation) in (list, tuple) and is_target(typing.get_args(annotation)[0])


def is_node(annotation: Any) -> bool:
    """Whether a field of this annotation holds a Config or a section itself."""
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return any(is_node(m) for m in typing.get_args(annotation))
    return isinstance(annotation, type) and issubclass(annotation, ConfigNode)
