"""What collectives move: counted by kind and mesh axis, as they are called."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from hyper_parallel.config.errors import RunError

KINDS = {
    "_allgather_base_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
    "alltoall_base_": "all-to-all",
    "all_to_all_single": "all-to-all",
    "broadcast_": "broadcast",
    "send": "send/recv",
}
"""By the operator's name, of plain and of functional collectives."""
_MOVE_NOTHING = ("recv_", "barrier", "wait_tensor")


class Flow(NamedTuple):
    """One kind of collective over the ranks of one mesh axis."""

    kind: str
    """One of KINDS."""
    axis: str
    """As the mesh calls it; "world": all ranks."""


@dataclass(slots=True)
class Moved:
    """What went through a flow."""

    calls: int = 0
    """Collectives; of send/recv the sends."""
    sent_bytes: int = 0
    """What this rank sends to others, by the ring algorithms: of n ranks, an all-gather to a whole of s bytes, or a
    reduce-scatter of s, sends s (n - 1) / n, an all-reduce of s twice that, an all-to-all all but the rank's own."""


class UnknownCollectiveError(RunError):
    """A collective whose traffic cannot be counted."""


class Traffic(TorchDispatchMode):
    """Counts, while it is entered, what this rank's collectives move.

    Raises:
        UnknownCollectiveError: a collective is called that KINDS lacks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flows: dict[Flow, Moved] = defaultdict(Moved)
        """What has been moved so far."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # its collectives come here by themselves
        if func.namespace in ("c10d", "_c10d_functional"):
            names = (argument.name for argument in func._schema.arguments)
            self._count(func._opname, dict(zip(names, args, strict=False)) | (kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _count(self, operator: str, arguments: dict[str, Any]) -> None:
        if operator in _MOVE_NOTHING:
            return
        if operator not in KINDS:
            raise UnknownCollectiveError(
                f"nobody has said what the collective {operator} moves; add it to {__name__}.KINDS"
            )
        kind, group = KINDS[operator], _group(arguments)
        ranks = dist.get_world_size(group)
        source = next(arguments[name] for name in ("input_tensor", "input", "tensors") if name in arguments)
        size = sum(t.numel() * t.element_size() for t in ([source] if isinstance(source, torch.Tensor) else source))
        moved = self.flows[Flow(kind, _axis(group))]
        moved.calls += 1
        match kind:
            case "all-gather":
                moved.sent_bytes += size * (ranks - 1)
            case "reduce-scatter":
                moved.sent_bytes += size * (ranks - 1) // ranks
            case "all-reduce":
                moved.sent_bytes += 2 * size * (ranks - 1) // ranks
            case "all-to-all":
                parts = arguments["input_split_sizes"] or [1] * ranks
                moved.sent_bytes += size - size * parts[dist.get_rank(group)] // max(sum(parts), 1)
            case _:
                moved.sent_bytes += size


def _group(arguments: dict[str, Any]) -> dist.ProcessGroup:
    if "process_group" in arguments:
        return dist.ProcessGroup.unbox(arguments["process_group"])
    return dist.distributed_c10d._resolve_process_group(arguments["group_name"])


def _axis(group: dist.ProcessGroup) -> str:
    return "world" if group == dist.group.WORLD else group.group_desc.removeprefix("mesh_")
