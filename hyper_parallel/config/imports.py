"""Objects by their dotted path, with faults that say which part of the path is wrong."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType
from typing import Any

from hyper_parallel.config.errors import ConfigError, nearest


def import_object(dotted: str, path: str) -> Any:
    """The object at ``package.module.Name.inner``: the longest importable prefix, then attributes.

    Raises:
        ConfigError: at `path`: no such module or attribute, or a module on the way fails when it is imported; then
            with what that module missed, not with the module's own name.
    """
    segments = dotted.split(".")
    if not all(segment.isidentifier() for segment in segments) or len(segments) < 2:
        raise ConfigError.one(path, f"{dotted!r} is no dotted path", "write package.module.name")
    found, used = _longest_module(segments, path)
    for i, segment in enumerate(segments[used:], start=used):
        try:
            has_it = hasattr(found, segment)
        except Exception as error:  # a module that imports on demand may fail in any way then
            fact = f"{'.'.join(segments[: i + 1])} raised {type(error).__name__}: {error}"
            raise ConfigError.one(path, fact, f"mend {'.'.join(segments[:i])}") from error
        if not has_it:
            known = [name for name in dir(found) if not name.startswith("_")]
            near = nearest(segment, known)
            remedy = f"did you mean {near!r}?" if near else "check the path"
            raise ConfigError.one(path, f"{'.'.join(segments[:i])} has no {segment!r}", remedy)
        found = getattr(found, segment)
    return found


def import_family(name: str, path: str) -> ModuleType:
    """The package of a model family, with its `create_model_spec`, `FAMILY` and `FLAVORS`.

    Raises:
        ConfigError: at `path`: there is no such family.
    """
    families = importlib.import_module("hyper_parallel.models").FAMILIES
    if name not in families:
        near = nearest(name, families)
        choices = f"choose one of {', '.join(families)}"
        remedy = f"did you mean {near!r}? {choices}" if near else choices
        raise ConfigError.one(path, f"{name!r} is no model family", remedy)
    return importlib.import_module(f"hyper_parallel.models.{name}")


def _longest_module(segments: list[str], path: str) -> tuple[Any, int]:
    """(the module of the longest prefix that is one, how many segments it took)."""
    module = None
    for used in range(1, len(segments) + 1):
        name = ".".join(segments[:used])
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name == name and module is not None:
                return module, used - 1
            if error.name == name:
                raise ConfigError.one(
                    path, f"no module named {name!r}", "install it, or start in the folder that holds it"
                ) from error
            fact = f"importing {name} needs the module {error.name!r}, which is not installed"
            raise ConfigError.one(path, fact, f"install {error.name}") from error
        except (Exception, SystemExit) as error:  # a module of the user's may fail in any way, scripts exit
            raise ConfigError.one(
                path, f"importing {name} raised {type(error).__name__}: {error}", f"mend {name}"
            ) from error
    return module, len(segments)
