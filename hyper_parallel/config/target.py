"""A Config made from any callable's signature, so that a user's plain class behaves like one of our own components.

loss = Target.of(my_project.losses.ScaledLoss, scale=0.5)      # a node with the typed field `scale`
loss.scale = 0.25                                              # what --loss.scale 0.25 does
loss_fn = loss.build(model_parts=parts)                        # my_project.losses.ScaledLoss(scale=0.25, ...)
"""

from __future__ import annotations

import builtins
import copy
import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

from hyper_parallel.config.annotations import resolved
from hyper_parallel.config.configurable import ConfigNode, plain, target_path
from hyper_parallel.config.errors import ConfigError, Fault, did_you_mean

_KEYWORD_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Unset(Enum):
    """The type of `UNSET`."""

    UNSET = "unset"

    def __repr__(self) -> str:
        return "UNSET"


UNSET = Unset.UNSET
"""The value of a Target's field that nobody configured: `build` takes it from the run or leaves it to the callable."""


@dataclass(kw_only=True, slots=True)
class Target(ConfigNode):
    """A callable and the part of its arguments that is configured; `build` adds the rest."""

    callable: ClassVar[Callable[..., Any]]
    """What `build` calls."""
    target_path: ClassVar[str]
    """The dotted path of `callable`."""
    _parameters: ClassVar[Mapping[str, inspect.Parameter]]
    """The parameters of `callable` that a keyword can fill, with resolved annotations (Any where there is none)."""
    _takes_any: ClassVar[bool]
    """Whether `callable` has ``**kwargs``."""

    @staticmethod
    def of(callable: Callable[..., Any], /, **configured: Any) -> Target:
        """The Config of `callable` with `configured` arguments.

        Raises:
            ConfigError: `callable` cannot be called, has no readable signature, has a required positional-only
                parameter, has a parameter whose name a Target needs, or has no parameter of a configured name.
        """
        signature = read_signature(callable)
        extra = tuple(sorted(configured.keys() - signature.parameters.keys()))
        if extra and not signature.takes_any:
            path = target_path(callable)
            raise ConfigError(
                Fault(f"{path}.{name}", f"{path} has no argument {name!r}", did_you_mean(name, signature.parameters))
                for name in extra
            )
        return _target_class(callable, extra)(**configured)

    def configured(self) -> dict[str, Any]:
        """The arguments that differ from what the callable would take by itself."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if not self._is_default(name, value)}

    def missing(self, runtime: Iterable[str]) -> list[str]:
        """The required parameters that are neither configured nor named in `runtime`."""
        given = self.configured().keys() | set(runtime)
        return [n for n, p in self._parameters.items() if p.default is inspect.Parameter.empty and n not in given]

    def build(self, **runtime: Any) -> Any:
        """Calls the callable with what is configured and with those of `runtime` that its signature takes.

        A runtime argument wins over a configured one of the same name, with a warning.

        Raises:
            TypeError: a required argument is neither configured nor among `runtime`.
        """
        configured = self.configured()
        taken = {n: v for n, v in runtime.items() if self._takes_any or n in self._parameters}
        for name in sorted(configured.keys() & taken.keys()):
            warnings.warn(
                f"{self.target_path}: the configured {name} {configured[name]!r} is not used, the run supplies it",
                stacklevel=2,
            )
        if missing := self.missing(taken):
            raise TypeError(
                f"{self.target_path}: {', '.join(missing)} is required, and neither configured nor supplied by the run "
                f"(it supplies {', '.join(runtime) or 'nothing'})"
            )
        return type(self).callable(**{**configured, **taken})

    def to_dict(self) -> dict[str, Any]:
        return {"_target_": self.target_path, **{name: plain(value) for name, value in self.configured().items()}}

    def faults(self) -> Iterator[Fault]:
        if "<" in self.target_path:
            yield Fault(
                "_target_",
                f"{self.target_path} cannot be imported again from the saved config",
                "define it at the top level of a module",
            )

    def _is_default(self, name: str, value: Any) -> bool:
        if value is UNSET:
            return True
        parameter = self._parameters.get(name)
        return parameter is not None and type(value) is type(parameter.default) and value == parameter.default

    def __reduce__(self) -> tuple[Any, ...]:
        # The class is made on the fly, so copies and pickles go through the callable that it is made from.
        extra = tuple(f.name for f in dataclasses.fields(self) if f.name not in self._parameters)
        return _open_target, (type(self).callable, extra), self.__getstate__()


@dataclass(frozen=True, slots=True)
class Signature:
    """What keywords a callable takes."""

    parameters: Mapping[str, inspect.Parameter]
    """Those that a keyword can fill, with resolved annotations: Any where there is none."""
    takes_any: bool
    """Whether it has ``**kwargs``."""

    def takes(self, name: str) -> bool:
        """Whether a keyword of that name can be given."""
        return self.takes_any or name in self.parameters


@functools.cache
def read_signature(callable: Callable[..., Any]) -> Signature:
    """The signature of `callable`.

    Raises:
        ConfigError: at its dotted path: it cannot be called, has no readable signature, has a required positional-only
            parameter, or one whose name a Target needs.
    """
    path = _path_of(callable)
    try:
        signature = inspect.signature(callable)
    except ValueError:
        raise ConfigError.one(
            path, "its signature cannot be read", "wrap it in a function with named parameters"
        ) from None
    parameters = {}
    for parameter in signature.parameters.values():
        if parameter.kind in _KEYWORD_KINDS:
            parameters[parameter.name] = parameter.replace(annotation=_annotation(callable, parameter))
        elif parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            fact = f"its parameter {parameter.name!r} is positional-only"
            raise ConfigError.one(path, fact, "wrap it in a function with named parameters")
    reserved = sorted(parameters.keys() & set(dir(Target)) | {n for n in parameters if n.startswith("__")})
    if reserved:
        fact = f"its parameter {reserved[0]!r} has a name that Target needs"
        raise ConfigError.one(path, fact, "wrap it in a function with other names")
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    return Signature(parameters, takes_any)


@functools.cache
def _target_class(callable: Callable[..., Any], extra: tuple[str, ...]) -> type[Target]:
    """The Target class of `callable`; `extra` names the arguments that only its ``**kwargs`` takes."""
    signature = read_signature(callable)
    fields: list[tuple[str, Any, Any]] = []
    for name, parameter in signature.parameters.items():
        default = parameter.default if _is_data(parameter.default) else UNSET
        # A factory, since a list or dict as a default would be shared.
        made = field(default_factory=functools.partial(copy.deepcopy, default))
        fields.append((name, parameter.annotation, made))
    fields += [(name, Any, field(default=UNSET)) for name in extra]
    path = target_path(callable)
    return dataclasses.make_dataclass(
        f"Target[{path}]",
        fields,
        bases=(Target,),
        namespace={
            "__doc__": inspect.getdoc(callable),
            "callable": staticmethod(callable),
            "target_path": path,
            "_parameters": signature.parameters,
            "_takes_any": signature.takes_any,
        },
        kw_only=True,
        slots=True,
    )


def _open_target(callable: Callable[..., Any], extra: tuple[str, ...]) -> Target:
    return _target_class(callable, extra)()


def _path_of(callable: Any) -> str:
    if not builtins.callable(callable):
        raise ConfigError.one(repr(callable), "is not callable", "name a class or a function")
    if not hasattr(callable, "__qualname__") or not getattr(callable, "__module__", None):
        raise ConfigError.one(repr(callable), "has no importable name", "wrap it in a function")
    return target_path(callable)


def _annotation(callable: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    """The resolved annotation of one parameter; Any where there is none or its names exist for type checkers only."""
    if parameter.annotation is parameter.empty:
        return Any
    function = inspect.unwrap(getattr(callable, "__init__") if isinstance(callable, type) else callable)  # noqa: B009
    return resolved(parameter.annotation, getattr(function, "__globals__", {}))


def _is_data(value: Any) -> bool:
    """Whether a default can be shown, compared and saved. Others (markers, functions) stay inside the callable."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_data, value))
    if isinstance(value, dict):
        return all(_is_data(item) for pair in value.items() for item in pair)
    return value is None or isinstance(value, (bool, int, float, str))
