"""Says what a run would do on its ranks, without them: the mesh, the plan, and what each step moves.

    python -m hyper_parallel.explain --model_spec qwen3_moe:30b_a3b --parallelism.tp 4 --world_size 64

Doors and flags are those of `hyper_parallel.train`; `--world_size` is the number of ranks, as few as the degrees of
parallelism ask for by default. A step is run on tensors without memory, so that it takes seconds, whatever the size.

Exit codes: 0 explained; 2 a configuration that cannot train (one line per fault); 1 any other error.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from hyper_parallel.platform.environment import prepare_environment

if TYPE_CHECKING:
    from hyper_parallel.distributed.traffic import Flow, Moved
    from hyper_parallel.protocols.sharding import ShardingPlan
    from hyper_parallel.trainer.config import TrainerConfig
    from hyper_parallel.trainer.rehearsal import Rehearsal

Row = tuple[Any, ...]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints what `argv` (default: this process's command line) asks for; returns the exit code."""
    prepare_environment()
    # Only now, since all that follows loads torch.
    from hyper_parallel.config import manager
    from hyper_parallel.distributed.last_words import run_tool
    from hyper_parallel.trainer.hyper_trainer import HyperTrainer

    parser = argparse.ArgumentParser(prog="hyper_parallel.explain", add_help=False, allow_abbrev=False)
    parser.add_argument("--world_size", type=int)
    options, words = parser.parse_known_args(argv)
    if options.world_size is not None and options.world_size < 1:
        parser.error(f"argument --world_size: {options.world_size} is below 1")

    def run() -> int:
        config = manager.load(HyperTrainer.Config, words, world_size=options.world_size, prog="hyper_parallel.explain")
        print(explanation(config, options.world_size or config.parallelism.smallest_world_size()))
        return 0

    return run_tool(run)


def explanation(config: TrainerConfig, world_size: int) -> str:
    """What a run of `config` on `world_size` ranks does, as text. One rank of each pipeline stage is rehearsed."""
    from hyper_parallel.trainer.rehearsal import Rehearsal, fake_world

    stages: list[Row] = []
    units: Counter[Row] = Counter()
    parameters: Counter[Row] = Counter()
    replaced: Counter[Row] = Counter()
    traffic: list[Row] = []
    copied: tuple[str, ...] = ()
    pp = config.parallelism.pp
    for pp_rank in reversed(range(pp)):  # the last one knows what is copied
        rank = pp_rank * world_size // pp
        with fake_world(rank, world_size):
            run = Rehearsal(config, copied)
            copied = copied or run.model_parts[-1].copied_parameters
            mesh = list(_mesh_rows(run))
            axes = {name for name, size, _ in mesh if size > 1}
            boundaries = list(dict.fromkeys(_boundary_rows(run.model_config.sharding, axes)))
            stages[:0] = _stage_rows(run, rank)
            units.update(_unit_rows(run))
            parameters.update(_parameter_rows(run))
            if pp_rank == pp - 1:  # the whole model is constructed on each
                replaced.update((_pattern(name), *kinds) for name, kinds in run.model.replaced_modules.items())
            traffic[:0] = _traffic_rows(run.step(), rank)
    sections = [
        _table(f"Mesh of {world_size} rank(s)", ("axis", "size", "ranks"), mesh),
        _table("Stages", ("rank", "stage", "modules"), stages if pp > 1 else []),
        _table(
            "Replaced modules",
            ("module", "number", "was", "is"),
            [(name, number, *kinds) for (name, *kinds), number in _in_order(replaced)],
        ),
        _table(
            "Parameters",
            ("name", "number", "shape", "on rank 0" if pp == 1 else "on the first rank of its stage", "placement"),
            [(name, number, *rest) for (name, *rest), number in _in_order(parameters)],
        ),
        _table("Boundaries", ("module", "tensor", "axis", "is turned into", "forward", "backward"), boundaries),
        _table(
            "FSDP units",
            ("module", "number", "parameters of each"),
            [(name, number, *rest) for (name, *rest), number in _in_order(units)],
        ),
        _table("Sent in each step", ("by rank", "collective", "axis", "calls", "bytes"), traffic),
    ]
    return "\n\n".join(filter(None, sections))


def _mesh_rows(run: Rehearsal) -> Iterator[Row]:
    shown_axes: set[str] = set()
    for mesh in run.parallel_dims.meshes:
        for dim, name in enumerate(mesh.mesh_dim_names or ()):
            if name in shown_axes:
                continue
            shown_axes.add(name)
            groups = mesh.mesh.movedim(dim, -1).reshape(-1, mesh.size(dim)).tolist()
            shown = [_shortened(group, 8, " ") for group in groups]
            yield name, mesh.size(dim), _shortened(shown, 4, " | ")


