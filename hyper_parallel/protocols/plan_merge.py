"""What plan_overrides write into the sharding plan that a model has derived for a run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import nn

from hyper_parallel.config.errors import ConfigError, Fault, did_you_mean, raise_faults
from hyper_parallel.config.target import Target
from hyper_parallel.protocols.boundary_grads import divides, is_divided, with_grads
from hyper_parallel.protocols.injected_compute import InjectedCompute
from hyper_parallel.protocols.module_names import matching, near_names, of_all_layers, with_outer
from hyper_parallel.protocols.module_replacement import ReplacementContext, replacing_path
from hyper_parallel.protocols.overridden_boundary import overridden, placement, settled, unfit
from hyper_parallel.protocols.sharding import (
    LocalMap,
    ShardingConfig,
    ShardingPlan,
    names_some,
    plan_of,
)

if TYPE_CHECKING:
    from hyper_parallel.protocols.plan_override import PlanOverride

logger = logging.getLogger(__name__)


def merged_plan(
    modules: Mapping[str, nn.Module],
    plan: ShardingPlan,
    overrides: Sequence[PlanOverride],
    context: ReplacementContext,
    wrappers: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
    output_matrix: str | None = None,
) -> ShardingPlan:
    """`plan` with what overrides write: a field that one writes replaces the derived field, others stay.

    Of several overrides of one module the later one wins, field by field.

    Args:
        modules: all of the model, by name.
        wrappers: what the model has for `inner_wrapper`, by name.
        output_matrix: the module whose weight a loss reads as `plan` lays it out. None: there is none.

    Raises:
        ConfigError: a pattern or inner_target names no module, a module without a derived boundary of which not all is
            written, or fields that do not go together or with the module.
    """
    merge = _Merge(modules, plan, context, wrappers, output_matrix)
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
    faults += merge.settle()
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
    found, absent = matching(pattern, modules, f"{path}.match")
    if absent or inner_target is None:
        return found, absent
    having = [name for name in found if f"{name}.{inner_target}" in modules]
    inner = of_all_layers(f"{found[0]}.{inner_target}")
    fact = f"there is no module {inner}"
    return having, [] if having else [Fault(f"{path}.inner_target", fact, near_names(inner, modules))]


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
        output_matrix: str | None,
    ) -> None:
        self.modules, self.plan, self.context, self.wrappers = modules, plan, context, wrappers
        self.output_matrix = output_matrix
        self.own: ShardingPlan = {}
        self.dispatched: dict[str, str] = {}
        """Modules that are to be given DTensors, and the path of the rule that says so."""
        self.paths: dict[str, str] = {}
        """Modules whose boundaries are written, and the path of the last rule that does."""

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
        if override.written_fields():
            self.paths[name] = path
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
        raise_faults(unfit(path, override, entry, name, self.modules[name], self.context.tp))
        if override.local_compute_fn is not None:
            compute = InjectedCompute(
                factory=override.local_compute_fn, kind="local_compute", path=f"{path}.local_compute_fn"
            )
            return replace(entry, compute=compute, local_map=None if override.region_dispatch else LocalMap())
        if override.region_dispatch is None or (entry.compute is not None and entry.compute.kind == "inner_wrapper"):
            return entry
        return replace(entry, local_map=None if override.region_dispatch else entry.local_map or LocalMap())

    def settle(self) -> Iterator[Fault]:
        """Gives all that is written the gradients that fit the whole of it; and tells what does not go together."""
        made: dict[str, ShardingConfig] = {}
        for name, path in {outer: path for inner, path in self.paths.items() for outer in with_outer(inner)}.items():
            entry, base = self._entry(name), plan_of(name, self.plan)
            if entry is None:
                continue
            path = self.paths.get(name, path)
            if name == self.output_matrix and base is not None and entry.state_shardings != base.state_shardings:
                fact = f"of {name} are written, but a loss reads its weight as the model's plan lays it out"
                yield Fault(f"{path}.params", f"those {fact}", "leave them out")
            dividing, base_dividing = self._dividing(name, self._entry), self._dividing(name, self._derived)
            yield from self._unsummed(path, name, entry, base, dividing, base_dividing)
            within = [each for inner in self._within(name) if (each := self._entry(inner)) is not None]
            try:
                made[name] = settled(entry, base, name, path, within=within)
            except ConfigError as error:
                yield from error.faults
                continue
            made[name] = with_grads(made[name], base, dividing, base_dividing)
        self.own |= {name: entry for name, entry in made.items() if name in self.own or entry != self._entry(name)}

    def _unsummed(
        self,
        path: str,
        name: str,
        entry: ShardingConfig,
        base: ShardingConfig | None,
        dividing: set[str],
        base_dividing: set[str],
    ) -> Iterator[Fault]:
        """Faults of gradients that the model's plan sums at the boundary of `name`, and that cannot be any more."""
        if base is None or not (base_dividing and dividing):
            return
        where, leaves = of_all_layers(name), {each: each.rpartition(".")[2] for each in sorted(base_dividing)}
        if not dividing >= base_dividing:
            some, others = (
                ", ".join(leaves[each] for each in names)
                for names in (sorted(dividing), sorted(base_dividing - dividing))
            )
            fact = (
                f"within {where} each rank computes a part of {some}, and the whole of {others}, but the gradient of "
            )
            yield Fault(path, f"{fact}what all are given is summed over tp", "divide all of them, or none")
        for argument, grad in base.in_grads.items():
            if is_divided(grad) and argument not in entry.in_src:
                fact = (
                    f"{argument} of {where} is not named, but each rank computes a part of {', '.join(leaves.values())}"
                )
                yield Fault(f"{path}.in_src", f"{fact}, so its gradient must be summed", f"write {argument}: replicate")

    def _entry(self, name: str) -> ShardingConfig | None:
        return self.own.get(name) or plan_of(name, self.plan)

    def _derived(self, name: str) -> ShardingConfig | None:
        return plan_of(name, self.plan)

    def _within(self, name: str) -> Iterator[str]:
        """Names of the module and of those within it."""
        return (each for each in self.modules if each == name or each.startswith(f"{name}."))

    def _dividing(self, name: str, entry_of: Callable[[str], ShardingConfig | None]) -> set[str]:
        """Modules within `name`, or it, that leave it to its boundary to sum the gradients of what they are given."""
        found = set()
        for each in self._within(name):
            entry = entry_of(each)
            between = with_outer(each)[len(with_outer(name)) :]
            sums = any(base is not None and base.in_grads for base in map(self._derived, between))
            if entry is not None and divides(entry) and not sums:
                found.add(each)
        return found

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
            out_src = (placement(override.inner_out_src["tp"], out_src[0] or {} if out_src else {}),)
        if override.inner_out_src is not None and entry.out_dst is not None and len(entry.out_dst) != 1:
            fact = f"is one output, but out_dst of {of_all_layers(name)} has {len(entry.out_dst)}"
            raise ConfigError.one(f"{path}.inner_out_src", fact, "write an out_dst of one, or none, in a rule before")
        compute = InjectedCompute(factory=factory, kind="inner_wrapper", path=f"{path}.inner_wrapper")
        return replace(entry, compute=compute, local_map=LocalMap(), out_src=out_src)
