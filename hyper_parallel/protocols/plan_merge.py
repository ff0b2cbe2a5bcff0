"""What plan_overrides write into the sharding plan that a model has derived for a run."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from hyper_parallel.config.errors import ConfigError, Fault, did_you_mean, raise_faults
from hyper_parallel.config.target import Target
from hyper_parallel.protocols.injected_compute import InjectedCompute
from hyper_parallel.protocols.mesh import MeshAxisName
from hyper_parallel.protocols.module_replacement import (
    ReplacementContext,
    near_names,
    of_all_layers,
    replacing_path,
    with_outer,
)
from hyper_parallel.protocols.sharding import (
    LocalMap,
    NamedPlacement,
    ShardingConfig,
    ShardingPlan,
    names_some,
    plan_of,
)

if TYPE_CHECKING:
    from hyper_parallel.protocols.plan_override import PlanOverride

logger = logging.getLogger(__name__)

PLACEMENTS = re.compile(r"replicate|partial|shard\((\d+)\)")
"""Placements on axis tp as an override writes them."""
WORDS = re.compile(rf"{PLACEMENTS.pattern}|auto|none")
"""The same, or auto: as the model's plan derives it; or none: the tensor is left as it is, whatever that is."""
MAPPED = {"params": "state_shardings", "in_src": "in_src", "in_dst": "in_dst"}
"""Fields of an override by name of a tensor, and those of a ShardingConfig that they replace."""
LISTED = {"out_src": "out_src", "out_dst": "out_dst"}
"""The same by number of an output."""


def merged_plan(
    modules: Mapping[str, nn.Module],
    plan: ShardingPlan,
    overrides: Sequence[PlanOverride],
    context: ReplacementContext,
    wrappers: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
) -> ShardingPlan:
    """`plan` with what overrides write: a field that one writes replaces the derived field, others stay.

    Of several overrides of one module the later one wins, field by field.

    Args:
        modules: all of the model, by name.
        wrappers: what the model has for `inner_wrapper`, by name.

    Raises:
        ConfigError: a pattern or inner_target names no module, a module without a derived boundary of which not all is
            written, or fields that do not go together or with the module.
    """
    merge = _Merge(modules, plan, context, wrappers)
    faults: list[Fault] = []
    is_without_some = any(each.replace_module is not None and not context.has(each.when) for each in overrides)
    for i, override in enumerate(overrides):
        path = f"plan_overrides.{i}"
        if not override.written_fields() and not override.injects:
            continue
        lacking = _lacking(override, plan, context)
        if lacking is not None:
            logger.info("%s is left out: the run is without %s", path, lacking)
        for pattern in override.patterns():
            found, absent = _found(pattern, override.inner_target, modules, path)
            # A rule that is left out may be about what a replacement would have, which is left out too.
            faults += absent if lacking is None or not is_without_some else ()
            for name in found if lacking is None else ():
                try:
                    merge.add(path, override, name)
                except ConfigError as error:
                    faults += error.faults
    faults += merge.undispatched()
    raise_faults(dict.fromkeys(faults))
    # The first entry that fits a module is its own.
    return {**merge.own, **{pattern: boundary for pattern, boundary in plan.items() if pattern not in merge.own}}


def without_modules(
    plan: ShardingPlan,
    before: Collection[str],
    names: Collection[str],
    overrides: Sequence[PlanOverride],
    context: ReplacementContext,
) -> ShardingPlan:
    """`plan` without the entries of modules that replacements have not kept.

    Args:
        before: names of all modules that the model had.
        names: those that it has now.

    Raises:
        ConfigError: HP-REPLACE-002, the plan computes one of them over several ranks, and nothing takes its place.
    """
    gone = set(before).difference(names)
    injected = {name for name, entry in plan.items() if entry.compute is not None}
    new = injected.difference(before)
    faults = []
    for name in gone:
        entry, region = plan_of(name, plan), name.rpartition(".")[0]
        if entry is None:
            continue
        # What stood there before does something else, such as a norm.
        has_stand_in = region in injected or any(other.startswith(f"{region}.") for other in new)
        spread = entry.local_map
        if spread is None or spread.forward is None or getattr(context, spread.axis) == 1 or has_stand_in:
            continue
        leaf = name.rpartition(".")[2]
        fact = f"{of_all_layers(region)} is replaced without its {leaf}, which sees all ranks of {spread.axis}"
        remedy = f"keep {leaf} and call it, or write an inner_target or a local_compute_fn"
        faults.append(Fault(replacing_path(name, overrides, context), f"[HP-REPLACE-002] {fact}", remedy))
    raise_faults(dict.fromkeys(faults))
    return {
        pattern: entry for pattern, entry in plan.items() if names_some(pattern, names) or not names_some(pattern, gone)
    }


