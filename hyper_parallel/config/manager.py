"""From a command line to the sealed tree: one front door, then flags, then every rule, then the saved copy.

Nothing is built here, and nothing is written before the whole tree is valid.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

from hyper_parallel.config import overrides, resolver, yaml_file
from hyper_parallel.config.annotations import is_named
from hyper_parallel.config.configurable import ConfigNode, join
from hyper_parallel.config.errors import ConfigError, Fault, raise_faults
from hyper_parallel.config.imports import import_family, import_object
from hyper_parallel.config.overrides import Override
from hyper_parallel.config.plain_sections import fill_targets
from hyper_parallel.config.schema import field_slot, field_types
from hyper_parallel.config.target import Target
from hyper_parallel.config.values import coerce, is_optional, shown
from hyper_parallel.config.yaml_file import YamlFile

_LEGACY = "hyper_parallel.trainer.legacy"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
LAST_WORD_SECONDS = 10
"""How long a rank that ends without a word leaves the one that speaks for it to do so."""

RootT = TypeVar("RootT", bound=ConfigNode)


@dataclass(frozen=True, slots=True)
class Opened:
    """What a door gives: a tree of its own, on which flags may still be set."""

    tree: Any
    flags: Sequence[Override]
    """The flags that the door has not taken for itself."""
    written: Mapping[str, str] = field(default_factory=dict)
    """Canonical path -> the path that the user wrote, where the two differ."""
    file: YamlFile | None = None
    """The file that the tree was read from."""
    flagged: Collection[str] = ()
    """Paths that the door's own flags have set, which no line of the file is about."""

    def faults(self, faults: Iterable[Fault], flags: Mapping[str, str]) -> list[Fault]:
        """`faults` of the tree in the user's words, each with its line where the value is from the file.

        `flags`: canonical path -> the flag, of what the command line has set.
        """
        told: list[Fault] = []
        for fault in faults:
            if fault.path in flags:
                told.append(dataclasses.replace(fault, path=flags[fault.path]))
                continue
            fault = dataclasses.replace(fault, path=resolver.spelled(fault.path, self.written))
            told.extend(self.file.placed([fault]) if self.file and fault.path not in self.flagged else [fault])
        return told


@dataclass(frozen=True, slots=True)
class Door:
    """One way to compose the tree; `open(root class, what follows the flag, the other flags)` does it."""

    flag: str
    metavar: str
    doc: str
    example: str
    open: Callable[[type[Any], str, Sequence[Override]], Opened]


def load(
    root: type[RootT], argv: Sequence[str], *, world_size: int | None, prog: str = "hyper_parallel.train"
) -> RootT:
    """The sealed tree that a command line asks for.

    Args:
        root: class of the tree, with the fields `model_spec`, `hf_assets_path` and `dump_folder`, and the method
            `cross_faults(world_size)`, which yields the faults that no node can see alone.
        argv: the command line without the program.
        world_size: number of ranks that were started. None: as few as the degrees of parallelism ask for.
        prog: the module that was started, for the text of `--help` and of remedies.

    Raises:
        ConfigError: with every fault that was found.
        SystemExit: with code 0, once `--help` is printed.
    """
    flags, positional = overrides.parse(argv)
    wants_help = any(flag.name in ("help", "-h") for flag in flags)
    keys, settable, stray = _split_doors([flag for flag in flags if flag.name not in ("help", "-h")], positional)
    if wants_help and not keys:
        _print_help(root(), prog)
    raise_faults(overrides.stray(stray))
    opened = _open_door(root, keys, settable, prog)
    if wants_help:
        _print_help(opened.tree, prog)
    written = overrides.apply(opened.tree, opened.flags)
    raise_faults(
        Fault(flag, f"{own} is the same setting and is given too", "keep one of them")
        for path, flag in written.items()
        if (own := resolver.spelled(path, opened.written)) in opened.flagged
    )
    raise_faults(opened.faults(check(opened.tree, world_size), written))
    opened.tree.seal()
    return opened.tree


