"""Dotted paths: which part is wrong, and which missing module is to blame."""

from __future__ import annotations

import pytest

from hyper_parallel.config.errors import ConfigError
from hyper_parallel.config.imports import import_object
from tests.config.targets import Maker


def test_the_longest_module_then_attributes():
    assert import_object("tests.config.targets.Maker.make", "p") == Maker.make
    assert import_object("os.path", "p").join("a", "b")


@pytest.mark.parametrize(
    ("dotted", "fault"),
    [
        ("nowhere.thing", "p: no module named 'nowhere'; install it, or start in the folder that holds it"),
        ("tests.config.targets.Makr", "p: tests.config.targets has no 'Makr'; did you mean 'Maker'?"),
        ("tests.config.targets.Maker.mke", "p: tests.config.targets.Maker has no 'mke'; did you mean 'make'?"),
        ("tests.config.targets.zzzzzz", "p: tests.config.targets has no 'zzzzzz'; check the path"),
        ("good", "p: 'good' is no dotted path; write package.module.name"),
        ("a..b", "p: 'a..b' is no dotted path; write package.module.name"),
        (
            "broken_by_need.thing",
            "p: importing broken_by_need needs the module 'nowhere_at_all', which is not installed; "
            "install nowhere_at_all",
        ),
        (
            "package_of_mine.inner.thing",
            "p: importing package_of_mine.inner needs the module 'nowhere_at_all', which is not installed; "
            "install nowhere_at_all",
        ),
        (
            "broken_by_error.thing",
            "p: importing broken_by_error raised ZeroDivisionError: division by zero; mend broken_by_error",
        ),
        (
            "on_demand.Thing",
            "p: on_demand.Thing raised ImportError: Thing needs nowhere_at_all; mend on_demand",
        ),
        ("a_script.thing", "p: importing a_script raised SystemExit: 3; mend a_script"),
    ],
)
def test_faults(dotted, fault, tmp_path, monkeypatch):
    (tmp_path / "broken_by_need.py").write_text("import nowhere_at_all\n")
    (tmp_path / "broken_by_error.py").write_text("1 / 0\n")
    (tmp_path / "on_demand.py").write_text(
        "def __getattr__(name):\n"
        "    raise (ImportError if name == 'Thing' else AttributeError)(f'{name} needs nowhere_at_all')\n"
    )
    (tmp_path / "a_script.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "package_of_mine").mkdir()
    (tmp_path / "package_of_mine" / "inner.py").write_text("import nowhere_at_all\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        import_object(dotted, "p")
    assert str(caught.value) == fault