def _found(
    pattern: str, inner_target: str | None, modules: Mapping[str, nn.Module], path: str
) -> tuple[list[str], list[Fault]]:
    """Names of modules that fit `pattern` and have an `inner_target`, where one is given; and the fault of none."""
    found = [name for name in modules if fnmatchcase(name, pattern)]
    if not found:
        near = ", ".join(near_names(pattern, modules)) or "none"
        return [], [Fault(f"{path}.match", f"{pattern!r} names no module of the model", f"near: {near}")]
    if inner_target is None:
        return found, []
    having = [name for name in found if f"{name}.{inner_target}" in modules]
    inner = of_all_layers(f"{found[0]}.{inner_target}")
    near = ", ".join(near_names(inner, modules)) or "none"
    return having, [] if having else [Fault(f"{path}.inner_target", f"there is no module {inner}", f"near: {near}")]


def _lacking(override: PlanOverride, plan: ShardingPlan, context: ReplacementContext) -> str | None:
    """What a run needs for `override` to change anything, and has not."""
    if not context.has(override.when):
        return override.when
    if not plan:
        return "tp, cp and ep, so without a plan"
    return "tp" if context.tp == 1 and not override.injects else None


class _Merge:
    """The entries that overrides write, one after the other."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        plan: ShardingPlan,
        context: ReplacementContext,
        wrappers: Mapping[str, Callable[..., Any]],
    ) -> None:
        self.modules, self.plan, self.context, self.wrappers = modules, plan, context, wrappers
        self.own: ShardingPlan = {}
        self.dispatched: dict[str, str] = {}
        """Modules that are to be given DTensors, and the path of the rule that says so."""

    def add(self, path: str, override: PlanOverride, name: str) -> None:
        """What `override`, which stands at `path`, writes of the module `name`.

        Raises:
            ConfigError: see `merged_plan`.
        """
        base = plan_of(name, self.plan)
        if override.region_dispatch and base is not None and base.local_map is not None:
            fact = f"True, but the model's plan computes {of_all_layers(name)} on local tensors in every mode"
            raise ConfigError.one(f"{path}.region_dispatch", fact, "write false")
        if override.region_dispatch is not None:
            self.dispatched.pop(name, None)
        if override.region_dispatch:
            self.dispatched[name] = path
        if (
            override.written_fields()
            or override.local_compute_fn
            or override.region_dispatch is False
            or name in self.own
        ):
            self.own[name] = self._region(path, override, name)
        if override.inner_wrapper is not None:
            inner = f"{name}.{override.inner_target}"
            self.own[inner] = self._inner(path, override, inner)

    def _region(self, path: str, override: PlanOverride, name: str) -> ShardingConfig:
        entry = self.own.get(name) or plan_of(name, self.plan)
        missing = [field for field in ("params", "in_src", "out_src") if getattr(override, field) is None]
        if entry is None and missing:
            fact = f"{of_all_layers(name)} has no derived boundary, and {', '.join(missing)} is not written"
            raise ConfigError.one(path, fact, "write params, in_src and out_src, {} or [] where there are none")
        entry = overridden(entry or ShardingConfig(), plan_of(name, self.plan), override, path)
        raise_faults(_unfit(path, override, entry, name, self.modules[name], self.context.tp))
        if override.local_compute_fn is not None:
            compute = InjectedCompute(
                factory=override.local_compute_fn, kind="local_compute", path=f"{path}.local_compute_fn"
            )
            return replace(entry, compute=compute, local_map=None if override.region_dispatch else LocalMap())
        if override.region_dispatch is None or (entry.compute is not None and entry.compute.kind == "inner_wrapper"):
            return entry
        return replace(entry, local_map=None if override.region_dispatch else entry.local_map or LocalMap())

    def undispatched(self) -> Iterator[Fault]:
        """Faults of modules that are to be given DTensors, and are inside of what is given local tensors."""
        for name, path in self.dispatched.items():
            for outer in with_outer(name):
                entry = self.own.get(outer) or plan_of(outer, self.plan)
                if entry is not None and entry.local_map is not None:
                    fact = f"True, but {of_all_layers(outer)} has local tensors in every mode, and so has what is below"
                    yield Fault(f"{path}.region_dispatch", fact, "write false")

    def _inner(self, path: str, override: PlanOverride, name: str) -> ShardingConfig:
        entry = self.own.get(name) or plan_of(name, self.plan)
        if entry is None and override.region_dispatch and self.context.tp > 1:
            fact = f"{of_all_layers(name)} has no boundary, by which its arguments become local tensors"
            remedy = "write one in a rule before, with match, params, in_src and out_src, or region_dispatch false"
            raise ConfigError.one(path, fact, remedy)
        entry = entry or ShardingConfig()
        factory = override.inner_wrapper
        if isinstance(factory, str):
            if factory not in self.wrappers:
                fact = f"{factory!r}, which the attention of this model has no use for"
                raise ConfigError.one(f"{path}.inner_wrapper", fact, did_you_mean(factory, self.wrappers))
            factory = Target.of(self.wrappers[factory])
        assert factory is not None
        out_src = entry.out_src
        if override.inner_out_src == "first_input":
            first = next(iter(entry.in_src), None)
            if first is None:
                raise ConfigError.one(
                    f"{path}.inner_out_src", f"first_input, but {of_all_layers(name)} has no in_src", "write {tp: ...}"
                )
            out_src = (entry.in_dst.get(first, entry.in_src[first]),)
        elif override.inner_out_src is not None:
            out_src = (_placement(override.inner_out_src["tp"], out_src[0] or {} if out_src else {}),)
        if override.inner_out_src is not None and entry.out_dst is not None and len(entry.out_dst) != 1:
            fact = f"is one output, but out_dst of {of_all_layers(name)} has {len(entry.out_dst)}"
            raise ConfigError.one(f"{path}.inner_out_src", fact, "write an out_dst of one, or none, in a rule before")
        compute = InjectedCompute(factory=factory, kind="inner_wrapper", path=f"{path}.inner_wrapper")
        return replace(entry, compute=compute, local_map=LocalMap(), out_src=out_src)


def overridden(entry: ShardingConfig, base: ShardingConfig | None, override: PlanOverride, path: str) -> ShardingConfig:
    """`entry` with the fields of a boundary that `override`, which stands at `path`, writes.

    Args:
        base: what the model's plan derives. None: nothing.

    Raises:
        ConfigError: auto where nothing is derived, or out_src and out_dst that do not go together.
    """
    faults: list[Fault] = []
    changes: dict[str, Any] = {}

    def read(field: str, written: Mapping[Any, str], before: Mapping[Any, NamedPlacement | None]) -> dict[Any, Any]:
        faults.extend(
            _nothing_derived(f"{path}.{field}.{key}")
            for key, word in written.items()
            if word == "auto" and key not in before
        )
        return {key: _placement(word, before.get(key)) for key, word in written.items()}

    for field, home in (MAPPED | LISTED).items():
        written, before = getattr(override, field), getattr(base or ShardingConfig(), home)
        if written == "auto":
            changes[home] = before
            faults += [_nothing_derived(f"{path}.{field}")] if base is None else []
        elif field in MAPPED and written is not None:
            placements = read(field, {} if written == "none" else written, before)
            changes[home] = {name: placement for name, placement in placements.items() if placement is not None}
        elif written is not None:
            placements = read(
                field, dict(enumerate(() if written == "none" else written)), dict(enumerate(before or ()))
            )
            changes[home] = tuple(placements.values())
    if override.tp_divide_attrs is not None:
        changes["sizes_per_rank"] = override.tp_divide_attrs
    raise_faults(faults)
    merged = _with_grads(replace(entry, **changes), base)
    if not merged.out_dst:
        return replace(merged, out_dst=None)
    if len(merged.out_src) != len(merged.out_dst):
        fact = f"{len(merged.out_dst)} outputs, and out_src has {len(merged.out_src)}"
        raise ConfigError.one(f"{path}.out_dst", fact, "write both, none where an output is left as it is")
    for i, (src, dst) in enumerate(zip(merged.out_src, merged.out_dst, strict=True)):
        if src is None and dst is not None:
            fact = "is to be turned into something, but out_src does not say how it lies"
            raise ConfigError.one(f"{path}.out_dst.{i}", fact, "write it there, or none here")
    return merged


def _unfit(
    path: str, override: PlanOverride, entry: ShardingConfig, name: str, module: nn.Module, tp: int
) -> Iterator[Fault]:
    """Faults of what `override` writes of `module`, which has other tensors or sizes; `entry` has it already."""
    where = of_all_layers(name)
    parameters = [leaf for leaf, _ in module.named_parameters(recurse=False)]
    arguments = list(inspect.signature(module.forward).parameters)
    for field in MAPPED:
        written = getattr(override, field)
        what, known = ("parameter", parameters) if field == "params" else ("argument of forward", arguments)
        for key, word in written.items() if isinstance(written, dict) else ():
            if key not in known:
                yield Fault(f"{path}.{field}.{key}", f"{where} has no such {what}", did_you_mean(key, known))
            elif field == "in_dst" and word != "none" and key not in entry.in_src:
                fact = f"{word}, but in_src does not say how it arrives"
                yield Fault(f"{path}.{field}.{key}", fact, "write it there, or none here")
    if override.params is not None and (missing := [leaf for leaf in parameters if leaf not in entry.state_shardings]):
        fact = f"{', '.join(missing)} of {where} is not in it"
        yield Fault(f"{path}.params", fact, "write how each parameter lies, replicate or shard(DIM)")
    sizes = {key: size for key, size in vars(module).items() if type(size) is int}
    for i, attribute in enumerate(override.tp_divide_attrs or ()):
        if sizes.get(attribute, 0) < 1:
            fact = f"{where}.{attribute} is {getattr(module, attribute, 'not there')}, and no count of features"
            yield Fault(f"{path}.tp_divide_attrs.{i}", fact, did_you_mean(attribute, sizes.keys() - {attribute}))
        elif sizes[attribute] % tp:
            fact = f"{where}.{attribute} is {sizes[attribute]}, which tp {tp} does not divide"
            yield Fault(f"{path}.tp_divide_attrs.{i}", fact, "leave it out, or choose another tp")


def _with_grads(entry: ShardingConfig, base: ShardingConfig | None) -> ShardingConfig:
    """`entry` with the gradients that fit what is written over axis tp: `base` derives those of its own placements.

    Of a tensor that is whole on each rank a rank has a summand of the gradient, where it makes a part of the output.
    """
    from torch.distributed.tensor import Partial

    summand: NamedPlacement = {MeshAxisName.TP: Partial()}
    made, derived_made = _made(entry), None if base is None else _made(base)
    if base is not None and made in (None, derived_made):
        in_grads = {name: grad for name, grad in base.in_grads.items() if _given(entry, name) == _given(base, name)}
        kept = {
            name for name, placement in entry.state_shardings.items() if base.state_shardings.get(name) == placement
        }
    else:
        # Layers within another, which sums for them, give parts of features: they are the ones without a derived part.
        sums = made == "summands" or (made == "parts" and base is not None)
        in_grads = {
            name: summand for name in entry.in_src if sums and MeshAxisName.TP not in (_given(entry, name) or {})
        }
        kept = set()
    state_grads = {
        name: summand
        for name, placement in entry.state_shardings.items()
        if name not in kept and made not in (None, "wholes") and MeshAxisName.TP not in placement
    }
    if base is not None:
        state_grads |= {name: grad for name, grad in base.state_grads.items() if name in kept}
    return replace(entry, in_grads=in_grads, state_grads=state_grads)


def _made(entry: ShardingConfig) -> Literal["summands", "parts", "wholes", None]:
    """What each rank of axis tp makes of the outputs. None: the plan does not say."""
    said = [out for out in entry.out_src if out is not None]
    divided = [out[MeshAxisName.TP] for out in said if MeshAxisName.TP in out]
    if divided:
        return "summands" if any(placement.is_partial() for placement in divided) else "parts"
    return "wholes" if said else None


def _given(entry: ShardingConfig, argument: str) -> NamedPlacement | None:
    """How forward is given it. None: as it comes."""
    return entry.in_dst.get(argument, entry.in_src.get(argument))


def _nothing_derived(path: str) -> Fault:
    return Fault(path, "auto, but the model's plan derives nothing for it", "write how it lies, or none")


def _placement(word: str, before: NamedPlacement | None) -> NamedPlacement | None:
    """What `word` says of a tensor, over axis tp; on other axes it stays as it was. None: it is left as it is."""
    from torch.distributed.tensor import Partial, Shard

    if word in ("auto", "none"):
        return before if word == "auto" else None
    others: NamedPlacement = {axis: placement for axis, placement in (before or {}).items() if axis != MeshAxisName.TP}
    match = PLACEMENTS.fullmatch(word)
    assert match is not None, "validated when it was read"
    if word == "replicate":
        return others
    return {**others, MeshAxisName.TP: Partial() if word == "partial" else Shard(int(match[1]))}
