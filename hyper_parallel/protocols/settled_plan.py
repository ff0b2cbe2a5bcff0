"""The boundaries that overrides have written, once all of them are: what follows from the whole, and what cannot be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from hyper_parallel.config.errors import ConfigError, Fault
from hyper_parallel.protocols.boundary_grads import divides, given, is_divided, is_given_parts, with_grads
from hyper_parallel.protocols.mesh import MeshAxisName
from hyper_parallel.protocols.module_names import of_all_layers, with_outer
from hyper_parallel.protocols.sharding import LocalMap, NamedPlacement, ShardingConfig, ShardingPlan, plan_of


class Settling:
    """Modules whose boundaries are written, and those that they are in: its gradients depend on what is in a region."""

    def __init__(self, modules: Iterable[str], plan: ShardingPlan, own: ShardingPlan) -> None:
        """
        Args:
            modules: names of all of the model.
            plan: what the model derives.
            own: what is written, by the name of the module.
        """
        self.modules, self.plan, self.own = tuple(modules), plan, dict(own)

    def faults(self, paths: Mapping[str, str], output_matrix: str | None) -> Iterator[Fault]:
        """Gives `own` the gradients that fit the whole of it, and tells what does not go together.

        Args:
            paths: of the last rule that writes the boundary of a module, by its name.
            output_matrix: the module whose weight a loss reads as `plan` lays it out.
        """
        settled: ShardingPlan = {}
        outer_paths = {outer: path for inner, path in paths.items() for outer in with_outer(inner)}
        for name, path in (outer_paths | dict(paths)).items():
            entry, base = self._written(name), self._derived(name)
            if entry is None:
                continue
            if name == output_matrix and base is not None and entry.state_shardings != base.state_shardings:
                fact = f"those of {name} are written, but a loss reads its weight as the model's plan lays it out"
                yield Fault(f"{path}.params", fact, "leave them out")
            dividing, base_dividing = self._dividing(name, self._written), self._dividing(name, self._derived)
            if base is not None and base_dividing and dividing:
                yield from _unsummed(path, name, entry, base, dividing, base_dividing)
            yield from self._misfits(path, name, base_dividing - dividing)
            within = [each for inner in self._within(name) if (each := self._written(inner)) is not None]
            try:
                entry = _computed(entry, base, name, path, within)
            except ConfigError as error:
                yield from error.faults
                continue
            entry = with_grads(entry, base, dividing, base_dividing)
            if name in self.own or entry != base:
                settled[name] = entry
        self.own |= settled

    def _misfits(self, path: str, name: str, whole: set[str]) -> Iterator[Fault]:
        """Faults of modules within `name` that the plan gives parts, where some of `whole` now hand on wholes."""
        handing = [each for each in sorted(whole) if not _hands_on_parts(self.own.get(each))]
        cuts = any(each in self.own and each != name and _cuts(self.own[each]) for each in self._within(name))
        if not handing or cuts:
            return
        leaves = ", ".join(each.rpartition(".")[2] for each in handing)
        for each in self._within(name):
            entry = self._derived(each)
            if each not in self.own and entry is not None and is_given_parts(entry):
                fact = (
                    f"each rank now has the whole of what {leaves} make, and {of_all_layers(each)} takes a part of it"
                )
                yield Fault(path, fact, "write the boundary of that, too, or an out_dst of theirs")

    def _written(self, name: str) -> ShardingConfig | None:
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


def _unsummed(
    path: str, name: str, entry: ShardingConfig, base: ShardingConfig, dividing: set[str], base_dividing: set[str]
) -> Iterator[Fault]:
    """Faults of gradients that the model's plan sums at the boundary of `name`, and that cannot be any more."""

    def leaves(names: set[str]) -> str:
        return ", ".join(each.rpartition(".")[2] for each in sorted(names))

    where = of_all_layers(name)
    if entry.compute is None and (whole := base_dividing - dividing):
        fact = f"within {where} each rank computes a part of {leaves(dividing)}, and the whole of {leaves(whole)}"
        fact += ", but the gradient of what all are given is summed over tp"
        yield Fault(path, fact, "divide all of them, or none")
    for argument, grad in base.in_grads.items():
        if is_divided(grad) and argument not in entry.in_src:
            fact = f"{argument} of {where} is not named, but each rank computes a part of {leaves(base_dividing)}, so "
            yield Fault(f"{path}.in_src", f"{fact}its gradient must be summed", f"write {argument}: replicate")


def _hands_on_parts(entry: ShardingConfig | None) -> bool:
    """Whether `entry` says that what comes behind the module is divided over tp. None says nothing."""
    return entry is None or any(map(is_divided, entry.out_dst or entry.out_src))


def _cuts(entry: ShardingConfig) -> bool:
    """Whether `entry` is given wholes, and what comes behind it is divided over tp."""
    return _hands_on_parts(entry) and not is_given_parts(entry)


def _computed(
    entry: ShardingConfig, base: ShardingConfig | None, name: str, path: str, within: Iterable[ShardingConfig]
) -> ShardingConfig:
    """`entry` of the module `name` once all is written: computed over tp as derived only if it lies as derived.

    Args:
        within: the entries of the module and of those within it.

    Raises:
        ConfigError: a function of the plan's computes the module from tensors that lie otherwise; or its output is
            said to be a sum over the ranks, and nothing is divided over them.
    """
    where = of_all_layers(name)
    says_partial = any(out is not None and _is_partial(out) for out in entry.out_src)
    if says_partial and entry.compute is None and not any(map(_divides_any, within)):
        fact = f"partial, but no parameter or argument of {where} is divided over tp: each rank makes the whole"
        raise ConfigError.one(f"{path}.out_src", fact, "write replicate, or how what it is made of lies")
    spread = None if base is None else base.local_map
    if spread is None or spread.forward is None or spread.axis != MeshAxisName.TP or entry.compute is not None:
        return entry
    assert base is not None
    if _tp_parts(entry) == _tp_parts(base):
        return entry
    if _divides_any(entry) or any(map(is_divided, entry.out_src)):
        function = getattr(spread.forward, "func", spread.forward).__name__
        fact = f"of {where} is written, which tp computes by {function} from what lies as the model's plan has it"
        remedy = "write replicate for each parameter, argument and output, or a local_compute_fn"
        raise ConfigError.one(path, f"the boundary {fact}", remedy)
    return replace(entry, local_map=LocalMap())  # its own forward, on each rank


def _is_partial(placement: NamedPlacement) -> bool:
    return is_divided(placement) and bool(placement[MeshAxisName.TP].is_partial())


def _divides_any(entry: ShardingConfig) -> bool:
    return is_given_parts(entry) or any(map(is_divided, entry.state_shardings.values()))


def _tp_parts(entry: ShardingConfig) -> tuple[Any, ...]:
    """How what it is made of and what it makes lies over tp."""

    def over_tp(placement: NamedPlacement | None) -> Any:
        return (placement or {}).get(MeshAxisName.TP)

    states = {name: over_tp(placement) for name, placement in entry.state_shardings.items()}
    given_as = {name: part for name in entry.in_src if (part := over_tp(given(entry, name))) is not None}
    return states, given_as, [over_tp(out) for out in entry.out_src]
