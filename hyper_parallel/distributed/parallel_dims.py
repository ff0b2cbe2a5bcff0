"""The one owner of device meshes: who shares what with whom."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch.distributed as dist

from hyper_parallel.config.sections import ParallelismConfig
from hyper_parallel.distributed.process_group import forget_meshes
from hyper_parallel.distributed.topology import resolve_degrees
from hyper_parallel.protocols.mesh import MeshAxisName

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(kw_only=True)
class ParallelDims:
    """Sizes of the mesh axes and, once `build_mesh` has run, the meshes and groups made of them.

    A process without a process group has no mesh and no group: every property below is then None or that of one rank.
    """

    dp_replicate: int
    """Copies of the model."""
    dp_shard: int
    """Ranks that share one copy."""
    cp: int = 1
    """Ranks that hold different parts of the same rows."""
    tp: int = 1
    """Ranks that hold different parts of the same matrices."""
    pp: int = 1
    """Ranks that hold different layers of one copy."""
    ep: int = 1
    """Ranks that hold different experts, neighbours among the dp_shard x cp."""
    meshes: list[DeviceMesh] = field(default_factory=list, init=False, repr=False, compare=False)
    """All over the same ranks: that of the run, then those that divide one of its axes once more."""
    _mesh: DeviceMesh | None = field(default=None, init=False, repr=False, compare=False)
    _fsdp_mesh: DeviceMesh | None = field(default=None, init=False, repr=False, compare=False)
    _cp_mesh: DeviceMesh | None = field(default=None, init=False, repr=False, compare=False)
    _expert_mesh: DeviceMesh | None = field(default=None, init=False, repr=False, compare=False)
    _efsdp_mesh: DeviceMesh | None = field(default=None, init=False, repr=False, compare=False)
    _dp_group: dist.ProcessGroup | None = field(default=None, init=False, repr=False, compare=False)
    _loss_group: dist.ProcessGroup | None = field(default=None, init=False, repr=False, compare=False)
    _groups: list[dist.ProcessGroup] = field(default_factory=list, init=False, repr=False, compare=False)

    @classmethod
    def from_config(cls, parallelism: ParallelismConfig, world_size: int) -> ParallelDims:
        """The sizes that `parallelism` means for `world_size` ranks.

        Raises:
            ConfigError: they do not multiply to `world_size`, or ep does not divide dp_shard x cp.
        """
        return cls(**resolve_degrees(parallelism, world_size)._asdict(), ep=parallelism.ep)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp_size * self.cp * self.tp

    def build_mesh(self, device_type: str) -> None:
        """Makes the device mesh over the ranks of the process group. Without a process group there is none to make.

        Raises:
            RuntimeError: the process group has another number of ranks, or several ranks have no process group.
        """
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        if ranks != self.world_size:
            raise RuntimeError(
                f"{self} needs {self.world_size} ranks, but "
                + (f"the process group has {ranks}" if dist.is_initialized() else "no process group was initialised")
            )
        if not dist.is_initialized():
            return
        from torch.distributed.device_mesh import init_device_mesh

        forget_meshes()  # a model of a run before may have been looked at since its groups ended
        axes: dict[str, int] = {}
        if self.dp_replicate > 1:
            axes[MeshAxisName.DP_REPLICATE] = self.dp_replicate
        axes[MeshAxisName.DP_SHARD if self.cp == 1 else MeshAxisName.FSDP] = self.dp_shard * self.cp
        fsdp_axes = tuple(map(str, axes))
        if self.tp > 1:
            axes[MeshAxisName.TP] = self.tp  # innermost: neighbours talk most
        if self.pp > 1:
            axes = {MeshAxisName.PP: self.pp, **axes}  # outermost: neighbours in a pipeline talk least
        mesh = init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(map(str, axes)))
        self._mesh, self.meshes = mesh, [mesh]
        self._fsdp_mesh = mesh if mesh.mesh_dim_names == fsdp_axes else mesh[fsdp_axes]
        self._loss_group = self._dp_group = _group_over(mesh, fsdp_axes, "loss")
        if self.cp > 1:
            parts = (str(MeshAxisName.DP_SHARD), str(MeshAxisName.CP))
            by_parts = mesh._unflatten(str(MeshAxisName.FSDP), (self.dp_shard, self.cp), parts)
            self.meshes.append(by_parts)
            self._cp_mesh = by_parts[parts[1]]
            self._dp_group = _group_over(by_parts, (*fsdp_axes[:-1], parts[0]), "dp")
        if self.ep > 1:
            efsdp, ep = str(MeshAxisName.EFSDP), str(MeshAxisName.EP)
            by_experts = mesh._unflatten(fsdp_axes[-1], (self.dp_shard * self.cp // self.ep, self.ep), (efsdp, ep))
            self.meshes.append(by_experts)
            self._efsdp_mesh = by_experts[(*fsdp_axes[:-1], efsdp)]
            self._expert_mesh = by_experts[(ep, str(MeshAxisName.TP)) if self.tp > 1 else (ep,)]
        of_axes = [group for each in self.meshes for group in each.get_all_groups()]
        self._groups = list({id(group): group for group in (*of_axes, self._loss_group, self._dp_group)}.values())

    def release_groups(self) -> list[dist.ProcessGroup]:
        """Those that `build_mesh` has made or taken, each once, for the caller to end. Afterwards there are none."""
        groups, self._groups = self._groups, []
        return groups

    @property
    def dp_enabled(self) -> bool:
        """Whether more than one rank reads data."""
        return self.dp_size > 1

    @property
    def dp_size(self) -> int:
        """Number of ranks that read different rows."""
        return self.dp_replicate * self.dp_shard

    @property
    def dp_rank(self) -> int:
        """This rank's place among those that read different rows."""
        return self.token_rank // self.cp

    @property
    def token_rank(self) -> int:
        """This rank's place among those that hold different tokens."""
        if self._mesh is None:
            return 0
        # tp is the innermost axis, pp the outermost
        return self._mesh.get_rank() // self.tp % (self.dp_size * self.cp)

    @property
    def fsdp_mesh(self) -> DeviceMesh | None:
        """The mesh of `fully_shard`: dp_shard and cp as one axis, behind dp_replicate if there are several copies."""
        return self._fsdp_mesh

    @property
    def cp_mesh(self) -> DeviceMesh | None:
        """The mesh of the ranks that share rows; None where each has whole ones."""
        return self._cp_mesh

    @property
    def efsdp_mesh(self) -> DeviceMesh | None:
        """The mesh of `fully_shard` for experts: the ranks that hold the same ones, behind dp_replicate if there are
        several copies. None where each rank has all experts."""
        return self._efsdp_mesh

    @property
    def expert_mesh(self) -> DeviceMesh | None:
        """The mesh over whose ranks experts are spread: ep, and tp if their matrices are split too. None where each
        rank has all experts."""
        return self._expert_mesh

    @property
    def ep_mesh(self) -> DeviceMesh | None:
        """The mesh of the ranks that send each other tokens; None where each has all experts."""
        return None if self._expert_mesh is None else self._expert_mesh[str(MeshAxisName.EP)]

    @property
    def tp_mesh(self) -> DeviceMesh | None:
        """The mesh of the ranks that share matrices; None where each has whole ones."""
        return None if self._mesh is None or self.tp == 1 else self._mesh[str(MeshAxisName.TP)]

    @property
    def tp_group(self) -> dist.ProcessGroup | None:
        """The group of `tp_mesh`."""
        return None if self.tp_mesh is None else self.tp_mesh.get_group()

    @property
    def dp_group(self) -> dist.ProcessGroup | None:
        """The ranks that read different rows, over which tokens are counted."""
        return self._dp_group

    @property
    def loss_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold different tokens, over which losses are summed."""
        return self._loss_group

    @property
    def pp_group(self) -> dist.ProcessGroup | None:
        """The ranks of one pipeline, in order; None where each rank has all layers."""
        return None if self._mesh is None or self.pp == 1 else self._mesh[str(MeshAxisName.PP)].get_group()

    @property
    def pp_rank(self) -> int:
        """This rank's place in its pipeline."""
        return 0 if self._mesh is None else self._mesh.get_rank() * self.pp // self.world_size  # pp is the outermost


def _group_over(mesh: DeviceMesh, axes: tuple[str, ...], name: str) -> dist.ProcessGroup:
    """The group of this rank over several axes of the mesh, which are called `name` as one."""
    if axes == mesh.mesh_dim_names:
        return dist.group.WORLD
    return mesh[axes[0]].get_group() if len(axes) == 1 else mesh[axes]._flatten(name).get_group()
