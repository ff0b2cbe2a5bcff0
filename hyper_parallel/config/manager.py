"""From a command line to the sealed tree: one front door, then flags, then every rule, then the saved copy.

Nothing is built here, and nothing is written before the whole tree is valid.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import yaml

from hyper_parallel.config import overrides
from hyper_parallel.config.configurable import ConfigNode, join, plain, target_path
from hyper_parallel.config.errors import ConfigError, Fault, raise_faults
from hyper_parallel.config.imports import import_family, import_object
from hyper_parallel.config.overrides import Override
from hyper_parallel.config.schema import field_slot, field_types
from hyper_parallel.config.target import UNSET, Target
from hyper_parallel.config.values import coerce, is_optional, shown

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_YAML_KEYS = {"model_spec": "model"}


RootT = TypeVar("RootT", bound=ConfigNode)


@dataclass(frozen=True, slots=True)
class Door:
    """One way to compose the tree; `open(root class, what follows the flag)` does it."""

    flag: str
    metavar: str
    doc: str
    example: str
    open: Callable[[type[Any], str], Any]


def load(root: type[RootT], argv: Sequence[str], *, world_size: int, prog: str = "hyper_parallel.train") -> RootT:
    """The sealed tree that a command line asks for.

    Args:
        root: class of the tree, with the fields `model_spec`, `hf_assets_path` and `dump_folder`, and the method
            `cross_faults(world_size)`, which yields the faults that no node can see alone.
        argv: the command line without the program.
        world_size: number of ranks that were started.
        prog: the module that was started, for the text of `--help` and of remedies.

    Raises:
        ConfigError: with every fault that was found.
        SystemExit: with code 0, once `--help` is printed.
    """
    flags, positional = overrides.parse(argv)
    wants_help = any(flag.name in ("help", "-h") for flag in flags)
    keys, settable = _split_doors([flag for flag in flags if flag.name not in ("help", "-h")])
    if wants_help and not keys:
        _print_help(root(), prog)
    _refuse_positional(positional, settable)
    tree = _open_door(root, keys, prog)
    if wants_help:
        _print_help(tree, prog)
    written = overrides.apply(tree, settable)
    return finish(tree, world_size, written)


def finish(tree: RootT, world_size: int, written: Mapping[str, str] | None = None) -> RootT:
    """`tree`, checked and sealed: nothing can be changed in it any more. Sections are shared, so give a copy.

    Args:
        written: canonical path -> the name that the user wrote, for the faults.

    Raises:
        ConfigError: with every fault that was found.
    """
    written = written or {}
    raise_faults(
        dataclasses.replace(fault, path=written.get(fault.path, fault.path)) for fault in check(tree, world_size)
    )
    tree.seal()
    return tree


def check(tree: ConfigNode, world_size: int) -> list[Fault]:
    """Every fault of a composed tree: types, what Targets miss, each node's own rules, the rules across sections.

    Values take the exact type of their annotations on the way (a list becomes the tuple that the field declares), so
    that the saved copy reads back to an equal tree. Rules are asked only where all types are right.
    """
    faults = [*_type_faults(tree), *_slot_faults(tree)]
    if faults:
        return faults
    for path, node in tree.traverse():
        faults.extend(dataclasses.replace(fault, path=join(path, fault.path)) for fault in node.faults())
    faults.extend(tree.cross_faults(world_size))  # type: ignore[attr-defined]
    return faults


def save(tree: ConfigNode) -> None:
    """Writes the tree to ``<dump_folder>/config.yaml`` and ``config.json``, on rank 0 alone; each file at once or not.

    Raises:
        ConfigError: the folder cannot be made or written.
    """
    if int(os.environ.get("RANK", "0")) != 0:
        return
    folder = tree.dump_folder  # type: ignore[attr-defined]
    saved = document(tree)
    try:
        os.makedirs(folder, exist_ok=True)
        _write(os.path.join(folder, "config.yaml"), yaml.safe_dump(saved, sort_keys=False, allow_unicode=True))
        _write(os.path.join(folder, "config.json"), json.dumps(saved, indent=2) + "\n")
    except OSError as error:
        raise ConfigError.one(
            "dump_folder", f"{folder!r} cannot be written: {error.strerror}", "give a folder that you may write to"
        ) from error


def document(tree: ConfigNode) -> dict[str, Any]:
    """The tree as YAML holds it: every group names its `_target_`, and the model stands under ``model``."""
    groups: dict[str, Any] = {}
    for f in dataclasses.fields(tree):
        value = getattr(tree, f.name)
        if value is None and f.name in _YAML_KEYS:
            continue
        group = plain(value)
        if isinstance(value, ConfigNode) and "_target_" not in group:
            group = {"_target_": target_path(type(value)), **group}
        groups[_YAML_KEYS.get(f.name, f.name)] = group
    return groups


def report(error: ConfigError) -> None:
    """Prints one line per fault on stderr."""
    for fault in error.faults:
        print(" ".join(str(fault).split()), file=sys.stderr)


def speaks() -> bool:
    """Whether this process is the one of its node that says what all of them know."""
    return int(os.environ.get("LOCAL_RANK", "0")) == 0


def _open_model(root: type[Any], name: str) -> Any:
    """``FAMILY[:FLAVOR or :FOLDER]``, with everything else at its default."""
    family, colon, flavor = name.partition(":")
    module = import_family(family, "model_spec")
    if colon and not flavor:
        raise ConfigError.one("model_spec", f"{name!r} ends without a flavor", f"write {family}, or {family}:FLAVOR")
    tree = root()
    tree.model_spec = module.create_model_spec(flavor) if flavor else module.create_model_spec()
    if flavor not in module.FLAVORS and any(os.path.exists(os.path.join(flavor, file)) for file in _TOKENIZER_FILES):
        tree.hf_assets_path = flavor
    return tree


def _open_recipe(root: type[Any], dotted: str) -> Any:
    """The tree that an importable function returns."""
    recipe = import_object(dotted, "recipe")
    if not callable(recipe):
        raise ConfigError.one("recipe", f"{dotted} is no function", f"name a function that returns {root.__name__}")
    try:
        tree = recipe()
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # a recipe is the user's code
        at = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError.one(
            "recipe", f"{dotted} raised {type(error).__name__}: {error}", f"see {at.filename}:{at.lineno}"
        ) from error
    if not isinstance(tree, root):
        raise ConfigError.one(
            "recipe", f"{dotted} returned {type(tree).__qualname__}", f"return a {root.__name__} from it"
        )
    return tree


DOORS = (
    Door(
        "model_spec",
        "FAMILY[:FLAVOR|:FOLDER]",
        "Train a model of this family, everything else at its default. A folder holds a Hugging Face config.json.",
        "--model_spec qwen3_moe:debug",
        _open_model,
    ),
    Door(
        "recipe",
        "PACKAGE.MODULE.FUNCTION",
        "Train what this Python function returns.",
        "--recipe recipes.qwen3_moe.debug",
        _open_recipe,
    ),
)
"""Every front door. Exactly one is used."""


def _split_doors(flags: Sequence[Override]) -> tuple[list[tuple[Door, Override]], list[Override]]:
    doors = {door.flag: door for door in DOORS}
    keys = [(doors[name], flag) for flag in flags if (name := flag.name.replace("-", "_")) in doors]
    taken = [flag for _, flag in keys]
    return keys, [flag for flag in flags if flag not in taken]


def _open_door(root: type[RootT], keys: Sequence[tuple[Door, Override]], prog: str) -> RootT:
    if len(keys) != 1:
        examples = " or ".join(f"python -m {prog} {door.example}" for door in DOORS)
        given = " and ".join(f"--{flag.name}" for _, flag in keys)
        fact = f"{given} are given" if keys else "nothing says what to train"
        raise ConfigError.one("command line", fact, f"give exactly one of {examples}")
    door, flag = keys[0]
    if not flag.words:
        raise ConfigError.one(flag.name, f"expected {door.metavar}, got nothing", f"write {door.example}")
    raise_faults(overrides.stray(flag.words[1:], after=flag.name))
    # A copy: flags change the tree, and what a door returns may belong to a module (a flavor, a recipe's constant).
    tree: RootT = copy.deepcopy(door.open(root, flag.words[0]))
    return tree


def _refuse_positional(words: Sequence[str], flags: Sequence[Override]) -> None:
    yaml_files = [word for word in words if word.endswith((".yaml", ".yml"))]
    for flag in flags:
        if flag.name.replace("-", "_") == "config_file":
            yaml_files.extend(flag.words or ("--config-file",))
    if yaml_files:
        examples = " or ".join(door.example for door in DOORS)
        raise ConfigError.one(yaml_files[0], "training from a YAML file is not supported yet", f"give {examples}")
    raise_faults(overrides.stray(words))


def _print_help(tree: ConfigNode, prog: str) -> NoReturn:
    if speaks():
        from hyper_parallel.config.help import print_help

        doors = [(door.flag, door.metavar, door.doc) for door in DOORS]
        examples = "\n".join(f"  python -m {prog} {door.example}" for door in DOORS)
        print_help(
            tree,
            doors,
            prog=f"python -m {prog}",
            description=f"Trains a language model. Give exactly one of --{' and --'.join(d[0] for d in doors)}; "
            f"any setting below may follow.\n\n{examples}",
        )
    raise SystemExit(0)


def _type_faults(tree: ConfigNode) -> Iterator[Fault]:
    """Faults of values that a recipe set to another type than declared; right ones take their exact type."""
    for path, node in list(tree.traverse()):
        for f in dataclasses.fields(node):
            value = getattr(node, f.name)
            if value is UNSET:
                continue
            where = join(path, f.name)
            annotation = field_types(type(node))[f.name]
            if field_slot(f) and not hasattr(value, "build") and not (value is None and is_optional(annotation)):
                yield Fault(where, f"expected a Config to build, got {shown(value)}", "give a Config or a Target")
                continue
            try:
                exact = coerce(value, annotation, where)
            except ConfigError as error:
                yield from error.faults
            else:
                if exact is not value:
                    setattr(node, f.name, exact)


def _slot_faults(tree: ConfigNode) -> Iterator[Fault]:
    """Faults of Targets that need an argument which is neither configured nor among what the slot's trainer passes."""
    for path, node in tree.traverse():
        for f in dataclasses.fields(node):
            slot, target = field_slot(f), getattr(node, f.name)
            if slot is None or not isinstance(target, Target):
                continue
            for name in target.missing(slot.runtime):
                where = join(join(path, f.name), name)
                yield Fault(where, f"{target.target_path} needs it", f"write --{where} VALUE")


def _write(path: str, text: str) -> None:
    """Replaces a file at once, so that no reader and no crash sees half of it."""
    unfinished = f"{path}.{os.getpid()}.tmp"
    with open(unfinished, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(unfinished, path)
