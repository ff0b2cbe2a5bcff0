"""What overrides write into a derived plan."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Shard

from hyper_parallel.config.errors import ConfigError
from hyper_parallel.config.target import Target
from hyper_parallel.protocols.injected_compute import inner_wrapper, local_compute
from hyper_parallel.protocols.mesh import MeshAxisName
from hyper_parallel.protocols.module_replacement import ReplacementContext
from hyper_parallel.protocols.plan_merge import merged_plan
from hyper_parallel.protocols.plan_override import PlanOverride
from hyper_parallel.protocols.sharding import LocalMap, ShardingConfig, ShardingPlan

TP, CP = MeshAxisName.TP, MeshAxisName.CP


class Layer(nn.Module):
    """With parameters, on meta, and a size."""

    def __init__(self, *parameters: str, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads, self.dropout = num_heads, 0.5
        for name in parameters:
            self.register_parameter(name, nn.Parameter(torch.empty(4, 6, device="meta")))

    def forward(self, x: Any, mask: Any = None) -> Any: ...


MODULES = {
    "": Layer(),
    "layers.0.o_proj": Layer("weight", "bias"),
    "layers.1": Layer(),
    "layers.1.o_proj": Layer("weight", "bias", num_heads=3),
    "head": Layer("weight"),
    "router": Layer("weight"),
}
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
    context = ReplacementContext(**{"tp": 2} | degrees)
    return merged_plan(MODULES, PLAN, overrides, context, {"sdpa_qkv": wrapped})


@inner_wrapper
def wrapped(target_module: Any, mesh: Any, tp_mesh: Any, cp_mesh: Any, ep_mesh: Any) -> Any: ...


@local_compute
def computed(mesh: Any, tp_mesh: Any, cp_mesh: Any, ep_mesh: Any) -> Any: ...


def test_what_is_not_written_is_inherited() -> None:
    plan = merged(PlanOverride(match="layers.1.o_proj", out_dst=("replicate",), in_src={"x": "shard(2)"}))
    own, derived = plan["layers.1.o_proj"], PLAN["layers.*.o_proj"]
    assert own.out_dst == ({},) and own.in_src == {"x": {TP: Shard(2), CP: Shard(1)}}  # another axis stays
    assert (own.state_shardings, own.in_grads, own.out_src) == (
        derived.state_shardings,
        derived.in_grads,
        derived.out_src,
    )
    assert list(plan) == ["layers.1.o_proj", "layers.*.o_proj", "head"]  # the first that fits
    assert plan["layers.*.o_proj"] == derived


def test_what_is_written_replaces_the_field_and_the_later_wins() -> None:
    first = PlanOverride(
        match="layers.*.o_proj", params={"weight": "replicate", "bias": "auto"}, out_src=("replicate",)
    )
    second = PlanOverride(match="layers.0.*", params={"weight": "auto", "bias": "shard(0)"})
    plan = merged(first, second)
    assert plan["layers.1.o_proj"].state_shardings == {"weight": {}, "bias": {}}
    assert plan["layers.0.o_proj"].state_shardings == {"weight": {TP: Shard(1)}, "bias": {TP: Shard(0)}}
    assert plan["layers.0.o_proj"].out_src == ({},)
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
    rule = PlanOverride(match="head", when="cp", params={"weight": "shard(0)"})
    assert merged(rule) == PLAN
    assert merged(rule, cp=2)["head"].state_shardings == {"weight": {TP: Shard(0)}}
    assert merged(PlanOverride(match="head", params={"weight": "shard(0)"}), tp=1) == PLAN

    rule = rule.derive(when="low_precision")
    assert merged(rule, low_precision=False) == PLAN
    assert merged(rule, low_precision=True) != PLAN


def test_auto_is_what_the_plan_derives_and_none_is_left() -> None:
    """Not what an earlier rule wrote, which a field that is not written keeps."""
    name, base = "layers.0.o_proj", PLAN["layers.*.o_proj"]
    first = PlanOverride(
        match=name, params={"weight": "shard(0)", "bias": "auto"}, in_src="none", out_src=("replicate", "shard(1)")
    )
    assert merged(first)[name].in_src == {} and merged(first)[name].out_src == ({}, {TP: Shard(1)})
    again = PlanOverride(match=name, params="auto", in_src={"x": "auto"}, out_src=("auto", "none"))
    plan = merged(first, again)[name]
    assert (plan.state_shardings, plan.in_src, plan.out_src) == (
        base.state_shardings,
        base.in_src,
        (base.out_src[0], None),
    )
    turned = PlanOverride(match=name, out_src=("partial", "none", "shard(0)"), out_dst=("replicate", "none", "none"))
    assert merged(turned)[name].out_dst == ({}, None, None)
    for empty in ("none", ()):
        assert merged(turned, PlanOverride(match=name, out_dst=empty))[name].out_dst is None
    assert merged(turned, PlanOverride(match=name, out_src="auto", out_dst="auto"))[name] == base
    kept = PlanOverride(match=name, in_src={"x": "shard(1)", "mask": "none"})
    assert merged(kept)[name].in_src == {"x": {TP: Shard(1), CP: Shard(1)}}


@pytest.mark.parametrize(
    ("fields", "fact"),
    [
        ({"in_src": {"y": "auto"}}, "plan_overrides.0.in_src.y: auto, but the model's plan derives nothing for it"),
        ({"out_src": ("auto", "auto")}, "plan_overrides.0.out_src.1: auto, but the model's plan derives nothing"),
        ({"out_dst": ("replicate",) * 2}, "plan_overrides.0.out_dst: 2 outputs, and out_src has 1; write both"),
        (
            {"out_src": ("none",), "out_dst": ("replicate",)},
            "plan_overrides.0.out_dst.0: is to be turned into something, but out_src does not say how it lies",
        ),
    ],
)
def test_fields_that_do_not_go_together_are_refused(fields: dict[str, Any], fact: str) -> None:
    with pytest.raises(ConfigError) as caught:
        merged(PlanOverride(match="layers.*.o_proj", **fields))
    assert str(caught.value).startswith(fact) and "\n" not in str(caught.value)  # once for both layers


def test_what_a_module_has_not_is_refused() -> None:
    fields: dict[str, Any] = {
        "params": {"weight": "shard(0)", "wieght": "shard(1)"},
        "in_src": {"xx": "replicate"},
        "in_dst": {"y": "replicate", "mask": "replicate", "x": "none"},
        "tp_divide_attrs": ("num_hedas", "num_heads", "dropout"),
    }
    with pytest.raises(ConfigError) as caught:
        merged(PlanOverride(match="layers.*.o_proj", **fields))
    assert str(caught.value).replace("plan_overrides.0.", "").replace("layers.*.o_proj", "it").splitlines() == [
        "params.wieght: it has no such parameter; did you mean 'weight'?",
        "in_src.xx: it has no such argument of forward; did you mean 'x'?",
        "in_dst.y: it has no such argument of forward; choose one of mask, x",
        "in_dst.mask: replicate, but in_src does not say how it arrives; write it there, or none here",
        "params: bias of it is not in it; write how each parameter lies, replicate or shard(DIM)",
        "tp_divide_attrs.0: it.num_hedas is not there, and no count of features; did you mean 'num_heads'?",
        "tp_divide_attrs.2: it.dropout is 0.5, and no count of features; choose one of num_heads",
        "tp_divide_attrs.1: it.num_heads is 3, which tp 2 does not divide; leave it out, or choose another tp",
    ]
    for word, tp in (("shard(2)", 2), ("shard(1)", 4)):
        fact = (
            rf"params.weight: {re.escape(word)}, which tp {tp} cannot make of head.weight with its shape \(4, 6\); name"
        )
        with pytest.raises(ConfigError, match=fact):
            merged(PlanOverride(match="head", params={"weight": word}), tp=tp)
    with pytest.raises(ConfigError, match=r"^plan_overrides.0.params: weight of head is not in it; write how each"):
        merged(PlanOverride(match="head", params="none"))


def test_gradients_follow_what_is_written() -> None:
    """Those that are derived are of placements that a rule replaces."""
    summand = {TP: Partial()}
    layer = ShardingConfig(
        state_shardings={"scale": {}},
        state_grads={"scale": summand},
        in_src={"x": {TP: Shard(1)}},
        in_dst={"x": {}},
        in_grads={"x": summand},
        out_src=(summand,),
    )
    column = ShardingConfig(state_shardings={"weight": {TP: Shard(0)}}, in_src={"x": {}}, out_src=({TP: Shard(2)},))
    context = ReplacementContext(tp=2)

    plan = {"layer": layer, "layer.up": column, "layer.gate": column}
    modules = {"": Layer(), "layer": Layer("scale"), "layer.up": Layer("weight"), "layer.gate": Layer("weight")}

    def grads(*others: PlanOverride, base: ShardingPlan = plan, **fields: Any) -> tuple[Any, Any]:
        rule = PlanOverride(match="layer", **fields)
        have = modules | {"layer": Layer(*fields.get("params", ("scale",)))}
        entry = merged_plan(have, base, [rule, *others], context)["layer"]
        return entry.in_grads, entry.state_grads

    assert grads(out_dst=("replicate",)) == (layer.in_grads, layer.state_grads)
    assert grads(out_src=("replicate",)) == (layer.in_grads, {})  # summed within it
    assert grads(out_src=("shard(2)",)) == ({"x": summand}, {"scale": summand})
    assert grads(in_dst={"x": "shard(1)"}) == ({}, {"scale": summand})
    assert grads(params={"scale": "shard(0)"}) == ({"x": summand}, {})
    whole = PlanOverride(match="layer.*", params={"weight": "replicate"}, out_src=("replicate",))
    assert grads(whole, out_src=("replicate",)) == ({}, {})
    fact = r"^plan_overrides.0: within layer each rank computes a part of up, and the whole of gate, but the gradie"
    with pytest.raises(ConfigError, match=fact):
        grads(whole.derive(match="layer.gate"), out_src=("replicate",))
    fact = (
        r"^plan_overrides.0.in_src: x of layer is not named, but each rank computes a part of gate, up, so its gradie"
    )
    with pytest.raises(ConfigError, match=fact):
        grads(in_src="none", in_dst="none")
    fact = r"^plan_overrides.0.out_src: partial, but no parameter or argument of layer is divided over tp: each rank"
    with pytest.raises(ConfigError, match=fact):
        grads(whole, in_src={"x": "auto"}, in_dst={"x": "auto"})

    inner = {"layer.norm": ShardingConfig(in_src={"x": {TP: Shard(2)}}, out_src=({TP: Shard(2)},))}
    modules |= {"layer.norm": Layer()}
    fact = (
        r"^plan_overrides.0: each rank now has the whole of what gate, up make, and layer.norm takes a part of it; wr"
    )
    projections = whole.derive(match=("layer.up", "layer.gate"))
    with pytest.raises(ConfigError, match=fact):
        grads(projections, base=plan | inner, out_src=("replicate",))
    cut = projections.derive(out_dst=("shard(2)",))
    assert grads(cut, base=plan | inner, in_src={"x": "shard(1)"})[0] == {}

    alone: ShardingPlan = {"layer": column}
    with pytest.raises(
        ConfigError, match=r"^plan_overrides.0.out_dst.0: Replicate\(\) cannot become Partial\(sum\); go b"
    ):
        grads(base=alone, out_src=("replicate",), out_dst=("partial",))
    gathers: dict[str, Any] = {"params": {}, "in_src": {"x": "shard(2)"}, "in_dst": {"x": "replicate"}}
    assert grads(base={"": column}, **gathers, out_src=("shard(2)",)) == ({"x": summand}, {})
    assert grads(base=alone, params={"weight": "shard(1)"}, in_src={"x": "shard(2)"}) == ({}, {})
    written: dict[str, Any] = {"params": {"weight": "shard(0)", "bias": "replicate"}, "in_src": {"x": "replicate"}}
    assert grads(base={"": column}, **written, out_src=("shard(2)",)) == ({}, {"bias": summand})
    assert grads(base={"": column}, **written, out_src=("partial",)) == ({"x": summand}, {"bias": summand})
    routed = ShardingConfig(state_shardings={"weight": {}}, in_src={"x": {}}, out_src=({},))
    divided = {"params": {"weight": "shard(0)"}, "out_src": ("shard(2)",), "out_dst": ("replicate",)}
    assert grads(base={"layer": routed}, **divided) == ({"x": summand}, {})  # no other sums for it


def test_a_matrix_that_a_loss_reads() -> None:
    for matrix in ("head", None):
        rules = [PlanOverride(match="head", params={"weight": "shard(0)"})]
        try:
            merged_plan(MODULES, PLAN, rules, ReplacementContext(tp=2), output_matrix=matrix)
        except ConfigError as error:
            assert matrix and str(error) == (
                "plan_overrides.0.params: those of head are written, but a loss reads its weight as the model's plan "
                "lays it out; leave them out"
            )
        else:
            assert matrix is None


def test_what_tp_computes_in_a_way_of_its_own() -> None:
    """Over tensors that lie as derived; or each rank all of it."""

    def looked_up(module: Any, group: Any, x: Any) -> Any: ...

    plan: ShardingPlan = {
        "head": ShardingConfig(
            state_shardings={"weight": {TP: Shard(0)}},
            out_src=({TP: Partial()},),
            out_dst=({},),
            local_map=LocalMap(forward=looked_up),
        )
    }

    def head(**fields: Any) -> ShardingConfig:
        return merged_plan(MODULES, plan, [PlanOverride(match="head", **fields)], ReplacementContext(tp=2))["head"]

    assert head(out_dst=("shard(1)",)).local_map == plan["head"].local_map
    assert head(params={"weight": "replicate"}, out_src=("replicate",)).local_map == LocalMap()
    fact = r"^plan_overrides.0: the boundary of head is written, which tp computes by looked_up from what lies as the"
    for params, out in (("replicate", "partial"), ("auto", "replicate"), ("replicate", "shard(2)")):
        with pytest.raises(ConfigError, match=r"^plan_overrides.0.out_src: partial, but" if out == "partial" else fact):
            head(params={"weight": params}, out_src=(out,))


def test_what_is_computed_within_a_boundary() -> None:
    rule = PlanOverride(match="layers.0.*", local_compute_fn=Target.of(computed), region_dispatch=False)
    entry, base = merged(rule, tp=1, ep=2)["layers.0.o_proj"], PLAN["layers.*.o_proj"]
    assert entry.compute is not None and entry.compute.name == f"{__name__}.computed"
    assert (entry.local_map, entry.out_src) == (LocalMap(), base.out_src)
    assert merged(rule.derive(region_dispatch=True))["layers.0.o_proj"].local_map is None
    assert merged(rule.derive(when="cp"), ep=2) == PLAN
    with pytest.raises(
        ConfigError, match=r"plan_overrides.0: router has no derived boundary, and params, in_src, out_"
    ):
        merged(rule.derive(match="router"))


def test_an_inner_module_has_a_boundary_of_its_own() -> None:
    rule = PlanOverride(match="layers.1", inner_target="o_proj", inner_wrapper="sdpa_qkv", region_dispatch=True)
    plan = merged(rule.derive(inner_out_src="first_input"))
    assert plan["layers.1.o_proj"].out_src == ({TP: Shard(2), CP: Shard(1)},)
    assert plan["layers.1.o_proj"].local_map == LocalMap() and "layers.1" not in plan
    assert merged(rule.derive(inner_out_src={"tp": "replicate"}))["layers.1.o_proj"].out_src == ({},)
    two = PlanOverride(match="layers.1.o_proj", out_src=("partial",) * 2, out_dst=("replicate",) * 2)
    fact = r"^plan_overrides.1.inner_out_src: is one output, but out_dst of layers.\*.o_proj has 2; write an out_dst"
    with pytest.raises(ConfigError, match=fact):
        merged(two, rule.derive(inner_out_src={"tp": "replicate"}))
    outer = PlanOverride(match="layers.1", params={}, in_src={}, out_src=())
    plan = merged(outer, rule.derive(region_dispatch=False))
    assert plan["layers.1"].local_map == LocalMap() and plan["layers.1"].compute is None
    plan = merged(outer, rule.derive(region_dispatch=False), rule)
    assert plan["layers.1"].local_map is None and plan["layers.1.o_proj"].local_map == LocalMap()  # the later wins
    below = PlanOverride(match="layers.1.o_proj", local_compute_fn=Target.of(computed), region_dispatch=True)
    with pytest.raises(ConfigError) as caught:
        merged(outer, rule.derive(region_dispatch=False), below)
    assert str(caught.value) == (
        "plan_overrides.2.region_dispatch: True, but layers.* has local tensors in every mode, and so has what is "
        "below; write false"
    )
    with pytest.raises(
        ConfigError, match=r"inner_wrapper: 'sdpa_hf', which the attention of this model has no use for"
    ):
        merged(rule.derive(inner_wrapper="sdpa_hf"))


def test_a_module_that_is_not_there() -> None:
    """Also of a rule that the run leaves out."""
    absent = PlanOverride(match="haed", params={})
    inner = PlanOverride(match="layers.*", inner_target="proj", inner_wrapper="sdpa_qkv", region_dispatch=True)
    of_cp = PlanOverride(match="head", when="cp", module_type="torch.nn.Linear", replace_module=Target.of(computed))
    for degrees in ({}, {"tp": 1}):
        with pytest.raises(ConfigError) as caught:
            merged(absent, inner.derive(when="cp"), inner.derive(inner_target="o_proj"), **degrees)
        assert str(caught.value).splitlines() == [
            "plan_overrides.0.match: [HP-REPLACE-001] 'haed' names no module of the model; near: head",
            "plan_overrides.1.inner_target: there is no module layers.*.o_proj.proj; near: layers.*.o_proj, layers.*",
        ]
    assert merged(absent.derive(when="cp"), of_cp) == PLAN  # what would stand there is left out too
