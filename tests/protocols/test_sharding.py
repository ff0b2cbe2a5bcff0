from __future__ import annotations

import pytest

from hyper_parallel.protocols.mesh import MeshAxisName
from hyper_parallel.protocols.sharding import ShardingConfig

EP, EFSDP, TP = MeshAxisName.EP, MeshAxisName.EFSDP, MeshAxisName.TP


@pytest.mark.parametrize("other", [{EP: 0}, {EFSDP: 1}, {TP: 0}, {}])
def test_parameters_beside_spread_experts_are_refused(other: dict[MeshAxisName, int]) -> None:
    with pytest.raises(TypeError, match="sharding plan: bias: all parameters of a module with experts lie on both"):
        ShardingConfig(state_shardings={"weight": {EP: 0, EFSDP: 1}, "bias": other})


def test_experts_are_told_by_their_axes() -> None:
    assert ShardingConfig(state_shardings={"weight": {EP: 0, EFSDP: 1, TP: 2}}).spreads_experts
    assert not ShardingConfig(state_shardings={"weight": {TP: 0}, "bias": {}}).spreads_experts
