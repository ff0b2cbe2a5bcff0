"""PlanOverride: what a run changes in a model that stands, module by module."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import nn

from hyper_parallel.config.configurable import Buildable, ConfigNode, slot
from hyper_parallel.config.errors import ConfigError, Fault
from hyper_parallel.config.imports import import_object
from hyper_parallel.config.target import Target
from hyper_parallel.protocols.module_replacement import factory_fault
from hyper_parallel.protocols.plan_merge import LISTED, MAPPED, WORDS


@dataclass(kw_only=True, slots=True)
class PlanOverride(ConfigNode):
    """One rule. It says which modules it is about, and what stands in their place or crosses their boundary.

    A boundary is that of axis tp, and its field that is not written stays as the model's plan derives it.
    """

    match: str | tuple[str, ...] = ""
    """Names of modules, such as model.layers.*.input_layernorm; * stands for anything, and each must be found."""
    when: Literal["cp", "ep"] | None = None
    """cp, ep: only in a run with that parallelism. None: in every run."""
    module_type: str = ""
    """Dotted path of the class that the modules are of."""
    exact_type: bool = False
    """Take no classes that derive from it."""
    replace_module: Buildable[nn.Module] | None = slot(None, runtime="module module_fqn context")
    """A factory with @module_replacement that makes what stands in the place of a module."""

    params: dict[str, str] | None = None
    """By parameter of the module: how it lies over axis tp, replicate or shard(DIM)."""
    in_src: dict[str, str] | None = None
    """By argument of its forward: how it arrives, replicate, partial, shard(DIM), or auto for what is derived."""
    in_dst: dict[str, str] | None = None
    """By argument: what it is turned into."""
    out_src: tuple[str, ...] | None = None
    """By output: how forward leaves it."""
    out_dst: tuple[str, ...] | None = None
    """By output: what it is turned into behind the module."""

    tp_divide_attrs: tuple[str, ...] | None = None
    """Attributes of the module that count features of which each rank of axis tp has a part."""

    def written_fields(self) -> list[str]:
        """Names of the fields of a boundary that it writes; {} and [] are written too."""
        return [name for name in (*MAPPED, *LISTED, "tp_divide_attrs") if getattr(self, name) is not None]

    def patterns(self) -> tuple[str, ...]:
        """`match` as a tuple."""
        return (self.match,) if isinstance(self.match, str) else self.match

    def replaced_type(self) -> type[nn.Module]:
        """The class at `module_type`.

        Raises:
            ConfigError: there is none, or it is no module's.
        """
        found = import_object(self.module_type, "module_type")
        if isinstance(found, type) and issubclass(found, nn.Module):
            return found
        raise ConfigError.one("module_type", f"{self.module_type} is no torch.nn.Module", "name the modules' class")

    def faults(self) -> Iterator[Fault]:
        if not self.match or not all(self.patterns()):
            yield Fault("match", "it names no module", "give a pattern, such as model.layers.*.input_layernorm")
        for name in (name for name in self.written_fields() if name != "tp_divide_attrs"):
            written = getattr(self, name)
            for key, word in written.items() if isinstance(written, dict) else enumerate(written):
                if not WORDS.fullmatch(word):
                    remedy = "write replicate, partial, shard(DIM) or auto"
                    yield Fault(f"{name}.{key}", f"{word!r} is no placement", remedy)
        if self.replace_module is None and self.written_fields():
            return
        if self.replace_module is None:
            remedy = "give a factory, or fields of a boundary, or leave the rule out"
            yield Fault("replace_module", "is missing, so nothing would be changed", remedy)
        elif isinstance(self.replace_module, Target) and (fact := factory_fault(type(self.replace_module).callable)):
            remedy = "write @module_replacement over def factory(module, module_fqn, context) -> torch.nn.Module"
            yield Fault("replace_module", f"{self.replace_module.target_path} {fact}", remedy)
        if not self.module_type:
            yield Fault("module_type", "is missing beside replace_module", "give the dotted path of the modules' class")
            return
        try:
            self.replaced_type()
        except ConfigError as error:
            yield from error.faults
