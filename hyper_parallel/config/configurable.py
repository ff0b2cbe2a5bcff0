"""The config tree: a Config says *what* to build, the arguments of `build` say *with whom*.

A component derives from `Configurable` and nests its `Config`, a dataclass with ``kw_only`` and ``slots``::

    class Profiler(Configurable):
        @dataclass(kw_only=True, slots=True)
        class Config(Configurable.Config):
            interval_steps: int = 0
            \"\"\"Write a trace every this many steps; 0 is never.\"\"\"

        def __init__(self, config: Config, *, dump_folder: str) -> None: ...

    profiler = Profiler.Config(interval_steps=10).build(dump_folder="outputs")

A tree of Configs is mutable while it is composed and sealed before it is built. It knows no framework.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field
from enum import Enum
from pathlib import PurePath
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from hyper_parallel.config.errors import Fault

ProductT_co = TypeVar("ProductT_co", covariant=True)
NodeT = TypeVar("NodeT", bound="ConfigNode")


class Buildable(Protocol[ProductT_co]):
    """Whatever makes a product from runtime arguments: our Configs and a `Target` alike."""

    def build(self, **runtime: Any) -> ProductT_co: ...


class Sealable:
    """An object whose attributes can be frozen once and for all."""

    __slots__ = ("_sealed",)

    def __setattr__(self, name: str, value: Any) -> None:
        if getattr(self, "_sealed", False):
            raise AttributeError(
                f"{type(self).__qualname__}.{name}: this config is sealed, so what was saved is what is built; "
                "use derive() for a changed copy"
            )
        object.__setattr__(self, name, value)

    def __getstate__(self) -> dict[str, Any]:
        # A copy is open again: the seal belongs to the tree that was saved, not to what is derived from it.
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, value)


@dataclass(kw_only=True, slots=True)
class ConfigNode(Sealable):
    """A typed dataclass in the config tree: a section of plain data, or the base of every nested `Config`."""

    def faults(self) -> Iterator[Fault]:
        """Faults of this node by itself, with paths relative to it. Rules across sections belong to the root."""
        return iter(())

    def traverse(self, path: str = "") -> Iterator[tuple[str, ConfigNode]]:
        """Yields (dotted path, node) for this node and every node below it, parents first.

        Nodes are found inside lists, tuples, dicts and plain dataclasses (a ModelSpec) as well.
        """
        return _traverse(self, path)

    def replace_all(self, kind: type[NodeT], change: Callable[[NodeT], Any]) -> int:
        """Puts `change(node)` in the place of every node of type `kind` below this one; returns how many.

        Children are replaced before their parents, so `change` sees finished subtrees.
        """
        count = 0

        def visit(value: Any) -> Any:
            nonlocal count
            changed = {}
            for name, old in parts(value):
                new = visit(old)
                if new is not old:
                    changed[name] = new
            if isinstance(value, ConfigNode):
                for name, new in changed.items():
                    setattr(value, name, new)
                if isinstance(value, kind) and value is not self:
                    count += 1
                    return change(value)
                return value
            return _with_parts(value, changed) if changed else value

        visit(self)
        return count

    def derive(self, **changes: Any) -> Self:
        """An independent, open copy with `changes` to its own fields."""
        other = copy.deepcopy(self)
        names = {f.name for f in dataclasses.fields(self)}
        for name, value in changes.items():
            if name not in names:
                raise TypeError(f"{type(self).__qualname__} has no field {name!r}; it has {', '.join(sorted(names))}")
            setattr(other, name, value)
        return other

    def seal(self) -> None:
        """Freezes this node and every node below it."""
        for _, node in self.traverse():
            object.__setattr__(node, "_sealed", True)

    def to_dict(self) -> dict[str, Any]:
        """The subtree as plain dicts, lists and scalars, for logs and JSON. Built-by-class nodes carry `_target_`."""
        return {f.name: plain(getattr(self, f.name)) for f in dataclasses.fields(self)}


class Configurable:
    """Base of every component that is built from a nested Config.

    A subclass nests ``class Config(Configurable.Config)`` and takes it as first argument of ``__init__``; what it
    needs at run time comes as keyword arguments. A subclass without a Config of its own gets an equal one that
    builds the subclass, never its parent.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ConfigNode):
        """Base of every nested Config."""

        owner: ClassVar[type[Any]]
        """The class that `build` makes an instance of."""

        def build(self, **runtime: Any) -> Any:
            """Makes the configured object.

            Raises:
                TypeError: a runtime argument has the name of a configured field, so two values would compete.
            """
            clash = sorted({f.name for f in dataclasses.fields(self)} & runtime.keys())
            if clash:
                raise TypeError(
                    f"{type(self).__qualname__}.build: {', '.join(clash)} given both in the config and at run time"
                )
            return type(self).owner(self, **runtime)

        def to_dict(self) -> dict[str, Any]:
            # Named bases: dataclass(slots=True) makes a second class, which a bare super() would not find.
            return {"_target_": target_path(type(self)), **ConfigNode.to_dict(self)}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        config = cls.__dict__.get("Config")
        if config is None:
            # The inherited Config builds the parent, so a subclass that adds no field needs one of its own.
            names = {"__module__": cls.__module__, "__qualname__": f"{cls.__qualname__}.Config", "__doc__": cls.__doc__}
            config = dataclass(kw_only=True, slots=True)(type("Config", (cls.Config,), names))
            cls.Config = config  # type: ignore[misc]
        elif not ("__dataclass_params__" in config.__dict__ and "__slots__" in config.__dict__):
            raise TypeError(f"{cls.__qualname__}.Config: decorate it with @dataclass(kw_only=True, slots=True)")
        config.owner = cls


