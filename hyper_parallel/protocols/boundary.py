"""Applies the plan of one module over one mesh axis: shards its parameters, and moves what crosses its boundary."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from hyper_parallel.config.errors import RunError
from hyper_parallel.protocols.mesh import MeshAxisName
from hyper_parallel.protocols.redistribute import Move, redistribute
from hyper_parallel.protocols.sharding import NamedPlacement, Placement, PlacementMismatchError, ShardingConfig

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from hyper_parallel.protocols.planned_module import PlannedModule

Mode = Literal["production", "validate"]


def shard_states(module: PlannedModule, plan: ShardingConfig, mesh: DeviceMesh) -> None:
    """Makes every parameter that `module` itself owns a DTensor on `mesh`, each rank keeping its part."""
    from torch.distributed.tensor import distribute_tensor

    for name, parameter in module.named_parameters(recurse=False):
        placements = plan.state_shardings[name]
        sharded = distribute_tensor(parameter.detach(), mesh, _placed_on(mesh, placements), src_data_rank=None)
        module.register_parameter(name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))
    if MeshAxisName.EP in _axes(mesh):
        module.efsdp_states = {
            name: placements[MeshAxisName.EFSDP] for name, placements in plan.state_shardings.items()
        }


def read_states_locally(module: PlannedModule, plan: ShardingConfig, mesh: DeviceMesh) -> None:
    """From now on `module` reads its own parameters as local tensors; their gradients are as `state_grads` says."""
    module.local_states = {
        name: _placed_on(mesh, plan.state_grads.get(name, placements))
        for name, placements in plan.state_shardings.items()
    }


def _placed_on(mesh: DeviceMesh, placements: NamedPlacement) -> list[Placement]:
    return [placed(placements, axis) for axis in _axes(mesh)]


def _axes(mesh: DeviceMesh) -> list[MeshAxisName]:
    return [MeshAxisName(name) for name in mesh.mesh_dim_names or ()]


def bind_boundary(
    module: nn.Module, name: str, plan: ShardingConfig, axis: MeshAxisName, mesh: DeviceMesh, mode: Mode
) -> None:
    """Puts the moves of the plan around the forward of `module`, whose name in the model is `name`, in place."""
    forward = _local_forward(module, plan, axis, mesh)
    if mode == "validate":
        module.forward = _validating(forward, name, plan, axis, mesh)
        return
    ins, outs = moves(plan, axis)
    ins = {argument: move for argument, move in ins.items() if not move.moves_nothing}
    # More than one output is looked at in any case: the forward may give fewer.
    if ins or len(outs) > 1 or not all(move.moves_nothing for move in outs):
        forward = _moving(forward, name, plan, ins, outs, mesh)
    if forward != module.forward:
        module.forward = forward


def moves(plan: ShardingConfig, axis: MeshAxisName) -> tuple[dict[str, Move], list[Move]]:
    """What the plan declares over `axis`: by argument, and of the outputs in order."""
    ins = {
        argument: Move(
            src := placed(placements, axis),
            dst := placed(plan.in_dst.get(argument, placements), axis),
            placed(plan.in_grads[argument], axis) if argument in plan.in_grads else dst,
            src,
        )
        for argument, placements in plan.in_src.items()
    }
    out_dst = plan.out_dst or (None,) * len(plan.out_src)
    return ins, [_move_out(src, dst, axis) for src, dst in zip(plan.out_src, out_dst, strict=True)]


def _move_out(out_src: NamedPlacement | None, out_dst: NamedPlacement | None, axis: MeshAxisName) -> Move:
    src = placed(out_src or {}, axis)
    if out_src is None or out_dst is None:
        return Move(src, src, src, src)
    return Move(src, dst := placed(out_dst, axis), _grad_behind(dst), _grad_behind(src))


def bind_root(module: nn.Module) -> None:
    """Puts around the forward of the model what validate mode needs once: it tells of tensors of different layouts that
    meet between modules, and hands out whole local tensors."""
    forward = module.forward

    def handed_out(x: Any) -> Any:
        if hasattr(x, "full_tensor"):
            return x.full_tensor()
        # FSDP and pipelines change what a model hands out in place, which the local part of a DTensor, a view, forbids.
        return x.clone() if isinstance(x, torch.Tensor) and x._is_view() else x

    def rooted(*args: Any, **kwargs: Any) -> Any:
        with _EqualPlacements():
            output = forward(*args, **kwargs)
        return tree_map(handed_out, output)

    module.forward = rooted


class _EqualPlacements(TorchFunctionMode):
    """Refuses an elementwise operation on two tensors of different layouts, which DTensor would repair in silence."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if len(args) == 2 and all(hasattr(x, "placements") for x in args) and args[0].shape == args[1].shape:
            self._check(*args)
        return func(*args, **(kwargs or {}))

    def _check(self, first: Any, second: Any) -> None:
        if first.placements != second.placements:
            # In `stream + layer(stream)` the second is what a module has just made.
            name, (declared,), (real,) = getattr(second, "made_by", "?"), second.placements, first.placements
            (axis,) = second.device_mesh.mesh_dim_names
            raise PlacementMismatchError(name, "what its output meets", axis, declared=declared, real=real)


