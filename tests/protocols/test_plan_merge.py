"""What overrides write into a derived plan."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.tensor import Partial, Shard

from hyper_parallel.config.errors import ConfigError
from hyper_parallel.protocols.mesh import MeshAxisName
from hyper_parallel.protocols.plan_merge import merged_plan
from hyper_parallel.protocols.plan_override import PlanOverride
from hyper_parallel.protocols.sharding import ShardingConfig, ShardingPlan

TP, CP = MeshAxisName.TP, MeshAxisName.CP
NAMES = ["", "layers.0.o_proj", "layers.1.o_proj", "head", "router"]
PLAN: ShardingPlan = {
    "layers.*.o_proj": ShardingConfig(
        state_shardings={"weight": {TP: Shard(1)}, "bias": {}},
        in_src={"x": {TP: Shard(2), CP: Shard(1)}},
        in_grads={"x": {TP: Shard(2)}},
        out_src=({TP: Partial()},),
    ),
    "head": ShardingConfig(state_shardings={"weight": {}}),
}


def merged(*overrides: PlanOverride, **degrees: int) -> dict[str, ShardingConfig]:
    return merged_plan(NAMES, PLAN, overrides, {"tp": 2, "cp": 1, "ep": 1, "pp": 1} | degrees)


def test_what_is_not_written_is_inherited() -> None:
    plan = merged(PlanOverride(match="layers.1.o_proj", out_dst=("replicate",), in_src={"x": "shard(0)"}))
    own, derived = plan["layers.1.o_proj"], PLAN["layers.*.o_proj"]
    assert own.out_dst == ({},) and own.in_src == {"x": {TP: Shard(0), CP: Shard(1)}}  # another axis stays
    assert (own.state_shardings, own.in_grads, own.out_src) == (
        derived.state_shardings,
        derived.in_grads,
        derived.out_src,
    )
    assert list(plan) == ["layers.1.o_proj", "layers.*.o_proj", "head"]  # the first that fits
    assert plan["layers.*.o_proj"] == derived


def test_what_is_written_replaces_the_field_and_the_later_wins() -> None:
    first = PlanOverride(match="layers.*.o_proj", params={"weight": "replicate"}, out_src=("replicate",))
    second = PlanOverride(match="layers.0.*", params={"weight": "auto", "bias": "shard(0)"})
    plan = merged(first, second)
    assert plan["layers.1.o_proj"].state_shardings == {"weight": {}}
    assert plan["layers.0.o_proj"].state_shardings == {"weight": {}, "bias": {TP: Shard(0)}}
    assert plan["layers.0.o_proj"].out_src == ({},)
    assert merged(PlanOverride(match="head", params={}))["head"].state_shardings == {}
    divided = merged(PlanOverride(match="layers.0.*", tp_divide_attrs=("num_heads",)))["layers.0.o_proj"]
    assert (divided.sizes_per_rank, divided.out_src) == (("num_heads",), PLAN["layers.*.o_proj"].out_src)


def test_a_boundary_that_is_not_derived_is_written_as_a_whole() -> None:
    with pytest.raises(
        ConfigError, match=r"plan_overrides.0: router has no derived boundary, and params, out_src is not"
    ):
        merged(PlanOverride(match="router", in_src={"x": "replicate"}))
    whole: dict[str, Any] = {"params": {"weight": "shard(0)"}, "in_src": {"x": "replicate"}, "out_src": ("shard(2)",)}
    assert merged(PlanOverride(match="router", **whole))["router"] == ShardingConfig(
        state_shardings={"weight": {TP: Shard(0)}}, in_src={"x": {}}, out_src=({TP: Shard(2)},)
    )


def test_only_a_run_with_its_axes_is_changed() -> None:
    rule = PlanOverride(match="head", when="cp", params={})
    assert merged(rule) == PLAN
    assert merged(rule, cp=2)["head"].state_shardings == {}
    assert merged(PlanOverride(match="head", params={}), tp=1) == PLAN


def test_mistakes_are_told() -> None:
    with pytest.raises(ConfigError, match=r"plan_overrides.0.match: 'haed' names no module of the model; near: head"):
        merged(PlanOverride(match="haed", params={}))
    rule = PlanOverride(match="head", in_src={"x": "shard"}, out_src=("partial", "shard(-1)"))
    assert [str(fault).partition(";")[0] for fault in rule.faults()] == [
        "in_src.x: 'shard' is no placement",
        "out_src.1: 'shard(-1)' is no placement",
    ]
