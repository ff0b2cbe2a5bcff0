"""DistributedSetup: what a model is told of the ranks when it is built in one call."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hyper_parallel.config.configurable import join
from hyper_parallel.config.errors import ConfigError, raise_faults
from hyper_parallel.config.manager import value_faults
from hyper_parallel.config.sections import ParallelismConfig
from hyper_parallel.distributed.parallel_dims import ParallelDims
from hyper_parallel.protocols.plan_override import PlanOverride


@dataclass(frozen=True, kw_only=True)
class DistributedSetup:
    """The meshes of a run, and how they are to be used. By default one process."""

    parallel_dims: ParallelDims = field(default_factory=lambda: ParallelDims(dp_replicate=1, dp_shard=1))
    """Sizes of the axes, with the meshes built."""
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    """How parameters are stored and gathered."""
    plan_overrides: tuple[PlanOverride, ...] = ()
    """What is changed in the model before it is sharded."""

    def __post_init__(self) -> None:
        """
        Raises:
            ConfigError: `parallelism` asks for other sizes than `parallel_dims` has, and one of them would be ignored;
                or an override is wrong.
        """
        own, asked = self.parallel_dims, ParallelDims.from_config(self.parallelism, self.parallel_dims.world_size)
        if own != asked:
            fact = f"parallel_dims is {own}, but parallelism asks for {asked}"
            remedy = "make parallel_dims by ParallelDims.from_config(parallelism, world_size)"
            raise ConfigError.one("distributed_setup", fact, remedy)
        # Copies: values take the exact types of their fields, and a run that has read them has sealed them.
        object.__setattr__(self, "plan_overrides", tuple(override.derive() for override in self.plan_overrides))
        raise_faults(
            replace(fault, path=join(f"plan_overrides.{i}", fault.path))
            for i, override in enumerate(self.plan_overrides)
            for fault in value_faults(override) or override.faults()
        )
