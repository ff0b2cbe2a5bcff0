"""What plan_overrides write into the sharding plan that a model has derived for a run."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from hyper_parallel.config.errors import Fault, raise_faults
from hyper_parallel.protocols.mesh import MeshAxisName
from hyper_parallel.protocols.module_replacement import near_names
from hyper_parallel.protocols.sharding import NamedPlacement, ShardingConfig, ShardingPlan

if TYPE_CHECKING:
    from hyper_parallel.protocols.plan_override import PlanOverride

logger = logging.getLogger(__name__)

WORDS = re.compile(r"replicate|partial|shard\((\d+)\)|auto")
"""Placements on axis tp as an override writes them. auto: as the plan has it."""
MAPPED = {"params": "state_shardings", "in_src": "in_src", "in_dst": "in_dst"}
"""Fields of an override by name of a tensor, and those of a ShardingConfig that they replace."""
LISTED = ("out_src", "out_dst")
"""Fields by number of an output."""


def merged_plan(
    names: Sequence[str], plan: ShardingPlan, overrides: Sequence[PlanOverride], degrees: Mapping[str, int]
) -> ShardingPlan:
    """`plan` with the boundaries that overrides write: a field that one writes replaces the derived field, others stay.

    Of several overrides of one module the later one wins, field by field.

    Args:
        names: of all modules of the model.
        degrees: of parallelism, by axis.

    Raises:
        ConfigError: a pattern names no module, or a module without a derived boundary of which not all is written.
    """
    own: ShardingPlan = {}
    faults: list[Fault] = []
    for i, override in enumerate(overrides):
        path = f"plan_overrides.{i}"
        if not override.written_fields():
            continue
        axis = override.when or "tp"
        if not plan or degrees[axis] == 1 or degrees["tp"] == 1:
            logger.info("%s is left out: the run has no %s, so no plan", path, axis if degrees[axis] == 1 else "tp")
            continue
        for pattern in override.patterns():
            found = [name for name in names if fnmatchcase(name, pattern)]
            if not found:
                near = ", ".join(near_names(pattern, names)) or "none"
                faults.append(Fault(f"{path}.match", f"{pattern!r} names no module of the model", f"near: {near}"))
            for name in found:
                base = own.get(name) or derived(name, plan)
                missing = [field for field in ("params", "in_src", "out_src") if getattr(override, field) is None]
                if base is None and missing:
                    fact = f"{name} has no derived boundary, and {', '.join(missing)} is not written"
                    faults.append(Fault(path, fact, "write params, in_src and out_src, {} or [] where there are none"))
                    continue
                own[name] = overridden(base or ShardingConfig(), override)
    raise_faults(faults)
    # The first entry that fits a module is its own.
    return {**own, **{pattern: boundary for pattern, boundary in plan.items() if pattern not in own}}


def derived(name: str, plan: ShardingPlan) -> ShardingConfig | None:
    """The entry of a plan for the module `name`. None: it has none."""
    from hyper_parallel.protocols.module import plan_of

    return plan_of(name, plan)


def overridden(base: ShardingConfig, override: PlanOverride) -> ShardingConfig:
    """`base` with the fields that `override` writes."""
    changes: dict[str, Any] = {}
    for field, home in MAPPED.items():
        if (written := getattr(override, field)) is not None:
            before: dict[str, NamedPlacement] = getattr(base, home)
            changes[home] = {name: _placement(word, before.get(name, {})) for name, word in written.items()}
    for field in LISTED:
        if (written := getattr(override, field)) is not None:
            before_all: tuple[NamedPlacement, ...] = getattr(base, field) or ()
            changes[field] = tuple(_placement(word, before) for word, before in _aligned(written, before_all))
    if override.tp_divide_attrs is not None:
        changes["sizes_per_rank"] = override.tp_divide_attrs
    return replace(base, **changes)


def _placement(word: str, before: NamedPlacement) -> NamedPlacement:
    from torch.distributed.tensor import Partial, Shard

    if word == "auto":
        return before
    others: NamedPlacement = {axis: placement for axis, placement in before.items() if axis != MeshAxisName.TP}
    match = WORDS.fullmatch(word)
    assert match is not None, "validated when it was read"
    if word == "replicate":
        return others
    return {**others, MeshAxisName.TP: Partial() if word == "partial" else Shard(int(match[1]))}


def _aligned(words: Sequence[str], before: Sequence[NamedPlacement]) -> Iterable[tuple[str, NamedPlacement]]:
    return ((word, before[i] if i < len(before) else {}) for i, word in enumerate(words))
