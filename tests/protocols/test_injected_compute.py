"""How what is computed in the place of a forward is made and called."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from hyper_parallel.config.errors import ConfigError
from hyper_parallel.config.target import Target
from hyper_parallel.protocols.injected_compute import InjectedCompute, inner_wrapper, local_compute

DIMS: Any = SimpleNamespace(meshes=["all"], tp_mesh="tp", cp_mesh=None, ep_mesh="ep")


class Layer(nn.Module):
    def forward(self, x: Any, scale: Any = 1, mask: Any = None, **kwargs: Any) -> Any: ...


class Attention(nn.Module):
    def forward(self, x: Any, *, documents: Any = None) -> Any: ...


@local_compute
def computed(mesh: Any, tp_mesh: Any, cp_mesh: Any, ep_mesh: Any, makes: str = "meshes") -> Any:
    return {
        "meshes": lambda module, x, *args, **kwargs: (module, x, args, kwargs, (mesh, tp_mesh, cp_mesh, ep_mesh)),
        "a number": 3,
        "too few": lambda module, x: x,
        "no kwargs": lambda module, *args: args,
    }[makes]


@inner_wrapper
def wrapped(target_module: Any, mesh: Any, tp_mesh: Any, cp_mesh: Any, ep_mesh: Any) -> Any:
    return lambda *args, **kwargs: (target_module, args, kwargs)


def test_is_called_by_position_with_the_module_and_made_with_the_meshes() -> None:
    layer = Layer()
    forward = InjectedCompute(factory=Target.of(computed), kind="local_compute", path="").forward_of(layer, "", DIMS)
    assert forward(1, mask=3, scale=2, more=4) == (layer, 1, (2, 3), {"more": 4}, ("all", "tp", None, "ep"))
    assert forward(x=1, mask=3) == (layer, 1, (1, 3), {}, ("all", "tp", None, "ep"))  # defaults fill the gap
    assert forward(1) == (layer, 1, (1, None), {}, ("all", "tp", None, "ep"))
    forward = InjectedCompute(factory=Target.of(wrapped), kind="inner_wrapper", path="").forward_of(layer, "", DIMS)
    assert forward(scale=2, x=1) == (layer, (1, 2, None), {})


@pytest.mark.parametrize(
    ("makes", "fact"),
    [
        ("a number", "the factory made a int, not a function; return a function of the arguments of the module's for"),
        ("too few", "the function takes x, and is called with x, scale, mask: too many positional arguments"),
        ("no kwargs", "the function takes no **kwargs, and the module is called with some"),
    ],
)
def test_what_cannot_be_called_as_the_module_is_refused(makes: str, fact: str) -> None:
    compute = InjectedCompute(factory=Target.of(computed, makes=makes), kind="local_compute", path="rule")
    with pytest.raises(ConfigError) as caught:
        compute.forward_of(Layer(), "layers.0", DIMS)
    assert f"rule: [HP-REPLACE-002] layers.0: {fact}" in str(caught.value)


def test_what_goes_by_name_alone_is_taken_by_name() -> None:
    forward = InjectedCompute(factory=Target.of(wrapped), kind="inner_wrapper", path="")
    layer = Attention()
    assert forward.forward_of(layer, "", DIMS)(1) == (layer, (1,), {"documents": None})
    compute = InjectedCompute(factory=Target.of(computed, makes="too few"), kind="local_compute", path="rule")
    fact = r"the function takes x, and is called with x, documents=: got an unexpected keyword argument 'documents'; re"
    with pytest.raises(ConfigError, match=fact):
        compute.forward_of(layer, "layers.0", DIMS)