def _stage_rows(run: Rehearsal, rank: int) -> Iterator[Row]:
    if run.config.parallelism.pp == 1:
        return
    from hyper_parallel.distributed.pipeline_plan import stages_of_rank
    from hyper_parallel.protocols.module import canonical_name

    stages = stages_of_rank(run.config.parallelism, run.parallel_dims.pp_rank)
    for part, stage in zip(run.model_parts, stages, strict=True):
        modules = (re.match(r"\w+(\.\d+)?", canonical_name(name)) for name, _ in part.named_parameters())
        yield rank, stage, " ".join(dict.fromkeys(match[0] for match in modules if match))


def _parameter_rows(run: Rehearsal) -> Iterator[Row]:
    for part in run.model_parts:
        for name, parameter in part.named_parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            axes = parameter.device_mesh.mesh_dim_names if hasattr(parameter, "device_mesh") else ()
            # Where two axes share a dim FSDP's part is of what tp has left, which torch writes as _S.
            shards = [re.sub(r"_S\((\d+).*\)", r"S(\1)", str(place)) for place in getattr(parameter, "placements", ())]
            places = map(" ".join, zip(axes, shards, strict=True))
            yield _pattern(name), _shape(parameter.shape), _shape(local.shape), ", ".join(places)


def _unit_rows(run: Rehearsal) -> Iterator[Row]:
    from torch.distributed.fsdp import FSDPModule

    for part in run.model_parts:
        units = {name: module for name, module in part.named_modules() if isinstance(module, FSDPModule)}
        own: dict[str, list[Any]] = {name: [] for name in units}
        for name, parameter in part.named_parameters() if units else ():
            unit = max((unit for unit in units if not unit or name.startswith(f"{unit}.")), key=len)
            own[unit].append(parameter)
        for name, parameters in own.items():
            yield _pattern(name) or "the rest", f"{sum(p.numel() for p in parameters):,}"


def _boundary_rows(plan: ShardingPlan, axes: Collection[str]) -> Iterator[Row]:
    from hyper_parallel.protocols.boundary import moves
    from hyper_parallel.protocols.mesh import MeshAxisName
    from hyper_parallel.protocols.redistribute import collective

    for pattern, own in plan.items():
        for axis in filter(axes.__contains__, MeshAxisName):
            ins, outs = moves(own, axis)
            named = [*ins.items(), *((f"output {i}", move) for i, move in enumerate(outs))]
            for tensor, move in named:
                if not move.moves_nothing:
                    back = collective(move.grad_src, move.grad_dst) or ""
                    there = collective(move.src, move.dst) or ""
                    yield _pattern(pattern), tensor, axis, f"{move.src} -> {move.dst}", there, back
        if (local_map := own.local_map) is not None and local_map.forward is not None and local_map.axis in axes:
            forward = local_map.forward.func if isinstance(local_map.forward, partial) else local_map.forward
            yield _pattern(pattern), "", local_map.axis, f"forward is {forward.__name__}", "", ""
        if own.compute is not None:
            yield _pattern(pattern), "", "", f"forward is {own.compute.name}", "", ""
        for size in own.sizes_per_rank if MeshAxisName.TP in axes else ():
            yield _pattern(pattern), size, "tp", "is divided by the ranks", "", ""


def _traffic_rows(flows: dict[Flow, Moved], rank: int) -> Iterator[Row]:
    for flow, moved in sorted(flows.items()):
        if moved.sent_bytes:
            yield rank, flow.kind, flow.axis, moved.calls, f"{moved.sent_bytes:,}"


def _shortened(items: Sequence[Any], most: int, separator: str) -> str:
    return separator.join([*map(str, items[:most]), *["..."] * (len(items) > most)])


def _pattern(name: str) -> str:
    """`name` for all layers."""
    from hyper_parallel.protocols.module import canonical_name

    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", canonical_name(name))


def _shape(sizes: Iterable[int]) -> str:
    return " x ".join(map(str, sizes))


def _in_order(rows: Counter[Row]) -> list[tuple[Row, int]]:
    return sorted(rows.items(), key=lambda item: tuple(map(str, item[0])))


def _table(title: str, headings: Row, rows: Sequence[Row]) -> str:
    """`rows` in columns under a title. Nothing without rows."""
    if not rows:
        return ""
    texts = [tuple(map(str, row)) for row in (headings, *rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in texts)
    return "\n".join([title, *(f"  {line.rstrip()}" for line in lines)])


if __name__ == "__main__":
    sys.exit(main())
