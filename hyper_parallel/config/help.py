"""`--help` of a composed tree: the settings of the classes that really are in its slots, rendered by tyro.

tyro describes dataclasses, and would make every slot a choice between subcommands. So each node is mirrored by a
dataclass of texts, which leaves tyro the page and us the words: one-line doc, kind of value, default, other names.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections import abc
from collections.abc import Iterable
from typing import Annotated, Any, Literal, Union

import tyro
import yaml

from hyper_parallel.config.configurable import ConfigNode, Configurable
from hyper_parallel.config.schema import Setting, settings
from hyper_parallel.config.target import UNSET

_METAVARS = {bool: "{true,false}", int: "INT", float: "FLOAT", str: "TEXT", types.NoneType: "None"}


def print_help(tree: ConfigNode, doors: Iterable[tuple[str, str, str]], prog: str, description: str) -> None:
    """Prints the page of `tree`, with `doors` (flag, metavar, doc) above its settings."""
    groups: dict[str, list[Setting]] = {"": []}
    for setting in settings(tree):
        groups.setdefault(setting.path.rpartition(".")[0], []).append(setting)

    root = [_mirrored(name, metavar, doc, "") for name, metavar, doc in doors]
    root += [_mirrored_setting(setting) for setting in groups.pop("")]
    for path, members in groups.items():
        group = _mirror(map(_mirrored_setting, members), _summary(members[0].node))
        root.append((f"group_{len(root)}", Annotated[group, tyro.conf.arg(name=path)], dataclasses.field()))
    mirror = _mirror(root, description)
    # tyro leaves through SystemExit(0) once it has printed, as argparse does.
    try:
        tyro.cli(mirror, args=["--help"], prog=prog, description=description, use_underscores=True)
    except SystemExit:
        return


def metavar(annotation: Any) -> str:
    """What stands for a value: ``INT``, ``FLOAT|None``, ``{none,full}``, ``[TEXT ...]``."""
    origin, arguments = typing.get_origin(annotation) or annotation, typing.get_args(annotation)
    if origin in (Union, types.UnionType):
        return "|".join(map(metavar, arguments))
    if origin is Literal:
        return "{" + ",".join(map(str, arguments)) + "}"
    if origin is tuple and arguments and arguments[-1] is not Ellipsis:
        return " ".join(map(metavar, arguments))
    if origin in (list, tuple, abc.Sequence, abc.Iterable, abc.Collection):
        return f"[{metavar(arguments[0]) if arguments else 'VALUE'} ...]"
    if origin in (dict, abc.Mapping):
        return "{NAME: VALUE}"
    if origin in _METAVARS:
        return _METAVARS[origin]
    return origin.__name__.upper() if isinstance(origin, type) else "VALUE"


def written(value: Any) -> str:
    """A value as one would write it on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return " ".join(map(written, value)) or "[]"
    if isinstance(value, dict):
        return yaml.safe_dump(value, default_flow_style=True, width=1000).strip()
    return str(value) if value != "" else "''"


def _mirrored_setting(setting: Setting) -> tuple[str, Any, Any]:
    siblings = [name for name in setting.names[1:] if "." not in name or _parent(name) == _parent(setting.path)]
    doc = setting.doc
    if siblings:
        doc = f"{doc} Also --{', --'.join(siblings)}.".strip()
    if setting.required:
        hint = "(required)"
    else:
        hint = "" if setting.value is UNSET else f"(default: {written(setting.value)})"
    return _mirrored(setting.path.rpartition(".")[2], metavar(setting.annotation), doc, hint)


def _mirrored(name: str, value: str, doc: str, hint: str) -> tuple[str, Any, Any]:
    argument = tyro.conf.arg(name=name, metavar=value, help=doc, help_behavior_hint=hint)
    return name, Annotated[str, argument], dataclasses.field(default="")


def _mirror(fields: Iterable[tuple[str, Any, Any]], doc: str) -> type:
    """A dataclass of `fields` under numbered names, since a path's segment need not be a Python name."""
    numbered = [(f"field_{i}", annotation, default) for i, (_, annotation, default) in enumerate(fields)]
    return dataclasses.make_dataclass("Mirror", numbered, namespace={"__doc__": doc}, kw_only=True)


def _summary(node: ConfigNode) -> str:
    """The first paragraph about what a node configures."""
    kind = type(node)
    described = kind.owner if isinstance(node, Configurable.Config) and hasattr(kind, "owner") else kind
    doc = described.__doc__ or ""
    if doc.startswith(f"{described.__name__}("):  # what dataclass writes where nobody wrote anything
        return ""
    return " ".join(doc.strip().split("\n\n")[0].split())


def _parent(path: str) -> str:
    return path.rpartition(".")[0]