def placed(placements: NamedPlacement, axis: MeshAxisName) -> Placement:
    """The placement on `axis`."""
    from torch.distributed.tensor import Replicate

    return placements.get(axis, Replicate())


def _grad_behind(src: Placement) -> Placement:
    """How forward takes the gradient of an output that it leaves as `src`: of a part of a sum, each needs the whole."""
    from torch.distributed.tensor import Replicate

    return Replicate() if src.is_partial() else src


def _local_forward(module: nn.Module, plan: ShardingConfig, axis: MeshAxisName, mesh: DeviceMesh) -> Callable[..., Any]:
    if plan.local_map is None or plan.local_map.forward is None or plan.local_map.axis != axis:
        return module.forward
    replaced, group = plan.local_map.forward, mesh.get_group()

    def forward(*args: Any) -> Any:
        return replaced(module, group, *args)

    forward.__signature__ = inspect.signature(module.forward)  # type: ignore[attr-defined]
    return forward


def _moving(
    forward: Callable[..., Any],
    name: str,
    plan: ShardingConfig,
    ins: dict[str, Move],
    outs: list[Move],
    mesh: DeviceMesh,
) -> Any:
    """Production: local tensors everywhere, the declared collectives at the boundary and nothing else."""
    group = mesh.get_group()
    positions = _positions(forward)

    @functools.wraps(forward)  # the next axis asks for its arguments' names
    def bounded(*args: Any, **kwargs: Any) -> Any:
        def move_in(tensor: torch.Tensor, argument: str) -> torch.Tensor:
            _check_dims(tensor, ins[argument], name, f"argument {argument}", group.size())
            return redistribute(tensor, ins[argument], group)

        def move_out(tensor: torch.Tensor, i: int) -> torch.Tensor:
            _check_dims(tensor, outs[i], name, f"output {i}", group.size())
            return redistribute(tensor, outs[i], group)

        args, kwargs = _changed(args, kwargs, positions, ins, move_in)
        return _changed_outputs(forward(*args, **kwargs), name, plan, move_out)

    return bounded


