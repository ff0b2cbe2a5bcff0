"""What a rule of plan_overrides may say, as it is read."""

from __future__ import annotations

from typing import Any

import pytest

from hyper_parallel.config.target import Target
from hyper_parallel.protocols.injected_compute import inner_wrapper, local_compute
from hyper_parallel.protocols.plan_override import PlanOverride


def undecorated(mesh: Any) -> Any: ...


@pytest.mark.parametrize(
    ("fields", "faults"),
    [
        ({"match": "", "params": {}}, ["match: it names no module"]),
        ({}, ["replace_module: is missing, so nothing would be changed"]),
        (
            {"in_src": {"x": "shard"}, "out_src": ("partial", "shard(-1)"), "params": {"a": "none", "b": "partial"}},
            [
                "params.a: 'none', but a parameter is kept",
                "params.b: 'partial', but a parameter is kept",
                "in_src.x: 'shard' is no placement",
                "out_src.1: 'shard(-1)' is no placement",
            ],
        ),
        (
            {"params": "none", "module_type": "torch.nn.Linear", "exact_type": True},
            [
                "module_type: 'torch.nn.Linear' is given, but only replace_module asks for it",
                "exact_type: True is given, but only replace_module asks for it",
            ],
        ),
        (
            {"local_compute_fn": Target.of(undecorated), "region_dispatch": False},
            [f"local_compute_fn: {__name__}.undecorated is not decorated with @local_compute"],
        ),
        (
            {"inner_target": "core", "inner_wrapper": Target.of(undecorated), "region_dispatch": False},
            [f"inner_wrapper: {__name__}.undecorated is not decorated with @inner_wrapper"],
        ),
        (
            {"inner_target": "core", "params": {}},
            ["inner_wrapper: is missing beside inner_target"],
        ),
        (
            {"inner_wrapper": "sdpa"},
            [
                "inner_wrapper: 'sdpa' is no wrapper",
                "inner_target: is missing beside inner_wrapper",
                "region_dispatch: is missing beside what is injected",
            ],
        ),
        (
            {"inner_target": "core", "inner_wrapper": "flex_hf", "region_dispatch": True},
            ["inner_wrapper: flex_hf: flex attention has no backward on a CPU and no kernel"],
        ),
        (
            {"params": {}, "region_dispatch": True, "inner_out_src": "first_input"},
            [
                "region_dispatch: True is given, but nothing is injected",
                "inner_out_src: is given, but there is no inner_wrapper, so nothing asks for it",
            ],
        ),
        (
            {
                "inner_target": "core",
                "inner_wrapper": "sdpa_qkv",
                "region_dispatch": False,
                "inner_out_src": {"out": {"tp": "shard(2)"}, "cp": "shard(1)", "tp": "auto"},
            },
            [
                "inner_out_src: is given, but region_dispatch is false, so nothing asks for it",
                "inner_out_src.out: a placement by name, but the outputs that are computed here have numbers",
                "inner_out_src.cp: 'shard(1)', but over cp tensors are local in every mode",
                "inner_out_src.tp: 'auto' is no placement",
            ],
        ),
    ],
)
def test_what_is_wrong_is_told_at_once(fields: dict[str, Any], faults: list[str]) -> None:
    told = [str(fault) for fault in PlanOverride(**{"match": "layers.*.mlp", **fields}).faults()]
    assert len(told) == len(faults), told
    for fault, expected in zip(told, faults, strict=True):
        assert fault.startswith(expected)


def test_factories_have_one_signature() -> None:
    with pytest.raises(TypeError, match=r"@local_compute: .*two does not take cp_mesh, ep_mesh"):

        @local_compute
        def two(mesh: Any, tp_mesh: Any) -> Any: ...

    with pytest.raises(TypeError, match=r"@inner_wrapper: .*any_argument takes \*\*kwargs, in which mistakes would go"):

        @inner_wrapper
        def any_argument(target_module: Any, mesh: Any, tp_mesh: Any, cp_mesh: Any, ep_mesh: Any, **kw: Any) -> Any: ...
