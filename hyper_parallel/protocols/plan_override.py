"""PlanOverride: what a run changes in a model that stands, module by module."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from hyper_parallel.config.configurable import Buildable, ConfigNode, slot
from hyper_parallel.config.errors import ConfigError, Fault, did_you_mean
from hyper_parallel.config.imports import import_object
from hyper_parallel.config.target import Target
from hyper_parallel.protocols.module_replacement import When
from hyper_parallel.protocols.overridden_boundary import LISTED, MAPPED, PLACEMENTS, WORDS
from hyper_parallel.protocols.override_factories import ARGUMENTS, Kind, factory_fault

WRAPPERS = ("sdpa_qkv", "sdpa_hf")
"""What inner_wrapper may name without a factory."""


@dataclass(kw_only=True, slots=True)
class PlanOverride(ConfigNode):
    """One rule. It says which modules it is about, and what stands in their place or crosses their boundary.

    A boundary is that of axis tp, and its field that is not written stays as the model's plan derives it.
    """

    match: str | tuple[str, ...] = ""
    """Names of modules, such as model.layers.*.input_layernorm; * stands for anything, and each must be found. Beside
    inner_target: those that have it."""
    when: When | None = None
    """cp, ep: only in a run with that parallelism. low_precision: only in one that computes in bfloat16. None: in every
    run."""

    module_type: str = ""
    """Dotted path of the class that replaced modules are of."""
    exact_type: bool = False
    """Take no classes that derive from it."""
    replace_module: Buildable[nn.Module] | None = slot(None, runtime=" ".join(ARGUMENTS["module_replacement"]))
    """A factory with @module_replacement that makes what stands in the place of a module."""

    local_compute_fn: Buildable[Any] | None = slot(None, runtime=" ".join(ARGUMENTS["local_compute"]))
    """A factory with @local_compute that makes what runs in the place of the modules' forward, within their boundary,
    where the run has tp, cp or ep."""
    inner_target: str | None = None
    """Name, from the matched module on, of a module below it that inner_wrapper is about."""
    inner_wrapper: str | Buildable[Any] | None = slot(None, runtime=" ".join(ARGUMENTS["inner_wrapper"]))
    """What runs in the place of that module's forward, where the run has tp, cp or ep: a factory with @inner_wrapper;
    sdpa_qkv: the attention of the run's cp_method, called (q, k, v, ...) with [B, T, heads, D]; or sdpa_hf: the same,
    called as transformers calls an attention function."""
    inner_out_src: dict[str, Any] | Literal["first_input"] | None = None
    """How the output of inner_wrapper lies over axis tp, as {tp: shard(2)}, or first_input: as its first argument does.
    None: as the boundary of inner_target says."""
    region_dispatch: bool | None = None
    """Beside local_compute_fn and inner_wrapper: whether forward of the matched module is given DTensors under
    parallelism.mode validate. False: local tensors in every mode."""

    params: dict[str, str] | Literal["auto", "none"] | None = None
    """By parameter of the module: how it lies over axis tp, replicate, shard(DIM), or auto for what the model's plan
    derives. {} or none: it has no parameters. The next fields go likewise."""
    in_src: dict[str, str] | Literal["auto", "none"] | None = None
    """By argument of its forward: how it arrives; partial too, or none for one that is left as it is."""
    in_dst: dict[str, str] | Literal["auto", "none"] | None = None
    """By argument: what it is turned into."""
    out_src: tuple[str, ...] | Literal["auto", "none"] | None = None
    """By output: how forward leaves it."""
    out_dst: tuple[str, ...] | Literal["auto", "none"] | None = None
    """By output: what it is turned into behind the module."""

    tp_divide_attrs: tuple[str, ...] | None = None
    """Attributes of the module that count features of which each rank of axis tp has a part."""

    @property
    def injects(self) -> bool:
        """Whether it changes what is computed within a boundary."""
        return self.local_compute_fn is not None or self.inner_wrapper is not None

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
        yield from self._boundary_faults()
        yield from self._replacement_faults()
        yield from self._injection_faults()
        if self.replace_module is None and not self.written_fields() and not self.injects:
            remedy = "give a factory, or fields of a boundary, or leave the rule out"
            yield Fault("replace_module", "is missing, so nothing would be changed", remedy)

    def _boundary_faults(self) -> Iterator[Fault]:
        for name in (*MAPPED, *LISTED):
            written = getattr(self, name)
            if written is None or isinstance(written, str):
                continue
            for key, word in written.items() if isinstance(written, dict) else enumerate(written):
                if not WORDS.fullmatch(word):
                    remedy = "write replicate, partial, shard(DIM), auto or none"
                    yield Fault(f"{name}.{key}", f"{word!r} is no placement", remedy)
                elif name == "params" and word in ("partial", "none"):
                    yield Fault(f"{name}.{key}", f"{word!r}, but a parameter is kept", "write replicate or shard(DIM)")

    def _replacement_faults(self) -> Iterator[Fault]:
        if self.replace_module is None:
            for name in ("module_type", "exact_type"):
                if value := getattr(self, name):
                    yield Fault(name, f"{value!r} is given, but only replace_module asks for it", "leave it out")
            return
        yield from _factory_faults("replace_module", self.replace_module, "module_replacement")
        if not self.module_type:
            yield Fault("module_type", "is missing beside replace_module", "give the dotted path of the modules' class")
            return
        try:
            self.replaced_type()
        except ConfigError as error:
            yield from error.faults

    def _injection_faults(self) -> Iterator[Fault]:
        yield from _factory_faults("local_compute_fn", self.local_compute_fn, "local_compute")
        wrapper = self.inner_wrapper
        if isinstance(wrapper, str) and wrapper.startswith("flex_"):
            fact = f"{wrapper}: flex attention has no backward on a CPU and no kernel on an NPU, and is not used here"
            yield Fault("inner_wrapper", fact, f"write {wrapper.replace('flex', 'sdpa', 1)}")
        elif isinstance(wrapper, str) and wrapper not in WRAPPERS:
            yield Fault("inner_wrapper", f"{wrapper!r} is no wrapper", did_you_mean(wrapper, WRAPPERS))
        else:
            yield from _factory_faults("inner_wrapper", wrapper, "inner_wrapper")
        for name, other in (("inner_target", "inner_wrapper"), ("inner_wrapper", "inner_target")):
            if getattr(self, name) is not None and not getattr(self, other):
                yield Fault(other, f"is missing beside {name}", f"give it, or leave {name} out")
        if self.injects and self.region_dispatch is None:
            remedy = "write false: forward gets local tensors in every mode; or true: DTensors under mode validate"
            yield Fault("region_dispatch", "is missing beside what is injected", remedy)
        if not self.injects and self.region_dispatch is not None:
            fact = f"{self.region_dispatch} is given, but nothing is injected"
            yield Fault("region_dispatch", fact, "leave it out, or give local_compute_fn or inner_wrapper")
        yield from self._inner_output_faults()

    def _inner_output_faults(self) -> Iterator[Fault]:
        written = self.inner_out_src
        if written is None:
            return
        if self.inner_wrapper is None or self.region_dispatch is False:
            lacking = "there is no inner_wrapper" if self.inner_wrapper is None else "region_dispatch is false"
            yield Fault("inner_out_src", f"is given, but {lacking}, so nothing asks for it", "leave it out")
        remedy = "write first_input, or a placement over axis tp, as {tp: shard(2)}"
        if written == {}:
            yield Fault("inner_out_src", "{} places nothing", remedy)
        for axis, word in written.items() if isinstance(written, dict) else ():
            if isinstance(word, dict):
                fact = "a placement by name, but the outputs that are computed here have numbers, and one is placed"
                yield Fault(f"inner_out_src.{axis}", fact, remedy)
            elif axis != "tp":
                fact = f"{word!r}, but over {axis} tensors are local in every mode"
                yield Fault(f"inner_out_src.{axis}", fact, remedy)
            elif not isinstance(word, str) or not PLACEMENTS.fullmatch(word):
                yield Fault(f"inner_out_src.{axis}", f"{word!r} is no placement", remedy)


def _factory_faults(field: str, factory: Any, kind: Kind) -> Iterator[Fault]:
    if isinstance(factory, Target) and (fact := factory_fault(type(factory).callable, kind)):
        remedy = f"write @{kind} over def factory({', '.join(ARGUMENTS[kind])})"
        yield Fault(field, f"{factory.target_path} {fact}", remedy)