@dataclass(frozen=True, slots=True)
class Slot(Generic[ProductT_co]):
    """What a slot's field says about itself, under the key ``"slot"`` of its metadata."""

    runtime: tuple[str, ...]
    """Names of the arguments that the trainer passes to `build`."""


def slot(
    default: Callable[[], Buildable[Any] | tuple[Buildable[Any], ...]] | None,
    *,
    runtime: str = "",
    aliases: tuple[str, ...] = (),
    inline: bool = False,
) -> Any:
    """A dataclass field that holds a Buildable, or a tuple of them.

    `default` makes the default Config (usually a Config class) or tuple; None makes the slot optional. `runtime` names,
    space separated, what the trainer passes to that `build`: the resolver reads it to see whether anything is missing,
    a `Target` to see what it may take. `inline` is that of `setting`.
    """
    metadata = {"slot": Slot(tuple(runtime.split())), "aliases": aliases, "inline": inline}
    if default is None:
        return field(default=None, metadata=metadata)
    return field(default_factory=default, metadata=metadata)


def setting(
    default: Any = MISSING,
    *,
    default_factory: Any = MISSING,
    aliases: tuple[str, ...] = (),
    switches: Mapping[str, tuple[Any, Any]] | None = None,
    hidden: bool = False,
    inline: bool = False,
) -> Any:
    """A plain field that says more about itself.

    It also answers to `aliases`: dotted paths from the root if they contain a dot, else siblings. `switches` are
    aliases that are false or true, with the values that these stand for. A `hidden` one is the program's alone: no user
    sets it. The fields of an `inline` node also answer to paths that leave the node out.
    """
    switches = switches or {}
    metadata = {"aliases": (*aliases, *switches), "switches": switches, "hidden": hidden, "inline": inline}
    return field(default=default, default_factory=default_factory, metadata=metadata)


def target_path(obj: Any) -> str:
    """The importable dotted path of a class or function, as YAML's `_target_` names it."""
    return f"{obj.__module__}.{obj.__qualname__}"


def plain(value: Any) -> Any:
    """`value` as dicts, lists and scalars. Objects with a `to_dict` answer for themselves."""
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, PurePath):
        return str(value)
    if hasattr(value, "to_dict") and not isinstance(value, type):
        return value.to_dict()
    if _is_dataclass_instance(value):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {plain(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if callable(value) and hasattr(value, "__qualname__"):
        return target_path(value)
    return value


def parts(value: Any) -> Iterator[tuple[str, Any]]:
    """The named parts of a dataclass, list, tuple or dict, as segments of a dotted path; nothing for other values."""
    if _is_dataclass_instance(value):
        for f in dataclasses.fields(value):
            yield f.name, getattr(value, f.name)
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield str(i), item
    elif isinstance(value, dict):
        for key, item in value.items():
            yield str(key), item


def join(path: str, segment: str) -> str:
    """`path.segment`; at the root, whose path is empty, the segment alone."""
    return f"{path}.{segment}" if path else segment


def _is_dataclass_instance(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _traverse(value: Any, path: str) -> Iterator[tuple[str, ConfigNode]]:
    if isinstance(value, ConfigNode):
        yield path, value
    for segment, part in parts(value):
        yield from _traverse(part, join(path, segment))


def _with_parts(value: Any, changed: dict[str, Any]) -> Any:
    """A copy of a container or plain dataclass with some of its `parts` changed."""
    if _is_dataclass_instance(value):
        return dataclasses.replace(value, **changed)
    if isinstance(value, dict):
        return {key: changed.get(str(key), item) for key, item in value.items()}
    items = [changed.get(str(i), item) for i, item in enumerate(value)]
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
