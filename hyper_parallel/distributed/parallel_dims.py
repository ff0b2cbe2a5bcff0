"""The one owner of device meshes: who shares what with whom."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch.distributed as dist

from hyper_parallel.config.sections import ParallelismConfig
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
    pp: int = 1
    """Ranks that hold different layers of one copy."""
    _mesh: DeviceMesh | None = field(default=None, init=False, repr=False)
    _loss_group: dist.ProcessGroup | None = field(default=None, init=False, repr=False)

    @classmethod
    def from_config(cls, parallelism: ParallelismConfig, world_size: int) -> ParallelDims:
        """The sizes that `parallelism` means for `world_size` ranks.

        Raises:
            ConfigError: they do not multiply to `world_size`.
        """
        return cls(**resolve_degrees(parallelism, world_size)._asdict())

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp_size

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

        axes = {MeshAxisName.DP_SHARD: self.dp_shard}
        if self.dp_replicate > 1:
            axes = {MeshAxisName.DP_REPLICATE: self.dp_replicate, **axes}
        if self.pp > 1:
            axes = {MeshAxisName.PP: self.pp, **axes}  # outermost: neighbours in a pipeline talk least
        self._mesh = init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(map(str, axes)))
        self._loss_group = dist.group.WORLD
        if self.pp > 1:
            dp_mesh = self.fsdp_mesh
            assert dp_mesh is not None
            self._loss_group = (dp_mesh if dp_mesh.ndim == 1 else dp_mesh._flatten("dp")).get_group()

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
        if self._mesh is None:
            return 0
        return self._mesh.get_rank() % self.dp_size  # pp is the outermost axis

    @property
    def fsdp_mesh(self) -> DeviceMesh | None:
        """The mesh of `fully_shard`: (dp_shard), or (dp_replicate, dp_shard) where there are several copies."""
        if self._mesh is None or self.pp == 1:
            return self._mesh
        assert self._mesh.mesh_dim_names is not None
        return self._mesh[self._mesh.mesh_dim_names[1:]]

    @property
    def loss_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold different tokens, over which losses and token counts are summed."""
        return self._loss_group

    @property
    def pp_group(self) -> dist.ProcessGroup | None:
        """The ranks of one pipeline, in order; None where each rank has all layers."""
        return None if self._mesh is None or self.pp == 1 else self._mesh[str(MeshAxisName.PP)].get_group()

    @property
    def pp_rank(self) -> int:
        """This rank's place in its pipeline."""
        return 0 if self._mesh is None else self._mesh.get_rank() // self.dp_size
