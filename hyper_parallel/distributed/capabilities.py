"""Which features of a run go together. Every pair is refused here, or covered by a test that compares their loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from hyper_parallel.config.errors import Fault
from hyper_parallel.distributed.topology import Degrees


@dataclass(frozen=True, slots=True)
class Feature:
    """Something that a run may or may not use."""

    path: str
    """The field of TrainerConfig that switches it on."""
    is_on: Callable[[Any, Degrees], bool]
    """Whether a TrainerConfig uses it, with its degrees resolved."""


FEATURES: dict[str, Feature] = {
    "replicas": Feature("parallelism.dp_replicate", lambda c, d: d.dp_replicate > 1),
    "sharding": Feature("parallelism.dp_shard", lambda c, d: d.dp_shard > 1),
    "CPU offload": Feature("parallelism.cpu_offload", lambda c, d: c.parallelism.cpu_offload),
    "pipeline": Feature("parallelism.pp", lambda c, d: d.pp > 1),
    "context parallel": Feature("parallelism.cp", lambda c, d: d.cp > 1),
    "tensor parallel": Feature("parallelism.tp", lambda c, d: d.tp > 1),
    "sequence parallel": Feature("parallelism.sequence_parallel", lambda c, d: c.parallelism.sequence_parallel),
    "loss parallel": Feature("parallelism.loss_parallel", lambda c, d: c.parallelism.loss_parallel),
    "expert parallel": Feature("parallelism.ep", lambda c, d: c.parallelism.ep > 1),
    "validate mode": Feature("parallelism.mode", lambda c, d: c.parallelism.mode == "validate"),
    "full recompute": Feature("activation_checkpoint.mode", lambda c, d: c.activation_checkpoint.mode == "full"),
    "selective recompute": Feature(
        "activation_checkpoint.mode", lambda c, d: c.activation_checkpoint.mode == "selective"
    ),
    "memory budget": Feature(
        "activation_checkpoint.mode", lambda c, d: c.activation_checkpoint.mode == "memory_budget"
    ),
    "swap": Feature("activation_checkpoint.swap", lambda c, d: c.activation_checkpoint.swap),
    "compile": Feature("compile.enable", lambda c, d: c.compile.enable),
    "packed documents": Feature("dataloader.packing", lambda c, d: getattr(c.dataloader, "packing", "pad") != "pad"),
    "accumulation": Feature(
        "training.micro_batch_size",
        lambda c, d: c.training.global_batch_size > c.training.micro_batch_size * d.dp_replicate * d.dp_shard,
    ),
}
"""By name."""

REFUSED: dict[frozenset[str], str] = {
    frozenset({"compile", "validate mode"}): "a compiled graph runs without the boundaries that are to be compared",
    frozenset({"compile", "selective recompute"}): "which operators ran is not seen in a compiled graph: there, mode "
    "memory_budget chooses",
    frozenset({"memory budget", "validate mode"}): "it needs compile",
    frozenset({"swap", "validate mode"}): "what blocks save there are DTensors, which only shards of could be moved",
    **dict.fromkeys(
        map(frozenset, combinations(("full recompute", "selective recompute", "memory budget"), 2)),
        "a run has one mode",
    ),
}
"""Pairs that a run may not use together, and why. All other pairs are supported."""


def features_of(config: Any, degrees: Degrees) -> set[str]:
    """Names of the features that a TrainerConfig uses."""
    return {name for name, feature in FEATURES.items() if feature.is_on(config, degrees)}


def capability_faults(config: Any, degrees: Degrees) -> Iterator[Fault]:
    """A fault for each refused pair of features in a TrainerConfig."""
    for first, second in combinations(sorted(features_of(config, degrees)), 2):
        if reason := REFUSED.get(frozenset({first, second})):
            path, other = FEATURES[first].path, FEATURES[second].path
            yield Fault(path, f"{first} does not go with {second} ({other}): {reason}", "switch one of them off")


def capability_table() -> str:
    """The pairs as Markdown: `+` supported, `-` refused, with the reasons below."""
    names = list(FEATURES)
    lines = [f"| | {' | '.join(map(str, range(1, len(names))))} |", f"|---|{'---|' * (len(names) - 1)}"]
    for i, name in enumerate(names):
        cells = ["-" if frozenset({name, other}) in REFUSED else "+" for other in names[:i]]
        cells += [""] * (len(names) - 1 - len(cells))
        lines.append(f"| {i + 1} {name} (`{FEATURES[name].path}`) | {' | '.join(cells)} |")
    reasons = (f"- {' and '.join(sorted(pair))}: {reason}." for pair, reason in REFUSED.items())
    return "\n".join([*lines, "", "Refused:", "", *reasons])
