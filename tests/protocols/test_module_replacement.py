"""Which modules are replaced, and what a replacement must keep."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from hyper_parallel.config.errors import ConfigError
from hyper_parallel.config.target import Target
from hyper_parallel.protocols.module_replacement import ReplacementContext, module_replacement, replace_modules
from hyper_parallel.protocols.plan_override import PlanOverride


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.weight


class FinalNorm(Norm):
    pass


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Norm(), Norm()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.norm = FinalNorm()
        self.again = self.layers[0].first


class Doubled(Norm):
    """A good one, but for what is asked for."""

    def __init__(self, norm: Norm) -> None:
        nn.Module.__init__(self)
        self.weight, self.factor = norm.weight, 2.0
        self.register_buffer("seen", norm.seen)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.factor * hidden * self.weight


@module_replacement
def doubled(module: Any, module_fqn: str, context: ReplacementContext, change: str = "") -> Any:
    new = Doubled(module)
    if change == "training":
        new.eval()
    elif change == "a new parameter":
        new.bias = nn.Parameter(torch.zeros(2))
    elif change == "no buffer":
        del new.seen
    elif change == "another tensor":
        new.weight = nn.Parameter(torch.ones(2))
    elif change == "a buffer that is not kept":
        new.register_buffer("seen", module.seen, persistent=False)
    elif change == "another argument":
        new.forward = lambda x: x
    elif change == "a forward of its instance":
        new.forward = new.forward
    elif change == "no module":
        return "norm"
    elif change == "itself":
        return module
    return new


@module_replacement
def whole_layer(module: Any, module_fqn: str, context: ReplacementContext) -> Any:
    return copy.copy(module)


def undecorated(module: Any, module_fqn: str, context: Any) -> Any:
    return module


def override(match: Any, module_type: str = "Norm", factory: Any = doubled, **more: Any) -> PlanOverride:
    change = more.pop("change", "")
    target = Target.of(factory, change=change) if change else Target.of(factory)
    return PlanOverride(match=match, module_type=f"{__name__}.{module_type}", replace_module=target, **more)


def replaced(model: nn.Module, *overrides: PlanOverride, **degrees: int) -> list[str]:
    return sorted(replace_modules(model, overrides, ReplacementContext(**degrees)))


def test_every_layer_and_every_alias_is_replaced() -> None:
    model = Model().eval()
    weights, keys = dict(model.named_parameters()), list(model.state_dict())
    names = replaced(model, override(("layers.*.first", "norm", "again"), change="training"))
    assert names == ["again", "layers.0.first", "layers.1.first", "norm"]
    assert model.again is model.layers[0].first  # one module under two names
    assert {type(model.get_submodule(name)) for name in names} == {Doubled}
    assert type(model.layers[0].second) is Norm
    assert list(model.state_dict()) == keys
    assert all(p is weights[name] for name, p in model.named_parameters())
    torch.testing.assert_close(model.norm(torch.ones(2)), torch.tensor([2.0, 2.0]))


def test_only_with_the_parallelism_that_it_is_for() -> None:
    model = Model()
    assert replaced(model, override("norm", when="cp")) == []
    assert replaced(model, override("norm", when="cp"), cp=2) == ["norm"]
    low = override("norm", when="low_precision", change="itself")
    assert replaced(model, low) == []
    with pytest.raises(ConfigError, match=r"the factory returned the module itself"):
        replaced(model, low, low_precision=True)


REFUSED: dict[str, tuple[list[PlanOverride], str]] = {
    "no such module": (
        [override("layers.*.frist")],
        r"plan_overrides.0.match: \[HP-REPLACE-001\] 'layers.\*.frist' names no module of the model; near: layers",
    ),
    "one pattern of several, of a rule for another run": (
        [override(("norm", "nrom"), when="cp")],
        r"plan_overrides.0.match: \[HP-REPLACE-001\] 'nrom' names no module of the model; near: norm",
    ),
    "another class": (
        [override("layers.0", "Norm")],
        r"plan_overrides.0.module_type: \[HP-REPLACE-001\] layers.0 is a Layer, not a Norm",
    ),
    "a derived class": (
        [override("norm", exact_type=True)],
        r"\[HP-REPLACE-001\] norm is a FinalNorm, not exactly a Norm; give its class",
    ),
    "twice": (
        [override("norm"), override("nor*")],
        r"plan_overrides.1.match: \[HP-REPLACE-001\] norm is replaced by plan_overrides.0 already",
    ),
    "under one of its names alone": (
        [override("layers.*.first")],
        r"plan_overrides.0.match: \[HP-REPLACE-001\] layers.0.first is also again, which is not named",
    ),
    "nested": (
        [override("layers.1", "Layer", whole_layer), override("layers.1.first")],
        r"plan_overrides.1.match: \[HP-REPLACE-001\] layers.1.first is inside layers.1, which is replaced too",
    ),
    **{
        change: ([override("layers.*.second"), override("norm", change=change)], rf"\[HP-REPLACE-002\] norm: {fact}")
        for change, fact in {
            "training": "training is False, and was True",
            "a new parameter": "parameter bias is new",
            "no buffer": "buffer seen is missing",
            "another tensor": "parameter weight is another tensor",
            "a buffer that is not kept": "its state_dict differs in seen",
            "another argument": "forward takes x, and took hidden",
            "a forward of its instance": "its forward is set on the instance, where parallelism puts its own",
            "no module": "the factory made a str, not a torch.nn.Module",
            "itself": "the factory returned the module itself",
        }.items()
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_all_are_replaced_or_none(name: str) -> None:
    model = Model()
    overrides, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        replaced(model, *overrides)
    assert not any(isinstance(module, Doubled) for module in model.modules())


def test_hooks_are_not_lost() -> None:
    model = Model()
    model.norm.register_forward_hook(lambda *_: None)
    with pytest.raises(ConfigError, match=r"\[HP-REPLACE-002\] norm: it has hooks, which would be lost"):
        replaced(model, override("norm"))


def test_a_factory_has_one_signature() -> None:
    with pytest.raises(TypeError, match=r"@module_replacement: .*two does not take context"):

        @module_replacement
        def two(module: Any, module_fqn: str) -> Any: ...

    with pytest.raises(TypeError, match=r"takes \*\*kwargs, in which mistakes would go unseen"):

        @module_replacement
        def any_argument(module: Any, module_fqn: str, context: Any, **kwargs: Any) -> Any: ...


def test_what_a_rule_lacks_is_told() -> None:
    told = [str(fault) for fault in PlanOverride().faults()]
    assert [fault.partition(";")[0] for fault in told] == [
        "match: it names no module",
        "replace_module: is missing, so nothing would be changed",
    ]
    rule = PlanOverride(match="norm", module_type="torch.nn.functional.relu", replace_module=Target.of(undecorated))
    assert [fault.partition(";")[0] for fault in map(str, rule.faults())] == [
        f"replace_module: {__name__}.undecorated is not decorated with @module_replacement",
        "module_type: torch.nn.functional.relu is no torch.nn.Module",
    ]
