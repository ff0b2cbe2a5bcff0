"""Facts about Config classes, read once for the command line, `--help`, the resolver and the docs."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hyper_parallel.config.annotations import class_annotations
from hyper_parallel.config.configurable import ConfigNode, Slot, join, parts
from hyper_parallel.config.target import UNSET, Target
from hyper_parallel.config.values import coerce, is_writable


@dataclass(frozen=True, slots=True)
class Setting:
    """One value that a user may set in a composed tree."""

    names: tuple[str, ...]
    """Dotted paths from the root that name it: the canonical one first, then every alias."""
    node: ConfigNode
    """The node that holds it."""
    field: str
    """The field of `node`."""
    annotation: Any
    """The resolved type of the field."""

    @property
    def path(self) -> str:
        """The canonical path."""
        return self.names[0]

    @property
    def value(self) -> Any:
        """The value as it stands; UNSET where a Target's callable decides."""
        return getattr(self.node, self.field)

    @property
    def doc(self) -> str:
        """The one-line documentation of the field; empty where it has none."""
        return field_docs(type(self.node)).get(self.field, "")

    def stands_for(self, name: str) -> tuple[Any, Any] | None:
        """What false and true stand for under `name`; None: it is no switch."""
        (field,) = (f for f in dataclasses.fields(self.node) if f.name == self.field)
        values: tuple[Any, Any] | None = field.metadata.get("switches", {}).get(name.replace("-", "_"))
        return values

    def coerced(self, value: Any, name: str) -> Any:
        """`value`, given under `name`, as the field wants it.

        Raises:
            ConfigError: it cannot be.
        """
        values = self.stands_for(name)
        return coerce(value, self.annotation, name) if values is None else values[coerce(value, bool, name)]

    @property
    def required(self) -> bool:
        """Whether it has no value yet and needs one before the tree can be built."""
        return isinstance(self.node, Target) and self.value is UNSET and self.field in self.node.missing(())


def field_types(cls: type) -> Mapping[str, Any]:
    """The resolved annotation of each field of a Config class."""
    return _field_types(cls)


@functools.cache
def _field_types(cls: type) -> Mapping[str, Any]:
    hints = class_annotations(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def field_docs(cls: type) -> Mapping[str, str]:
    """The documentation of each field, as one line: the string under it, or what the docstring of a Target says."""
    return _field_docs(cls)


@functools.cache
def _field_docs(cls: type) -> Mapping[str, str]:
    if issubclass(cls, Target):
        import docstring_parser

        parsed = docstring_parser.parse(cls.__doc__ or "")
        return {parameter.arg_name: _one_line(parameter.description or "") for parameter in parsed.params}
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        docs.update(_documented_classes(base.__module__).get(base.__qualname__, {}))
    return {name: docs[name] for name in field_types(cls) if name in docs}


def field_aliases(field: dataclasses.Field[Any]) -> tuple[str, ...]:
    """The other names of a field: dotted paths from the root if they contain a dot, else siblings."""
    return tuple(field.metadata.get("aliases", ()))


def field_slot(field: dataclasses.Field[Any]) -> Slot[Any] | None:
    """What `slot()` said about a field; None for a field that is no slot."""
    return field.metadata.get("slot")


def default_config(field: dataclasses.Field[Any]) -> Any:
    """A new default of a field that has a factory, as slots and sections do; None for other fields."""
    return None if field.default_factory is dataclasses.MISSING else field.default_factory()


def settings(tree: ConfigNode) -> list[Setting]:
    """Every setting of a composed tree, in the order of the fields, for the classes that really are in its slots.

    Left out are hidden fields, what only a program can give (functions, modules), and the arguments of a Target that
    the run supplies.
    """
    return list(_settings(tree, ("",), frozenset()))


def slot_table(root: type[ConfigNode]) -> str:
    """A markdown table of the slots of `root`: what each makes, its default, and what `build` gets from the trainer."""
    lines = ["| slot | makes | default | runtime arguments |", "|---|---|---|---|"]
    types = field_types(root)
    for f in dataclasses.fields(root):
        slot = field_slot(f)
        if slot is None:
            continue
        products = ", ".join(p.__name__ for p in _products(types[f.name]))
        default = f"`{type(made).__qualname__}`" if (made := default_config(f)) else "none"
        names = " ".join(f"`{name}`" for name in slot.runtime)
        aliases = "".join(f" (also `{alias}`)" for alias in field_aliases(f))
        lines.append(f"| `{f.name}`{aliases} | {products} | {default} | {names} |")
    return "\n".join(lines) + "\n"


def _settings(node: ConfigNode, prefixes: Sequence[str], supplied: frozenset[str]) -> Iterator[Setting]:
    for f in dataclasses.fields(node):
        if f.name in supplied or f.metadata.get("hidden"):
            continue
        siblings = [name for name in field_aliases(f) if "." not in name]
        rooted = [name for name in field_aliases(f) if "." in name]
        names = [join(prefix, name) for prefix in prefixes for name in (f.name, *siblings)] + rooted
        if f.metadata.get("inline"):
            names.extend(prefixes)
        branches = list(_branches(getattr(node, f.name), names))
        slot = field_slot(f)
        for child, child_names in branches:
            runtime = frozenset(slot.runtime) if slot and isinstance(child, Target) else frozenset[str]()
            yield from _settings(child, child_names, runtime)
        annotation = field_types(type(node))[f.name]
        if not branches and is_writable(annotation):
            yield Setting(tuple(names), node, f.name, annotation)


def _branches(value: Any, names: Sequence[str]) -> Iterator[tuple[ConfigNode, Sequence[str]]]:
    """The nodes that `value` is or holds, each with the paths that lead to it."""
    if isinstance(value, ConfigNode):
        yield value, names
        return
    for segment, part in parts(value):
        yield from _branches(part, [join(name, segment) for name in names])


def _products(annotation: Any) -> list[type]:
    if typing.get_origin(annotation) is not None:
        return [p for argument in typing.get_args(annotation) for p in _products(argument)]
    return [annotation] if isinstance(annotation, type) and annotation is not type(None) else []


@functools.cache
def _documented_classes(module_name: str) -> Mapping[str, Mapping[str, str]]:
    """Qualified class name -> field -> the string under it, from the source of a module."""
    module = sys.modules.get(module_name)
    try:
        source = inspect.getsource(module) if module is not None else ""
    except (OSError, TypeError):  # no source: built in, typed into a prompt, or made on the fly
        return {}
    found: dict[str, dict[str, str]] = {}
    _collect_docs(ast.parse(source).body, "", found)
    return found


def _collect_docs(body: Sequence[ast.stmt], scope: str, found: dict[str, dict[str, str]]) -> None:
    for statement in body:
        if isinstance(statement, ast.ClassDef):
            name = scope + statement.name
            found[name] = {
                target.target.id: _one_line(doc.value.value)
                for target, doc in zip(statement.body, statement.body[1:], strict=False)
                if isinstance(target, ast.AnnAssign)
                and isinstance(target.target, ast.Name)
                and isinstance(doc, ast.Expr)
                and isinstance(doc.value, ast.Constant)
                and isinstance(doc.value.value, str)
            }
            _collect_docs(statement.body, f"{name}.", found)
        elif isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            _collect_docs(statement.body, f"{scope}{statement.name}.<locals>.", found)


def _one_line(text: str) -> str:
    return " ".join(text.split())