def parse_training_args(argv: Sequence[str] | None = None) -> Any:
    """The sealed TrainerConfig that a script's command line asks for, through any front door.

    As a parser does, it prints its faults, one line each, and ends the process with exit code 2.

    Args:
        argv: the command line without the program; that of this process unless given.
    """
    words = sys.argv[1:] if argv is None else argv
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    prog = os.path.splitext(os.path.basename(sys.argv[0]))[0]
    try:
        return load(import_object(resolver.ROOT, "root"), words, world_size=world_size, prog=prog)
    except ConfigError as error:
        refuse(error)
        raise SystemExit(2) from error


def finish(tree: RootT, world_size: int) -> RootT:
    """`tree`, checked and sealed: nothing can be changed in it any more.

    Raises:
        ConfigError: with every fault that was found.
    """
    raise_faults(check(tree, world_size))
    tree.seal()
    return tree


def check(tree: ConfigNode, world_size: int | None) -> list[Fault]:
    """Every fault of a composed tree: types, what Targets miss, each node's own rules, the rules across sections.

    Values take the exact type of their annotations on the way (a list becomes the tuple that the field declares), so
    that the saved copy reads back to an equal tree. Rules are asked only where all types are right. `world_size` None:
    as few ranks as the degrees of parallelism ask for.
    """
    if faults := value_faults(tree):
        return faults
    for path, node in tree.traverse():
        faults.extend(dataclasses.replace(fault, path=join(path, fault.path)) for fault in node.faults())
    ranks = tree.parallelism.smallest_world_size() if world_size is None else world_size  # type: ignore[attr-defined]
    faults.extend(tree.cross_faults(ranks))  # type: ignore[attr-defined]
    return faults


def value_faults(tree: ConfigNode) -> list[Fault]:
    """Those of `check` that come before all rules: types, and what Targets miss. Values take their exact types."""
    return [*_type_faults(tree), *resolver.missing_arguments(tree)]


def save(tree: ConfigNode) -> None:
    """Writes the tree to ``<dump_folder>/config.yaml`` and ``config.json``, on rank 0 alone; each file at once or not.

    Raises:
        ConfigError: a value cannot be written as text, or the folder cannot be made or written.
    """
    if int(os.environ.get("RANK", "0")) != 0:
        return
    folder = tree.dump_folder  # type: ignore[attr-defined]
    text = resolver.to_yaml(tree)
    # A date, which YAML knows and JSON does not, is text there.
    data = json.dumps(resolver.document(tree), indent=2, default=str)
    try:
        os.makedirs(folder, exist_ok=True)
        _write(os.path.join(folder, "config.yaml"), text)
        _write(os.path.join(folder, "config.json"), data + "\n")
    except OSError as error:
        raise ConfigError.one(
            "dump_folder", f"{folder!r} cannot be written: {error.strerror}", "give a folder that you may write to"
        ) from error


def report(error: ConfigError) -> None:
    """Prints one line per fault on stderr."""
    for fault in error.faults:
        print(" ".join(str(fault).split()), file=sys.stderr)


def refuse(error: ConfigError) -> None:
    """Prints the faults, which every rank has found alike, on one rank of each node.

    The others give it time to do so: launchers end all ranks as soon as one has ended.
    """
    if speaks():
        report(error)
    else:
        time.sleep(LAST_WORD_SECONDS)


def speaks() -> bool:
    """Whether this process is the one of its node that says what all of them know."""
    return int(os.environ.get("LOCAL_RANK", "0")) == 0


def _open_model(root: type[Any], name: str, flags: Sequence[Override]) -> Opened:
    """``FAMILY[:FLAVOR or :FOLDER]``, with everything else at its default."""
    family, colon, flavor = name.partition(":")
    module = import_family(family, "model_spec")
    if colon and not flavor:
        raise ConfigError.one("model_spec", f"{name!r} ends without a flavor", f"write {family}, or {family}:FLAVOR")
    tree = root()
    tree.model_spec = module.create_model_spec(flavor) if flavor else module.create_model_spec()
    if flavor not in module.FLAVORS and any(os.path.exists(os.path.join(flavor, file)) for file in _TOKENIZER_FILES):
        tree.hf_assets_path = flavor
    return Opened(tree, flags)


