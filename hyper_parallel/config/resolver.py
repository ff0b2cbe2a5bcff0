"""From what a YAML file says to the typed tree, and back.

Resolving yields Configs, building yields objects: a `_target_` that is a Config class, or a function annotated to
return one (a ModelSpec is one), is called here, for it only makes data. Any other callable becomes a `Target`, which
the trainer calls. Nothing else is called.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any, Generic, TypeVar

import yaml

from hyper_parallel.config.annotations import (
    holds_nodes,
    holds_targets,
    is_named,
    is_node,
    is_target,
    members,
    resolved,
)
from hyper_parallel.config.configurable import ConfigNode, Configurable, join, parts, plain, target_path
from hyper_parallel.config.errors import ConfigError, Fault, did_you_mean, raise_faults
from hyper_parallel.config.imports import import_object
from hyper_parallel.config.schema import default_config, field_aliases, field_slot, field_types, settings
from hyper_parallel.config.target import Target, read_signature
from hyper_parallel.config.values import coerce, describe, is_optional, shown

logger = logging.getLogger(__name__)

RootT = TypeVar("RootT", bound=ConfigNode)

TARGET = "_target_"
"""The key that names what a group is made by."""
ROOT = "hyper_parallel.trainer.config.TrainerConfig"
"""The class of the tree, by its path, since it stands on a floor above this one."""
_MOVED_PACKAGES = {"hyper_models.": "hyper_parallel."}
YAML_NAMES = {"model_spec": "model"}
"""Fields of the root that go by another name in a file."""
_SCALARS = (bool, int, float, str, bytes, type(None))


@dataclass(frozen=True, slots=True)
class Resolved(Generic[RootT]):
    """A tree, and how its values were spelled."""

    tree: RootT
    written: dict[str, str]
    """Canonical path -> the path that the user wrote, where the two differ."""


def resolve_root(raw: Mapping[str, Any], root: type[RootT] | None = None) -> RootT:
    """The tree that `raw` describes: each given group names its `_target_`, groups left out take their defaults.

    Args:
        raw: the content of a YAML file.
        root: class of the tree; TrainerConfig unless given.

    Raises:
        ConfigError: with every fault that was found, paths as they are spelled in `raw`. Unknown groups and groups
            without a `_target_` are told before any target is imported.
    """
    resolved = resolve(raw, root or import_object(ROOT, "root"))
    faults = missing_arguments(resolved.tree)
    raise_faults(dataclasses.replace(fault, path=spelled(fault.path, resolved.written)) for fault in faults)
    return resolved.tree


def resolve(raw: Mapping[str, Any], root: type[RootT]) -> Resolved[RootT]:
    """As `resolve_root`, but arguments that a Target misses may still come, from the command line."""
    if not isinstance(raw, Mapping):
        raise ConfigError.one("$", f"expected groups, got {shown(raw)}", "write groups, as in `model:` and `training:`")
    groups = list(_groups(raw, root))
    raise_faults([*_repeated(groups), *(fault for group in groups for fault in _shape_faults(root, *group))])
    context = _Resolution()
    values: dict[str, Any] = {}
    faults: list[Fault] = []
    for name, f, value in groups:
        assert f is not None, "unknown names are refused above"
        if name != f.name:
            context.written[f.name] = name
        try:
            values[f.name] = context.value(value, field_types(root)[f.name], name, f.name)
        except ConfigError as error:
            faults.extend(error.faults)
    raise_faults(faults)
    if context.moved:
        names = ", ".join(dict.fromkeys(context.moved))
        logger.warning("deprecated: %s: the package is hyper_parallel now, write its name in the file", names)
    return Resolved(root(**values), context.written)


def missing_arguments(tree: ConfigNode) -> Iterator[Fault]:
    """Faults of what is in a slot and needs an argument that is neither configured nor what the trainer passes."""
    for path, node in tree.traverse():
        for f in dataclasses.fields(node):
            slot, value = field_slot(f), getattr(node, f.name)
            if slot is None:
                continue
            place = join(path, f.name)
            items = [(join(place, i), each) for i, each in parts(value)] if isinstance(value, (list, tuple)) else []
            for where, item in items or [(place, value)]:
                if isinstance(item, Target):
                    for name in item.missing(slot.runtime):
                        own = join(where, name)
                        yield Fault(own, f"{item.target_path} needs it", f"write --{own} VALUE")
                elif isinstance(item, Configurable.Config):
                    yield from _unsupplied(item, slot.runtime, where)


def _unsupplied(config: Configurable.Config, runtime: Sequence[str], path: str) -> Iterator[Fault]:
    owner = type(config).owner
    _, *parameters = inspect.signature(owner).parameters.values()  # the first one is the Config
    for parameter in parameters:
        is_required = parameter.default is parameter.empty and parameter.kind is parameter.KEYWORD_ONLY
        if is_required and parameter.name not in runtime:
            fact = (
                f"{owner.__qualname__} needs {parameter.name}, but the run supplies {', '.join(runtime) or 'nothing'}"
            )
            yield Fault(path, fact, "name another class, or give that argument a default")


def document(tree: ConfigNode) -> dict[str, Any]:
    """The tree as YAML holds it: every group names its `_target_`, and the model stands under ``model``."""
    groups: dict[str, Any] = {}
    for f in dataclasses.fields(tree):
        value = getattr(tree, f.name)
        if value is None and f.name in YAML_NAMES:
            continue
        group = plain(value)
        if isinstance(value, ConfigNode) and TARGET not in group:
            group = {TARGET: target_path(type(value)), **group}
        groups[YAML_NAMES.get(f.name, f.name)] = group
    return groups


def to_yaml(tree: ConfigNode) -> str:
    """The tree as text that `resolve_root` makes an equal tree of.

    Raises:
        ConfigError: with every value that is an object of a program, which no text can hold.
    """
    content = document(tree)
    try:
        return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    except yaml.representer.RepresenterError as error:
        raise ConfigError(
            Fault(path, f"{shown(value)} cannot be saved", "give text, numbers or lists of them")
            for path, value in _leaves(content)
            if not isinstance(value, (*_SCALARS, date, set))
        ) from error


def spelled(path: str, written: Mapping[str, str]) -> str:
    """`path` with its longest part that the user spelled otherwise as the user spelled it."""
    known, rest = path, ""
    while known:
        if known in written:
            return written[known] + rest
        known, dot, last = known.rpartition(".")
        rest = f"{dot}{last}{rest}" if dot else path
    return path


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, (dict, list)):
        for segment, part in parts(value):
            yield from _leaves(part, join(path, segment))
    else:
        yield path, value


def _groups(raw: Mapping[str, Any], root: type[ConfigNode]) -> Iterator[tuple[str, dataclasses.Field[Any] | None, Any]]:
    """(name as written, the root's field, value) of each group; the field is None where the root has none."""
    fields = fields_by_name(root)
    for name, value in raw.items():
        yield str(name), fields.get(str(name)), value


def _repeated(groups: Iterable[tuple[str, dataclasses.Field[Any] | None, Any]]) -> Iterator[Fault]:
    first: dict[str, str] = {}
    for name, f, _ in groups:
        if f is not None and (earlier := first.setdefault(f.name, name)) != name:
            yield Fault(name, f"{earlier} is the same group and is given too", "keep one of them")


def fields_by_name(cls: type) -> dict[str, dataclasses.Field[Any]]:
    """The fields of `cls` that a user may set, by each of their names."""
    fields = [f for f in dataclasses.fields(cls) if not f.metadata.get("hidden")]
    return {name: f for f in fields for name in (f.name, *field_aliases(f)) if "." not in name}


def _shape_faults(root: type[ConfigNode], name: str, f: dataclasses.Field[Any] | None, value: Any) -> Iterator[Fault]:
    """What can be seen of a group without importing anything."""
    if f is None:
        names = sorted({YAML_NAMES.get(each.name, each.name) for each in fields_by_name(root).values()})
        yield Fault(name, f"{root.__name__} has no such field", _remedy_for_group(name, names, root))
        return
    annotation = field_types(root)[f.name]
    if is_target(annotation) or is_node(annotation):
        yield from _target_faults(value, f, annotation, name)
    elif holds_targets(annotation) and isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _target_faults(item, f, annotation, join(name, str(i)))


def _target_faults(value: Any, f: dataclasses.Field[Any], annotation: Any, path: str) -> Iterator[Fault]:
    example = _example(f, annotation)
    remedy = f"write `{TARGET}: {example}` in it" if example else f"name a class or function as its `{TARGET}`"
    if value is None and is_optional(annotation):
        return
    if value is None:
        yield Fault(path, "is given without content", f"{remedy}, or leave it out")
    elif not isinstance(value, Mapping):
        yield Fault(path, f"expected a group with a {TARGET}, got {shown(value)}", remedy)
    elif TARGET not in value:
        yield Fault(path, f"names no {TARGET}", remedy)


def _remedy_for_group(name: str, names: Sequence[str], root: type[ConfigNode]) -> str:
    """Where what `name` holds elsewhere stands here, else the nearest group."""
    for setting in settings(root()):
        if any(alias.startswith(f"{name}.") for alias in setting.names[1:]):
            return f"write its values in {setting.path.partition('.')[0]}"
    return did_you_mean(name, names)


def _example(f: dataclasses.Field[Any], annotation: Any) -> str:
    """A `_target_` for a field: its own class, or that of its default."""
    if f.name in YAML_NAMES:
        return "hyper_parallel.models.FAMILY.create_model_spec"
    default = default_config(f)
    if isinstance(default, Target):
        return default.target_path
    if isinstance(default, ConfigNode):
        return target_path(type(default))
    return target_path(annotation) if is_node(annotation) else ""


class _Resolution:
    """Resolves the values of one file."""

    def __init__(self) -> None:
        self.written: dict[str, str] = {}
        self.moved: list[str] = []

    def value(self, value: Any, annotation: Any, path: str, canonical: str) -> Any:
        """`value` as `annotation` wants it. `path` is its path as it is written.

        Raises:
            ConfigError: with every fault in it.
        """
        is_plain = (value is None and is_optional(annotation)) or is_named(value, annotation)
        if (is_target(annotation) and not is_plain) or (is_node(annotation) and _has_target(value)):
            return self._node(value, annotation, path, canonical)
        if holds_nodes(annotation) and isinstance(value, (list, tuple)):
            return coerce(self._sections(value, annotation, path, canonical), annotation, path)
        if holds_targets(annotation):
            if not isinstance(value, (list, tuple)):
                fact = f"expected a list of groups with a {TARGET}, got {shown(value)}"
                raise ConfigError.one(path, fact, f"write each as `- {TARGET}: ...`, or leave it out")
            return coerce(self._nodes(value, annotation, path, canonical), annotation, path)
        raise_faults(
            Fault(join(where, TARGET), "a component inside this one cannot be chosen", "remove it, and configure "
                  f"{path.rpartition('.')[0] or path} by its own arguments")
            for where in _targets_inside(value, path)
        )  # fmt: skip
        return coerce(value, annotation, path)

    def _sections(self, values: Sequence[Any], annotation: Any, path: str, canonical: str) -> list[Any]:
        """Groups of plain data, whose own fields may hold targets."""
        cls = next(members(annotation))
        nodes: list[Any] = []
        faults: list[Fault] = []
        for i, value in enumerate(values):
            where = join(path, str(i))
            if not isinstance(value, Mapping):
                faults.append(Fault(where, f"expected a group, got {shown(value)}", f"give a {cls.__qualname__}"))
                continue
            try:
                nodes.append(self._config(cls, {str(k): v for k, v in value.items()}, where, join(canonical, str(i))))
            except ConfigError as error:
                faults.extend(error.faults)
        raise_faults(faults)
        return nodes

    def _nodes(self, values: Sequence[Any], annotation: Any, path: str, canonical: str) -> list[Any]:
        item = next(members(annotation))
        nodes: list[Any] = []
        faults: list[Fault] = []
        for i, value in enumerate(values):
            try:
                nodes.append(self._node(value, item, join(path, str(i)), join(canonical, str(i))))
            except ConfigError as error:
                faults.extend(error.faults)
        raise_faults(faults)
        return nodes

    def _node(self, value: Any, annotation: Any, path: str, canonical: str) -> Any:
        if not isinstance(value, Mapping):
            raise ConfigError.one(path, f"expected a group with a {TARGET}, got {shown(value)}", f"give it a {TARGET}")
        if TARGET not in value:
            raise ConfigError.one(path, f"names no {TARGET}", f"name a class or function as its `{TARGET}`")
        where = join(path, TARGET)
        target = self._import(value[TARGET], where)
        arguments = {str(name): item for name, item in value.items() if name != TARGET}
        makes = _what_it_makes(target)
        raise_faults(_product_faults(target, makes, annotation, where))
        if isinstance(target, type) and issubclass(target, ConfigNode):
            return self._config(target, arguments, path, canonical)
        signature = _rooted(lambda: read_signature(target), where)
        configured = self._arguments(target, signature, arguments, path, canonical)
        if not is_node(makes):
            built = Target.of(target, **configured)
            return self._wrapped(next(members(annotation)), built, path, canonical)
        required = [n for n, p in signature.parameters.items() if p.default is p.empty and n not in configured]
        raise_faults(Fault(join(path, n), f"{target_path(target)} needs it", "give it a value") for n in required)
        made = _called(target, configured, path)
        if not isinstance(made, makes):
            fact = (
                f"{target_path(target)} returned {shown(made)}, not the {makes.__qualname__} that it is annotated with"
            )
            raise ConfigError.one(where, fact, "mend the function")
        self._take_names(made, path, canonical)
        return made

    def _wrapped(self, wanted: Any, target: Target, path: str, canonical: str) -> Any:
        """`target`, or a node of the class `wanted` around it where that is what the field holds."""
        if not is_node(wanted):
            return target
        node = wanted.of_target(target)
        self._take_names(node, path, canonical)
        return node

    def _take_names(self, node: Any, path: str, canonical: str) -> None:
        """The group's names are those of the nodes that are inline."""
        inline = [f.name for f in dataclasses.fields(node) if f.metadata.get("inline")]
        self.written.update((join(canonical, name), path) for name in inline)

    def _import(self, dotted: Any, path: str) -> Any:
        if not isinstance(dotted, str):
            raise ConfigError.one(path, f"expected a dotted path, got {shown(dotted)}", "write package.module.name")
        for old, new in _MOVED_PACKAGES.items():
            if dotted.startswith(old):
                self.moved.append(f"{path} {dotted}")
                dotted = new + dotted.removeprefix(old)
        target = import_object(dotted, path)
        if not callable(target):
            raise ConfigError.one(path, f"{dotted} is {shown(target)}, not callable", "name a class or a function")
        if isinstance(target, type) and issubclass(target, Configurable):
            raise ConfigError.one(path, f"{dotted} is built from its Config", f"write {dotted}.Config")
        return target

    def _config(self, cls: type[ConfigNode], arguments: dict[str, Any], path: str, canonical: str) -> ConfigNode:
        fields, types_ = fields_by_name(cls), field_types(cls)
        given: dict[str, str] = {}
        faults: list[Fault] = []
        values: dict[str, Any] = {}
        for name, value in arguments.items():
            where, f = join(path, name), fields.get(name)
            if f is None:
                names = sorted({each.name for each in fields.values()})
                faults.append(Fault(where, f"{cls.__qualname__} has no field {name!r}", did_you_mean(name, names)))
                continue
            if f.name in given:
                fact = f"{join(path, given[f.name])} is the same setting and is given too"
                faults.append(Fault(where, fact, "keep one of them"))
                continue
            given[f.name] = name
            own = join(canonical, f.name)
            if where != own:
                self.written[own] = where
            try:
                values[f.name] = self.value(value, types_[f.name], where, own)
            except ConfigError as error:
                faults.extend(error.faults)
        for f in dataclasses.fields(cls):
            required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
            if required and f.name not in given:
                faults.append(Fault(join(path, f.name), f"{cls.__qualname__} needs it", "give it a value"))
        raise_faults(faults)
        return _called(cls, values, path)

    def _arguments(
        self, target: Callable[..., Any], signature: Any, arguments: dict[str, Any], path: str, canonical: str
    ) -> dict[str, Any]:
        faults: list[Fault] = []
        configured: dict[str, Any] = {}
        for name, value in arguments.items():
            where = join(path, name)
            if name in signature.parameters:
                annotation = signature.parameters[name].annotation
            elif signature.takes_any:
                annotation = Any
            else:
                fact = f"{target_path(target)} has no argument {name!r}"
                faults.append(Fault(where, fact, did_you_mean(name, signature.parameters)))
                continue
            try:
                configured[name] = self.value(value, annotation, where, join(canonical, name))
            except ConfigError as error:
                faults.extend(error.faults)
        raise_faults(faults)
        return configured


def _what_it_makes(target: Any) -> Any:
    """The class of what calling `target` gives, or its annotation; None where nothing says so.

    For a Config class that is the class itself, since what it builds is another matter.
    """
    if isinstance(target, type):
        return target
    function = inspect.unwrap(target)
    annotations = getattr(function, "__annotations__", {})
    makes = resolved(annotations.get("return", Any), getattr(function, "__globals__", {}))
    return None if makes is Any else makes


def _product_faults(target: Any, makes: Any, annotation: Any, path: str) -> Iterator[Fault]:
    """A fault where `target` cannot give what a field of `annotation` holds."""
    name = getattr(target, "__qualname__", repr(target))
    wanted = next(members(annotation))
    if is_node(wanted):
        if makes is None and not isinstance(target, type):
            fact = f"nothing says what {name} returns"
            yield Fault(path, fact, f"annotate it with -> {wanted.__qualname__}")
        elif hasattr(wanted, "of_target") and not is_node(makes):
            if makes in _SCALARS:
                yield Fault(path, f"{name} makes {_article(makes)}, not {_article(wanted)}", _remedy_for(wanted))
        elif not (isinstance(makes, type) and issubclass(makes, wanted)):
            verb = "is" if isinstance(target, type) and issubclass(target, ConfigNode) else "makes"
            yield Fault(path, f"{name} {verb} {_article(makes)}, not {_article(wanted)}", _remedy_for(wanted))
        return
    products = typing.get_args(wanted)
    owner = getattr(makes, "owner", None)
    if is_node(makes) and (not hasattr(makes, "build") or makes in (Configurable.Config, Target)):
        yield Fault(path, f"{name} is plain data, which builds nothing", f"name what makes {_article(products[0])}")
    elif inspect.isabstract(owner):
        yield Fault(path, f"{name} makes {_article(owner)}, which is abstract", "name a class that derives from it")
    elif isinstance(owner, type) and isinstance(products[0], type) and not issubclass(owner, products[0]):
        fact = f"{name} makes {_article(owner)}, not {_article(products[0])}"
        yield Fault(path, fact, f"name what makes {_article(products[0])}")
    elif makes in _SCALARS:
        fact = f"{name} makes {_article(makes)}, not {_article(products[0])}"
        yield Fault(path, fact, f"name what makes {_article(products[0])}")


def _remedy_for(wanted: type) -> str:
    return f"name {target_path(wanted)}, or a function annotated to return one"


def _article(kind: Any) -> str:
    if kind in (None, type(None)):
        return "nothing"
    name = kind.__qualname__ if isinstance(kind, type) else describe(kind)
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def _called(target: Callable[..., Any], arguments: Mapping[str, Any], path: str) -> Any:
    """What a Config class or a function that makes one returns; its own faults stand below `path`."""
    try:
        return target(**arguments)
    except ConfigError as error:
        raise ConfigError(_below(fault, path) for fault in error.faults) from error
    except (Exception, SystemExit) as error:  # a function of the user's may fail in any way
        raise ConfigError.raised(path, target_path(target), error) from error


def _below(fault: Fault, path: str) -> Fault:
    """The fault of a model's factory, which speaks of ``model_spec``, under the name of the group."""
    for name in YAML_NAMES:
        if fault.path == name or fault.path.startswith(f"{name}."):
            return dataclasses.replace(fault, path=path + fault.path.removeprefix(name))
    return fault


def _rooted(read: Callable[[], Any], path: str) -> Any:
    """The result of `read`, whose faults are about what stands at `path`."""
    try:
        return read()
    except ConfigError as error:
        raise ConfigError(Fault(path, f"{fault.path}: {fault.fact}", fault.remedy) for fault in error.faults) from error


def _targets_inside(value: Any, path: str) -> Iterator[str]:
    """The paths of the mappings below `path` that name a `_target_`."""
    if isinstance(value, Mapping):
        if TARGET in value:
            yield path
        for name, item in value.items():
            yield from _targets_inside(item, join(path, str(name)))
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _targets_inside(item, join(path, str(i)))


def _has_target(value: Any) -> bool:
    return isinstance(value, Mapping) and TARGET in value
