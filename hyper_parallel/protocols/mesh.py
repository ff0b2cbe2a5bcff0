"""Names of the axes that a device mesh may have."""

from __future__ import annotations

from enum import StrEnum


class MeshAxisName(StrEnum):
    """An axis of a mesh. Placements are declared per name, so a plan does not depend on which axes a run has."""

    DP_REPLICATE = "dp_replicate"
    """Whole copies of the model."""
    DP_SHARD = "dp_shard"
    """Ranks that share one copy and hold different rows."""
    FSDP = "fsdp"
    """`dp_shard` and `cp` flattened: where parameters are sharded."""
    CP = "cp"
    """Ranks that hold different parts of the same rows."""
    TP = "tp"
    """Ranks that hold different parts of the same matrices."""
    PP = "pp"
    """Stages of a pipeline."""
    EP = "ep"
    """Ranks that hold different experts."""
    EFSDP = "efsdp"
    """Where the parameters of one rank's experts are sharded."""