def _validating(
    forward: Callable[..., Any], name: str, plan: ShardingConfig, axis: MeshAxisName, mesh: DeviceMesh
) -> Any:
    """Validate: DTensors, whose real placements are compared with the plan before and behind forward.

    A plain tensor is one that no plan speaks of yet: it is taken to be laid out as declared.
    """
    from torch.distributed.tensor import DTensor

    positions = _positions(forward)

    def checked(tensor: torch.Tensor, declared: Placement, what: str) -> DTensor:
        if not isinstance(tensor, DTensor):
            return DTensor.from_local(tensor, mesh, [declared], run_check=False)
        (real,) = tensor.placements
        if real != declared:
            raise PlacementMismatchError(name, what, axis, declared=declared, real=real)
        return tensor

    ins, outs = moves(plan, axis)

    def move_in(tensor: torch.Tensor, argument: str) -> torch.Tensor:
        _check_dims(tensor, ins[argument], name, f"argument {argument}", mesh.size())
        src = placed(plan.in_src[argument], axis)
        dst = placed(plan.in_dst.get(argument, plan.in_src[argument]), axis)
        moved = checked(tensor, src, f"argument {argument}").redistribute(mesh, [dst])
        if plan.local_map is None:
            return moved
        grad = placed(plan.in_grads[argument], axis) if argument in plan.in_grads else dst
        local: torch.Tensor = moved.to_local(grad_placements=[grad])
        return local

    def move_out(tensor: torch.Tensor, i: int) -> torch.Tensor:
        if (declared := plan.out_src[i]) is None:
            return tensor
        _check_dims(tensor, outs[i], name, f"output {i}", mesh.size())
        out = checked(tensor, placed(declared, axis), f"output {i}")
        if plan.out_dst is not None and (out_dst := plan.out_dst[i]) is not None:
            out = out.redistribute(mesh, [placed(out_dst, axis)])
        out.made_by = name  # type: ignore[attr-defined] # for the message where it meets another
        return out

    @functools.wraps(forward)  # the next axis asks for its arguments' names
    def bounded(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _changed(args, kwargs, positions, plan.in_src, move_in)
        return _changed_outputs(forward(*args, **kwargs), name, plan, move_out)

    return bounded


def _check_dims(tensor: torch.Tensor, move: Move, name: str, what: str, ranks: int) -> None:
    """
    Raises:
        RunError: `tensor`, which is `what` of the module `name`, has not the dim that is split, or it does not divide.
    """
    fact = None
    for placement in (move.src, move.dst):
        if placement.is_shard() and placement.dim >= tensor.dim():
            fact = f"is declared {placement!r}, but has {tensor.dim()} dims"
    if fact is None and move.dst.is_shard() and move.dst != move.src and tensor.shape[move.dst.dim] % ranks:
        size = tensor.shape[move.dst.dim]
        fact = f"is to be {move.dst!r}, but {size} elements of this dim do not divide by {ranks} ranks"
    if fact is not None:
        raise RunError(f"plan of module {name!r}: {what} {fact}; correct this module's entry in the sharding plan")


def _positions(forward: Callable[..., Any]) -> dict[str, int]:
    return {name: i for i, name in enumerate(inspect.signature(forward).parameters)}


def _changed(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    positions: dict[str, int],
    names: Any,
    change: Callable[[torch.Tensor, str], torch.Tensor],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with those in `names` changed, however they were passed. Of a tuple, all its tensors;
    what is no tensor, or is not passed, is as it was."""

    def each(x: Any, name: str) -> Any:
        return tree_map(lambda leaf: change(leaf, name) if isinstance(leaf, torch.Tensor) else leaf, x)

    changed = list(args)
    for name in names:
        if name in kwargs:
            kwargs = kwargs | {name: each(kwargs[name], name)}
        elif positions[name] < len(changed):
            changed[positions[name]] = each(changed[positions[name]], name)
    return tuple(changed), kwargs


def _changed_outputs(
    output: Any, name: str, plan: ShardingConfig, change: Callable[[torch.Tensor, int], torch.Tensor]
) -> Any:
    """The output of a call with its first tensors changed, as many as `out_src` of the module's plan names.

    Raises:
        RunError: `out_src` says how tensors lie that the module does not give.
    """
    leaves, structure = tree_flatten(output)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    if surplus := [i for i, placement in enumerate(plan.out_src) if placement is not None and i >= len(places)]:
        raise RunError(
            f"plan of module {name!r}: out_src says how output {surplus[0]} lies, but forward gives {len(places)} "
            f"tensor(s); leave out what it has not"
        )
    for i, place in zip(range(len(plan.out_src)), places, strict=False):
        leaves[place] = change(leaves[place], i)
    return tree_unflatten(leaves, structure)
