"""Modules of the user's in the place of a model's own, with the same parameters under the same names."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from hyper_parallel.config.errors import Fault, raise_faults
from hyper_parallel.config.target import Target
from hyper_parallel.protocols.module import hand_on_declarations
from hyper_parallel.protocols.module_names import matching, with_outer
from hyper_parallel.protocols.override_factories import FactoryT, marked, takes_any

if TYPE_CHECKING:
    from hyper_parallel.protocols.plan_override import PlanOverride

logger = logging.getLogger(__name__)

When = Literal["cp", "ep", "low_precision"]
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplacementContext:
    """What a factory is told of the run."""

    tp: int = 1
    cp: int = 1
    ep: int = 1
    pp: int = 1
    mode: Literal["production", "validate"] = "production"
    """parallelism.mode: under validate modules that the plan does not compute locally are given DTensors."""
    low_precision: bool = False
    """Whether forward and backward passes are computed in bfloat16."""

    def has(self, when: When | None) -> bool:
        """Whether a rule for runs with `when` is for this one. None: for every run."""
        if when is None or when == "low_precision":
            return when is None or self.low_precision
        return bool(getattr(self, when) > 1)


def module_replacement(factory: FactoryT) -> FactoryT:
    """Marks a function or class as a factory of modules: ``factory(module, module_fqn, context) -> nn.Module``.

    It may have more arguments, which the override configures. What it makes must hold the very parameters and buffers
    of `module` under their names.

    Raises:
        TypeError: the signature is another one.
    """
    return marked(factory, "module_replacement")


def replace_modules(
    model: nn.Module, overrides: Sequence[PlanOverride], context: ReplacementContext
) -> dict[str, tuple[str, str]]:
    """Puts what `overrides` make in the place of modules of `model`: all of them, or none.

    Returns:
        By the name of each replaced module, the class that it had and the one that it has.

    Raises:
        ConfigError: HP-REPLACE-001, a pattern finds no module, or one of another class, or one that is replaced
            already; HP-REPLACE-002, what was made does not hold what the module held, or is called otherwise.
    """
    chosen = dict(_chosen(model, overrides, context))
    made: dict[int, nn.Module] = {}
    faults: list[Fault] = []
    for name, (path, override) in chosen.items():
        old = model.get_submodule(name)
        if id(old) in made:
            continue  # the same module under another name
        assert override.replace_module is not None
        new: Any = override.replace_module.build(module=old, module_fqn=name, context=context)
        faults += (
            _fault(f"{path}.replace_module", 2, f"{name}: {fact}", remedy) for fact, remedy in _differences(old, new)
        )
        made[id(old)] = new
    raise_faults(faults)
    for name in chosen:
        hand_on_declarations(model.get_submodule(name), made[id(model.get_submodule(name))])
    replaced = {}
    for name in chosen:
        parent, _, leaf = name.rpartition(".")
        old = model.get_submodule(name)
        new = made[id(old)]
        setattr(model.get_submodule(parent), leaf, new)
        replaced[name] = (type(old).__name__, type(new).__name__)
    for override in overrides:
        count = sum(own is override for _, own in chosen.values())
        if count and isinstance(override.replace_module, Target):
            logger.info("%d modules %s replaced by %s", count, override.match, override.replace_module.target_path)
    return replaced


def replacing_path(name: str, overrides: Sequence[PlanOverride], context: ReplacementContext) -> str:
    """That of the replace_module by which the module `name`, or one that it is in, is replaced."""
    outer = with_outer(name)
    return next(
        f"plan_overrides.{i}.replace_module"
        for i, override in enumerate(overrides)
        if override.replace_module is not None and context.has(override.when)
        if any(fnmatchcase(each, pattern) for each in outer for pattern in override.patterns())
    )


def _chosen(
    model: nn.Module, overrides: Sequence[PlanOverride], context: ReplacementContext
) -> Iterator[tuple[str, tuple[str, PlanOverride]]]:
    """(name of a module, (path of its override, its override)); an alias of a module is one more name."""
    modules = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    owners: dict[int, tuple[str, str]] = {}
    faults: list[Fault] = []
    found: list[tuple[str, tuple[str, PlanOverride]]] = []
    for i, override in enumerate(overrides):
        path = f"plan_overrides.{i}"
        if override.replace_module is None:
            continue
        is_left_out = not context.has(override.when)
        if is_left_out:
            logger.info("%s is left out: the run is without %s", path, override.when)
        kind = override.replaced_type()
        for pattern in override.patterns():
            names, absent = matching(pattern, modules, f"{path}.match")
            faults += absent
            for name in () if is_left_out else names:
                module = modules[name]
                if not (type(module) is kind if override.exact_type else isinstance(module, kind)):
                    wanted = f"{'exactly ' * override.exact_type}a {kind.__qualname__}"
                    fact = f"{name} is a {type(module).__qualname__}, not {wanted}"
                    faults.append(_fault(f"{path}.module_type", 1, fact, "give its class, or a narrower match"))
                    continue
                owner = owners.setdefault(id(module), (path, name))
                if owner[0] != path:
                    fact = f"{name} is replaced by {owner[0]} already"
                    faults.append(_fault(f"{path}.match", 1, fact, "let one override name it"))
                found.append((name, (path, override)))
    named = {name for name, _ in found}
    for name, (path, _) in found:
        aliases = [other for other, module in modules.items() if module is modules[name] and other not in named]
        if aliases:
            fact = f"{name} is also {', '.join(aliases)}, which is not named"
            faults.append(_fault(f"{path}.match", 1, fact, "name all names of the module"))
        outer = next((other for other, _ in found if name.startswith(f"{other}.")), None)
        if outer is not None:
            fact = f"{name} is inside {outer}, which is replaced too"
            faults.append(_fault(f"{path}.match", 1, fact, "replace one of the two"))
    raise_faults(dict.fromkeys(faults))
    yield from found


def _differences(old: nn.Module, new: Any) -> Iterator[tuple[str, str]]:
    """(fact, remedy) of each thing that `new` has otherwise than `old`."""
    if not isinstance(new, nn.Module):
        yield f"the factory made a {type(new).__name__}, not a torch.nn.Module", "return a module"
        return
    if new is old:
        yield "the factory returned the module itself", "return another one, or leave the override out"
        return
    if new.training != old.training:
        yield f"training is {new.training}, and was {old.training}", "end the factory with new.train(module.training)"
    for what, get in (("parameter", nn.Module.named_parameters), ("buffer", nn.Module.named_buffers)):
        before, after = dict(get(old)), dict(get(new))
        for name in sorted(before.keys() ^ after.keys()):
            fact = f"{what} {name} is {'missing' if name in before else 'new'}"
            yield fact, "register the module's own parameters and buffers under their names"
        for name in sorted(before.keys() & after.keys()):
            if before[name] is not after[name]:
                yield f"{what} {name} is another tensor", f"register the module's own: new.{name} = module.{name}"
    if (before_keys := set(old.state_dict())) != (after_keys := set(new.state_dict())):
        differing = ", ".join(sorted(before_keys ^ after_keys))
        yield f"its state_dict differs in {differing}", "keep persistent what was, and nothing else"
    if _set_forward(new) not in (None, _set_forward(old)):
        fact = "its forward is set on the instance, where parallelism puts its own"
        yield fact, "define it in the class"
    called, calls = inspect.signature(old.forward), inspect.signature(new.forward)
    (took, takes), is_open = (_arguments(called), _arguments(calls)), takes_any(calls)
    if takes != (took[: len(takes)] if is_open else took) or (takes_any(called) and not is_open):
        yield (
            f"forward takes {', '.join(takes)}, and took {', '.join(took)}",
            "take the same, or the first and **kwargs",
        )
    kept = {id(module) for module in new.modules()}
    for name, module in old.named_modules():
        if id(module) not in kept and any(getattr(module, hooks) for hooks in _HOOKS):
            yield f"{name or 'it'} has hooks, which would be lost", "keep that module inside of the new one"


def _set_forward(module: nn.Module) -> Any:
    """The function that `module` itself has as forward, in the place of its class's. None: it has none."""
    forward = vars(module).get("forward")
    return getattr(forward, "__func__", forward)


def _arguments(signature: inspect.Signature) -> list[str]:
    return [p.name for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]


def _fault(path: str, number: int, fact: str, remedy: str) -> Fault:
    return Fault(path, f"[HP-REPLACE-{number:03d}] {fact}", remedy)
