"""Facts about Config classes: types, docs through the MRO, aliases, settings of a composed tree, the table of slots."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from hyper_parallel.config.configurable import Buildable, ConfigNode, Configurable, setting, slot
from hyper_parallel.config.schema import field_docs, field_types, settings, slot_table


class Engine(Configurable):
    """Moves."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        power: int = setting(1, aliases=("strength", "old.engine_power"))
        """How strong
        it is."""
        fuel: Literal["a", "b"] = "a"
        """What it burns."""

    def __init__(self, config: Config) -> None:
        self.config = config


class Turbo(Engine):
    @dataclass(kw_only=True, slots=True)
    class Config(Engine.Config):
        boost: float = 1.0
        fuel: Literal["a", "b"] = "b"
        """Turbo fuel."""


class Silent(Turbo):
    pass


@dataclass(kw_only=True, slots=True)
class Sizes(ConfigNode):
    width: int
    """Width."""


@dataclass(kw_only=True, slots=True)
class Model(ConfigNode):
    name: str = setting(hidden=True)
    sizes: Sizes | None = setting(None, inline=True)
    function: Callable[..., Any] | None = None
    kind: type[Engine] | None = None


@dataclass(kw_only=True, slots=True)
class Car(ConfigNode):
    engine: Buildable[Engine] = slot(Turbo.Config, runtime="road driver", aliases=("motor",))
    """Moves it."""
    spare: Buildable[Engine] | None = slot(None)
    model: Model | None = setting(None, aliases=("spec",))
    wheels: tuple[Buildable[Engine], ...] = field(default_factory=lambda: (Engine.Config(), Turbo.Config()))
    color: str = "red"


def test_types_are_resolved_and_docs_come_through_the_mro():
    assert field_types(Turbo.Config) == {"power": int, "fuel": Literal["a", "b"], "boost": float}
    assert field_docs(Turbo.Config) == {"power": "How strong it is.", "fuel": "Turbo fuel."}
    assert field_docs(Engine.Config)["fuel"] == "What it burns."
    assert field_docs(Silent.Config) == field_docs(Turbo.Config)


def test_docs_of_a_class_inside_a_function():
    @dataclass(kw_only=True, slots=True)
    class Local(ConfigNode):
        a: int = 1
        """Doc of a."""

    assert field_docs(Local) == {"a": "Doc of a."}


def test_settings_are_those_of_the_classes_in_the_slots():
    found = {s.path: s for s in settings(Car(model=Model(name="m", sizes=Sizes(width=3))))}
    assert list(found) == [
        "engine.power", "engine.fuel", "engine.boost", "model.sizes.width",
        "wheels.0.power", "wheels.0.fuel", "wheels.1.power", "wheels.1.fuel", "wheels.1.boost", "color",
    ]  # fmt: skip
    assert found["engine.power"].names[0] == "engine.power"
    assert set(found["engine.power"].names[1:]) == {
        "engine.strength", "motor.power", "motor.strength", "old.engine_power"
    }  # fmt: skip
    assert set(found["model.sizes.width"].names) == {
        "model.sizes.width", "spec.sizes.width", "model.width", "spec.width"
    }  # fmt: skip
    assert (found["engine.fuel"].value, found["engine.fuel"].doc) == ("b", "Turbo fuel.")
    assert found["wheels.0.power"].annotation is int


def test_slot_table():
    assert slot_table(Car) == (
        "| slot | makes | default | runtime arguments |\n"
        "|---|---|---|---|\n"
        "| `engine` (also `motor`) | Engine | `Turbo.Config` | `road` `driver` |\n"
        "| `spare` | Engine | none |  |\n"
    )


def test_importing_all_of_config_imports_no_framework():
    code = """
import importlib, pkgutil, sys
import hyper_parallel.config
for module in pkgutil.iter_modules(hyper_parallel.config.__path__, 'hyper_parallel.config.'):
    importlib.import_module(module.name)
print([name for name in ('torch', 'numpy', 'transformers') if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
