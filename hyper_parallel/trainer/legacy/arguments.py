"""From a model/data/train file and the flags after it to their tree."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from hyper_parallel.config import overrides, yaml_file
from hyper_parallel.config.configurable import ConfigNode, join
from hyper_parallel.config.errors import ConfigError, Fault, did_you_mean, raise_faults
from hyper_parallel.config.overrides import Override
from hyper_parallel.config.schema import field_types
from hyper_parallel.config.values import coerce
from hyper_parallel.config.yaml_file import YamlFile
from hyper_parallel.trainer.legacy.front_door import front_door
from hyper_parallel.trainer.legacy.schema import HyperTrainerConfig

logger = logging.getLogger(__name__)

RootT = TypeVar("RootT", bound=HyperTrainerConfig)

_MOVED = {
    "parallel": "train.accelerator",
    "optim": "train.optimizer",
    "memory": "train.gradient_checkpointing",
    "profiler": "train.profile",
    "runtime": "train",
}
"""Groups that older files had at the root, under names that they no longer have."""
_DOORS = (
    ("config_file", "FILE.yaml", "The file with model, data and train; without it all is at its default."),
    ("legacy_lenient", "", "Leave out names in the file that are unknown, with one warning."),
)


def parse_args(root: type[RootT], argv: Sequence[str] | None = None) -> RootT:
    """The tree that a command line asks for: a YAML file or none, then flags such as ``--train.max_steps 3``.

    Args:
        argv: the words after the program; None: those of this process.

    Raises:
        ConfigError: with every fault. For the words of this process it is a FrontDoorError, which ends a script.
        SystemExit: with code 0, once `--help` is printed.
    """
    if argv is not None:
        return _parse(root, argv)
    with front_door():
        return _parse(root, sys.argv[1:])


def read_legacy(file: YamlFile, flags: Sequence[Override], *, lenient: bool) -> HyperTrainerConfig:
    """The tree of a file, with `flags` applied.

    Args:
        lenient: leave out names below the three groups that are unknown, with one warning, in the place of faults.

    Raises:
        ConfigError: with every fault of the file, each with its line, and of the flags.
    """
    return _read(HyperTrainerConfig, file, flags, lenient)


def _parse(root: type[RootT], argv: Sequence[str]) -> RootT:
    flags, positional = overrides.parse(argv)
    files, lenient, settable = list(positional), False, []
    for flag in flags:
        name = overrides.normalized(flag.name)
        if name in ("help", "_h"):
            _print_help(root)
        elif name == "config_file":
            if not flag.words:
                raise ConfigError.one(flag.name, "expected a file, got nothing", "write --config-file FILE.yaml")
            files.extend(flag.words)
        elif name == "legacy_lenient":
            raise_faults(overrides.stray(flag.words, after=flag.name))
            lenient = True
        else:
            settable.append(flag)
    raise_faults(overrides.stray(files[1:]))
    if files:
        return _read(root, yaml_file.read(files[0]), settable, lenient)
    tree = root()
    overrides.apply(tree, settable)
    return tree


def _read(root: type[RootT], file: YamlFile, flags: Sequence[Override], lenient: bool) -> RootT:
    unknown: list[Fault] = []
    faults = list(_root_faults(root, file.content))
    groups = {name: value for name, value in file.content.items() if name in field_types(root)}
    known = _known(groups, root, "", unknown)
    if lenient and unknown:
        names = ", ".join(f"{fault.path} ({fault.remedy})" for fault in unknown)
        logger.warning("%s: %d unknown names are left out: %s", file.name, len(unknown), names)
    elif not lenient:
        faults += unknown
    tree = root()
    try:
        tree = coerce(known, root, "")
    except ConfigError as error:
        faults += error.faults
    faults = file.placed(faults)
    try:
        overrides.apply(tree, flags)
    except ConfigError as error:
        faults += error.faults
    raise_faults(faults)
    return tree


def _root_faults(root: type[ConfigNode], content: Mapping[str, Any]) -> Iterator[Fault]:
    """Faults of groups that do not belong at the root."""
    homes = field_types(root)
    for name in content:
        if name in homes:
            continue
        home = _MOVED.get(name) or next(
            (f"{group}.{name}" for group, kind in homes.items() if name in field_types(kind)), None
        )
        if home is not None:
            yield Fault(str(name), "has moved", f"write it as {home}")
        else:
            yield Fault(str(name), "is no group of a model/data/train file", did_you_mean(str(name), homes))


def _known(content: Mapping[str, Any], kind: type[ConfigNode], path: str, unknown: list[Fault]) -> dict[str, Any]:
    """`content` without names that `kind` does not have; a fault for each of them goes to `unknown`."""
    types, known = field_types(kind), {}
    for name, value in content.items():
        where = join(path, str(name))
        if name not in types:
            unknown.append(Fault(where, "is no setting of a model/data/train file", did_you_mean(str(name), types)))
        elif isinstance(value, Mapping) and dataclasses.is_dataclass(types[name]):
            known[name] = _known(value, types[name], where, unknown)
        else:
            known[name] = value
    return known


def _print_help(root: type[ConfigNode]) -> NoReturn:
    from hyper_parallel.config.help import print_help

    print_help(
        root(), _DOORS, prog=sys.argv[0], description="Trains what a model/data/train file says. " + _DOORS[0][2]
    )
    raise SystemExit(0)
