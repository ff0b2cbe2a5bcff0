"""Target: any callable behaves like one of our own Configs."""

from __future__ import annotations

import copy
import pickle
import warnings
from dataclasses import dataclass
from typing import Any

import pytest

from hyper_parallel.config.configurable import ConfigNode, slot
from hyper_parallel.config.errors import ConfigError
from hyper_parallel.config.overrides import Override, apply
from hyper_parallel.config.schema import field_docs, field_types, settings
from hyper_parallel.config.target import UNSET, Target
from tests.config import targets
from tests.config.targets import MARKER, Maker, Record, ScaledLoss, needs_rate, takes_any


@dataclass(kw_only=True, slots=True)
class Tree(ConfigNode):
    loss: Any = slot(lambda: Target.of(ScaledLoss), runtime="model")


def test_parameters_become_fields_with_their_defaults():
    target = Target.of(ScaledLoss, scale=0.5)
    assert (target.scale, target.kind, target.betas, target.names) == (0.5, "on", (0.9, 0.99), ["a"])
    assert target.model is UNSET and target.marker is UNSET
    assert target.callable is ScaledLoss and target.target_path == "tests.config.targets.ScaledLoss"
    assert target.configured() == {"scale": 0.5} and target.missing(["model"]) == [] and target.missing([]) == ["model"]


def test_build_adds_what_the_signature_takes_and_leaves_defaults_to_the_callable():
    built = Target.of(ScaledLoss, scale=0.5).build(model="m", unknown=1)
    assert built.given == {
        "model": "m", "scale": 0.5, "kind": "on", "betas": (0.9, 0.99), "names": ["a"], "marker": MARKER
    }  # fmt: skip
    assert built.given["marker"] is MARKER


def test_a_value_equal_to_the_default_but_of_another_type_is_configured():
    assert Target.of(targets.optional_positional, other=False).configured() == {"other": False}
    assert Target.of(targets.optional_positional, other=0).configured() == {}


def test_a_callable_with_kwargs_takes_the_whole_run():
    assert Target.of(takes_any, extra=3).build(a=1, rate=0.2) == {"rate": 0.2, "extra": 3, "a": 1}


def test_the_run_wins_over_the_config_with_a_warning():
    with pytest.warns(UserWarning, match=r"needs_rate: the configured rate 0\.5 is not used, the run supplies it"):
        assert Target.of(needs_rate, rate=0.5).build(rate=0.1, params="p") == (0.1, "p")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Target.of(takes_any).build(rate=0.2) == {"rate": 0.2}  # a default is not configured


def test_a_missing_argument_is_named_with_what_the_run_supplies():
    message = r"targets\.needs_rate: rate is required, and neither configured nor supplied .* \(it supplies params\)"
    with pytest.raises(TypeError, match=message):
        Target.of(needs_rate).build(params="p")


@pytest.mark.parametrize(
    ("callable", "configured", "message"),
    [
        (
            ScaledLoss,
            {"scal": 1},
            "tests.config.targets.ScaledLoss.scal: tests.config.targets.ScaledLoss has no argument 'scal'; "
            "did you mean 'scale'?",
        ),
        (
            targets.positional,
            {},
            "tests.config.targets.positional: its parameter 'size' is positional-only; "
            "wrap it in a function with named parameters",
        ),
        (
            targets.takes_reserved,
            {},
            "tests.config.targets.takes_reserved: its parameter 'build' has a name that Target needs; "
            "wrap it in a function with other names",
        ),
        (3, {}, "3: is not callable; name a class or a function"),
        (dict, {}, "builtins.dict: its signature cannot be read; wrap it in a function with named parameters"),
    ],
)
def test_callables_that_cannot_be_configured(callable, configured, message):
    with pytest.raises(ConfigError) as caught:
        Target.of(callable, **configured)
    assert str(caught.value) == message


def test_optional_positional_only_parameters_are_left_alone():
    assert Target.of(targets.optional_positional, other=2).build() == 3


def test_defaults_that_are_markers_or_factories_stay_inside_the_callable():
    target = copy.deepcopy(Target.of(Record))
    assert target.build() == Record([1]) and target.build().items is not target.build().items
    assert Target.of(Record, items=[2]).build() == Record([2])


def test_a_list_default_is_not_shared():
    first = Target.of(ScaledLoss)
    first.names.append("b")
    assert Target.of(ScaledLoss).names == ["a"]
    assert first.build(model=0).given["names"] == ["a", "b"]


def test_it_is_a_config_node():
    tree = Tree(loss=Target.of(ScaledLoss, scale=0.5))
    assert [path for path, _ in tree.traverse()] == ["", "loss"]
    assert tree.to_dict() == {"loss": {"_target_": "tests.config.targets.ScaledLoss", "scale": 0.5}}
    assert Target.of(ScaledLoss, betas=(1.0, 2.0)).to_dict()["betas"] == [1.0, 2.0]
    assert Target.of(ScaledLoss, scale=0.5) == tree.loss != Target.of(ScaledLoss)
    assert tree.loss.derive(kind="off").configured() == {"scale": 0.5, "kind": "off"}
    assert tree.replace_all(Target, lambda node: Target.of(takes_any)) == 1 and tree.loss == Target.of(takes_any)
    tree.seal()
    with pytest.raises(AttributeError, match="sealed"):
        tree.loss.rate = 3
    with pytest.raises(AttributeError):
        Target.of(ScaledLoss).scal = 3


@pytest.mark.parametrize(
    "target", [Target.of(ScaledLoss, scale=0.5), Target.of(takes_any, extra=3), Target.of(Maker.make, size=4)]
)
def test_copies_and_pickles_are_equal_and_open(target):
    target.seal()
    for other in (copy.deepcopy(target), copy.copy(target), pickle.loads(pickle.dumps(target))):
        assert other == target and type(other) is type(target) and other.to_dict() == target.to_dict()
        name = next(iter(target.configured()))
        setattr(other, name, 9)
        assert other != target


def test_its_fields_are_settings_without_what_the_run_supplies():
    tree = Tree()
    assert [s.path for s in settings(tree)] == ["loss.scale", "loss.kind", "loss.betas", "loss.names", "loss.marker"]
    apply(tree, [Override("loss.scale", ("0.5",)), Override("loss.kind", ("off",)), Override("loss.betas", ("1", "2"))])
    assert tree.loss.configured() == {"scale": 0.5, "kind": "off", "betas": (1.0, 2.0)}
    with pytest.raises(ConfigError) as caught:
        apply(tree, [Override("loss.scale", ("x",)), Override("loss.scal", ("1",))])
    assert str(caught.value) == (
        "loss.scale: expected float, got text 'x'; give a number\nloss.scal: is no setting; did you mean 'loss.scale'?"
    )


def test_its_docs_come_from_the_docstring():
    assert field_docs(type(Target.of(ScaledLoss))) == {"scale": "Multiplies the loss.", "kind": "How it is summed."}


def test_a_callable_that_cannot_be_imported_again_is_a_fault():
    def local(size: int = 1) -> int:
        return size

    (fault,) = Target.of(local).faults()
    assert "<locals>.local cannot be imported again" in fault.fact
    assert not list(Target.of(takes_any).faults())


def test_annotations_that_are_text_or_for_type_checkers_only():
    types = field_types(type(Target.of(targets.takes_later)))
    assert types == {"params": Any, "size": int, "halves": list[targets.Half], "half": targets.Half | None}
    assert field_types(targets.Half) == {"part": float, "of": Any}
