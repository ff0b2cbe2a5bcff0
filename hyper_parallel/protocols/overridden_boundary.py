"""What one override writes of the boundary of a module, in the place of what is derived."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from hyper_parallel.config.errors import ConfigError, Fault, did_you_mean, raise_faults
from hyper_parallel.protocols.boundary_grads import is_divided
from hyper_parallel.protocols.mesh import MeshAxisName
from hyper_parallel.protocols.module_names import of_all_layers
from hyper_parallel.protocols.sharding import NamedPlacement, ShardingConfig

if TYPE_CHECKING:
    from hyper_parallel.protocols.plan_override import PlanOverride

PLACEMENTS = re.compile(r"replicate|partial|shard\((\d+)\)")
"""Placements on axis tp as an override writes them."""
WORDS = re.compile(rf"{PLACEMENTS.pattern}|auto|none")
"""The same, or auto: as the model's plan derives it; or none: the tensor is left as it is, whatever that is."""
MAPPED = {"params": "state_shardings", "in_src": "in_src", "in_dst": "in_dst"}
"""Fields of an override by name of a tensor, and those of a ShardingConfig that they replace."""
LISTED = {"out_src": "out_src", "out_dst": "out_dst"}
"""The same by number of an output."""


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
        return {key: placement(word, before.get(key)) for key, word in written.items()}

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
    if "in_src" in changes and base is not None:
        # What stays where it is may be named or not. In validate mode it must be: it becomes a DTensor.
        changes["in_src"] = {name: src for name, src in base.in_src.items() if _stays(base, name)} | changes["in_src"]
    merged = replace(entry, **changes)
    faults += _impossible(path, merged)
    raise_faults(faults)
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


def _impossible(path: str, entry: ShardingConfig) -> Iterator[Fault]:
    """Faults of moves over axis tp that no collective does."""
    from hyper_parallel.protocols.boundary import placed
    from hyper_parallel.protocols.redistribute import collective

    outs = zip(entry.out_src, entry.out_dst or (), strict=False)
    moved: list[tuple[str, NamedPlacement | None, NamedPlacement | None]] = [
        *((f"in_dst.{name}", entry.in_src.get(name), dst) for name, dst in entry.in_dst.items()),
        *((f"out_dst.{i}", src, dst) for i, (src, dst) in enumerate(outs)),
    ]
    for field, src, dst in moved:
        if src is None or dst is None:
            continue
        before, after = placed(src, MeshAxisName.TP), placed(dst, MeshAxisName.TP)
        if before != after and collective(before, after) is None:
            yield Fault(f"{path}.{field}", f"{before!r} cannot become {after!r}", "go by replicate, or leave it")


def _stays(base: ShardingConfig, argument: str) -> bool:
    """Whether `base` has it whole on each rank of axis tp, with its gradient."""
    return not any(is_divided(each.get(argument)) for each in (base.in_src, base.in_dst, base.in_grads))


def unfit(
    path: str, override: PlanOverride, entry: ShardingConfig, name: str, module: nn.Module, tp: int
) -> Iterator[Fault]:
    """Faults of what `override` writes of `module`, which has other tensors or sizes; `entry` has it already."""
    where = of_all_layers(name)
    parameters = [leaf for leaf, _ in module.named_parameters(recurse=False)]
    signature = inspect.signature(module.forward).parameters.values()
    arguments = [p.name for p in signature if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    for field in MAPPED:
        written = getattr(override, field)
        what, known = ("parameter", parameters) if field == "params" else ("argument of forward", arguments)
        for key, word in written.items() if isinstance(written, dict) else ():
            if key not in known:
                yield Fault(f"{path}.{field}.{key}", f"{where} has no such {what}", did_you_mean(key, known))
            elif field == "in_dst" and word != "none" and key not in entry.in_src:
                fact = f"{word}, but in_src does not say how it arrives"
                yield Fault(f"{path}.{field}.{key}", fact, "write it there, or none here")
            elif field == "params" and (match := PLACEMENTS.fullmatch(word)) and match[1]:
                shape = tuple(module.get_parameter(key).shape)
                if int(match[1]) >= len(shape) or shape[int(match[1])] % tp:
                    fact = f"{word}, which tp {tp} cannot make of {where}.{key} with its shape {shape}"
                    yield Fault(f"{path}.{field}.{key}", fact, "name a dim that tp divides, or replicate")
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


def _nothing_derived(path: str) -> Fault:
    return Fault(path, "auto, but the model's plan derives nothing for it", "write how it lies, or none")


def placement(word: str, before: NamedPlacement | None) -> NamedPlacement | None:
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
