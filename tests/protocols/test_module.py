"""Every parameter is declared, or named as an offender."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from hyper_parallel.protocols.initializer import Constant, Normal
from hyper_parallel.protocols.module import Module, canonical_name
from hyper_parallel.protocols.roles import parameter_role


class Scale(Module):
    """A declared parameter, and a place for a child."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Nothing to set."""

    def __init__(self, config: Config, *, child: nn.Module | None = None) -> None:
        super().__init__(config)
        self.add_parameter("scale", 3, role="norm", init=Constant(1.0))
        if child is not None:
            self.child = child


def test_declared_parameters_pass() -> None:
    Scale.Config().build(child=Scale.Config().build()).verify_module_protocol()


def test_a_parameter_of_a_foreign_module_is_named() -> None:
    model = Scale.Config().build(child=nn.ModuleList([nn.Linear(2, 2, bias=False)]))
    with pytest.raises(TypeError, match=r"child\.0\.weight \(of Linear\)"):
        model.verify_module_protocol()


def test_an_assigned_parameter_is_named() -> None:
    model = Scale.Config().build()
    model.extra = nn.Parameter(torch.empty(2))
    with pytest.raises(TypeError, match=r"extra \(of Scale\)") as error:
        model.verify_module_protocol()
    assert "scale" not in str(error.value).split("declared for")[1].split(";")[0]


def test_wrappers_do_not_change_names() -> None:
    assert canonical_name("layers.0._checkpoint_wrapped_module._orig_mod.mlp.weight") == "layers.0.mlp.weight"


@pytest.mark.parametrize(
    ("module", "name", "role"),
    [
        (nn.Linear(2, 3), "weight", "matrix"),
        (nn.Linear(2, 3), "bias", "bias"),
        (nn.Embedding(4, 2), "weight", "embedding"),
        (nn.LayerNorm(4), "weight", "norm"),
        (nn.LayerNorm(4), "bias", "bias"),
        (nn.RMSNorm(4), "weight", "norm"),
        (nn.BatchNorm1d(4), "weight", "norm"),
        (nn.Conv1d(2, 3, 1), "weight", "matrix"),
        (nn.PReLU(3), "weight", "norm"),
        (nn.MultiheadAttention(4, 2), "in_proj_weight", "matrix"),
        (nn.MultiheadAttention(4, 2), "in_proj_bias", "bias"),
        (Scale.Config().build(), "scale", "norm"),
    ],
)
def test_roles(module: nn.Module, name: str, role: str) -> None:
    assert parameter_role(module, name) == role


def test_a_declared_role_wins_over_the_shape() -> None:
    model = Scale.Config().build()
    model.add_parameter("gate", 2, 2, role="router", init=Normal(1.0))
    assert parameter_role(model, "gate") == "router"


def test_a_parameter_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="Linear owns no parameter 'weigth'"):
        parameter_role(nn.Linear(1, 1), "weigth")