def _open_recipe(root: type[Any], dotted: str, flags: Sequence[Override]) -> Opened:
    """The tree that an importable function returns."""
    recipe = import_object(dotted, "recipe")
    if not callable(recipe):
        raise ConfigError.one("recipe", f"{dotted} is no function", f"name a function that returns {root.__name__}")
    try:
        tree = recipe()
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # a recipe is the user's code
        raise ConfigError.raised("recipe", dotted, error) from error
    if not isinstance(tree, root):
        raise ConfigError.one(
            "recipe", f"{dotted} returned {type(tree).__qualname__}", f"return a {root.__name__} from it"
        )
    return Opened(tree, flags)


def _open_yaml(root: type[Any], path: str, flags: Sequence[Override]) -> Opened:
    """The tree that a file describes: groups with their `_target_`, or the older ``model``, ``data`` and ``train``."""
    file = yaml_file.read(path)
    lenient = [flag for flag in flags if overrides.normalized(flag.name) == "legacy_lenient"]
    flags = [flag for flag in flags if flag not in lenient]
    if _is_legacy(file.content):
        legacy = import_object(_LEGACY, "legacy")  # by its path, since it stands on a floor above this one
        raise_faults(overrides.stray(lenient[0].words, after=lenient[0].name) if lenient else ())
        own = [flag for flag in flags if flag.name.partition(".")[0] in ("model", "data", "train")]
        args = legacy.read_legacy(file, own, lenient=bool(lenient))
        rest, flagged = [flag for flag in flags if flag not in own], {overrides.normalized(flag.name) for flag in own}
        try:
            tree = legacy.legacy_to_trainer_config(args)
        except ConfigError as error:
            raise ConfigError(Opened(None, rest, {}, file, flagged).faults(error.faults, {})) from error
        return Opened(tree, rest, legacy.LEGACY_NAMES, file, flagged)
    if lenient:
        raise ConfigError.one(lenient[0].name, f"{path} is no file of groups model, data and train", "remove it")
    filled = fill_targets(file.content, root)
    faults = list(filled.faults)
    try:
        resolved = resolver.resolve(filled.content, root)
    except ConfigError as error:
        faults += (dataclasses.replace(f, path=resolver.spelled(f.path, filled.written)) for f in error.faults)
    raise_faults(file.placed(faults))
    return Opened(resolved.tree, flags, resolver.YAML_NAMES | resolved.written | filled.written, file)


def _is_legacy(content: Mapping[str, Any]) -> bool:
    """Whether a file has the groups ``model``, ``data`` and ``train`` of the older schema."""
    model = content.get("model")
    has_name = isinstance(model, Mapping) and "name" in model
    has_target = isinstance(model, Mapping) and resolver.TARGET in model
    return not has_target and (has_name or not content.keys().isdisjoint(("data", "train")))


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
    Door(
        "config-file",
        "FILE.yaml",
        "Train what this file describes. The flag may be left out: a file in front of all flags is one too.",
        "--config-file run.yaml",
        _open_yaml,
    ),
)
"""Every front door. Exactly one is used."""


def _split_doors(
    flags: Sequence[Override], positional: Sequence[str]
) -> tuple[list[tuple[Door, Override]], list[Override], list[str]]:
    """(the doors that are named, each with its flag; the other flags; the words that are neither)."""
    doors = {overrides.normalized(door.flag): door for door in DOORS}
    keys = [(doors[name], flag) for flag in flags if (name := overrides.normalized(flag.name)) in doors]
    taken = [flag for _, flag in keys]
    files = [word for word in positional if word.endswith((".yaml", ".yml"))]
    keys += [(doors["config_file"], Override("config-file", (file,))) for file in files]
    return keys, [flag for flag in flags if flag not in taken], [word for word in positional if word not in files]


def _open_door(
    root: type[RootT], keys: Sequence[tuple[Door, Override]], flags: Sequence[Override], prog: str
) -> Opened:
    if len(keys) != 1:
        examples = " or ".join(f"python -m {prog} {door.example}" for door in DOORS)
        given = " and ".join(f"--{' '.join((flag.name, *flag.words[:1]))}" for _, flag in keys)
        fact = f"{given} are given" if keys else "nothing says what to train"
        raise ConfigError.one("command line", fact, f"give exactly one of {examples}")
    door, flag = keys[0]
    if not flag.words:
        raise ConfigError.one(flag.name, f"expected {door.metavar}, got nothing", f"write {door.example}")
    raise_faults(overrides.stray(flag.words[1:], after=flag.name))
    opened = door.open(root, flag.words[0], flags)
    # A copy: flags change the tree, and what a door returns may belong to a module (a flavor, a recipe's constant).
    return dataclasses.replace(opened, tree=copy.deepcopy(opened.tree))


def _print_help(tree: ConfigNode, prog: str) -> NoReturn:
    if speaks():
        from hyper_parallel.config.help import print_help

        doors = [(door.flag, door.metavar, door.doc) for door in DOORS]
        examples = "\n".join(f"  python -m {prog} {door.example}" for door in DOORS)
        description = f"Trains a language model. Give exactly one of --{' and --'.join(d[0] for d in doors)}; "
        description += f"any setting below may follow.\n\n{examples}"
        try:
            print_help(tree, doors, prog=f"python -m {prog}", description=description)
        except BrokenPipeError:  # `--help | head`: the reader has seen enough
            os._exit(0)
    raise SystemExit(0)


def _type_faults(tree: ConfigNode) -> Iterator[Fault]:
    """Faults of values that a recipe set to another type than declared; right ones take their exact type."""
    for path, node in list(tree.traverse()):
        for f in dataclasses.fields(node):
            value = getattr(node, f.name)
            if isinstance(node, Target) and f.name not in node.configured():
                continue  # the callable's own default, whatever it says of it: many write `size: int = None`
            where = join(path, f.name)
            annotation = field_types(type(node))[f.name]
            if field_slot(f) and (strangers := list(_unbuildable(value, annotation, where))):
                yield from strangers
                continue
            try:
                exact = coerce(value, annotation, where)
            except ConfigError as error:
                yield from error.faults
            else:
                if exact is not value:
                    setattr(node, f.name, exact)


def _unbuildable(value: Any, annotation: Any, path: str) -> Iterator[Fault]:
    """A fault for what a slot holds and nothing can be built from. A slot may hold several, in a list or tuple."""
    if isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _unbuildable(item, None, join(path, str(i)))
    elif not (hasattr(value, "build") or is_named(value, annotation) or (value is None and is_optional(annotation))):
        yield Fault(path, f"expected a Config to build, got {shown(value)}", "give a Config or a Target")


def _write(path: str, text: str) -> None:
    """Replaces a file at once, so that no reader and no crash sees half of it."""
    unfinished = f"{path}.{os.getpid()}.tmp"
    with open(unfinished, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(unfinished, path)


def main(argv: Sequence[str] | None = None) -> int:
    """Checks files and recipes, prints the tree of each, and returns 2 if one of them could not be trained."""
    parser = argparse.ArgumentParser(prog="python -m hyper_parallel.config.manager", description=main.__doc__)
    parser.add_argument(
        "--check", nargs="+", required=True, metavar="FILE", help="YAML file, or dotted recipe function"
    )
    parser.add_argument("--world_size", type=int, help="ranks; as few as the degrees of parallelism ask for by default")
    options = parser.parse_args(argv)
    if options.world_size is not None and options.world_size < 1:
        parser.error(f"argument --world_size: {options.world_size} is below 1")
    root = import_object(resolver.ROOT, "root")
    code = 0
    for name in options.check:
        is_file = name.endswith((".yaml", ".yml")) or os.path.isfile(name)
        try:
            opened = _open_yaml(root, name, ()) if is_file else _open_recipe(root, name, ())
            world_size = options.world_size or opened.tree.parallelism.smallest_world_size()
            raise_faults(opened.faults(check(opened.tree, world_size), {}))
        except ConfigError as error:
            report(error)
            code = 2
        else:
            print(f"# {name}, for {world_size} rank(s)\n{resolver.to_yaml(opened.tree)}")
    return code


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:  # `--check ... | head`: the reader has seen enough
        os._exit(0)
