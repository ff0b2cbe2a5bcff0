"""What the documents show is what the code does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hyper_parallel.config.schema import slot_table
from hyper_parallel.trainer.config import TrainerConfig
from tests.trainer.runs import tiny_config, train

ROOT = Path(__file__).resolve().parent.parent
COMPONENTS = (ROOT / "docs" / "components.md").read_text()


def snippets() -> list[str]:
    return re.findall(r"```python\n(.*?)```", COMPONENTS, re.DOTALL)


def test_the_table_of_slots_is_current() -> None:
    shown = re.search(r"<!-- slots: .*?-->\n(.*?)\n<!-- end of slots -->", COMPONENTS, re.DOTALL)
    assert shown is not None and shown[1] == slot_table(TrainerConfig).strip()


def test_a_plain_class_as_documented() -> None:
    names: dict[str, Any] = {}
    exec(snippets()[0], names)
    config = names["with_sgd"]()
    assert (config.optimizer.lr, config.optimizer.momentum) == (0.5, 0.9)
    assert list(config.cross_faults(1)) == []


def test_a_component_as_documented(tmp_path: Path) -> None:
    names: dict[str, Any] = {"__name__": __name__}
    exec(snippets()[1], names)
    config = tiny_config(tmp_path / "scaled", steps=1)
    config.loss = names["ScaledLoss"].Config(factor=2.0)
    plain = train(tiny_config(tmp_path / "plain", steps=1))
    assert train(config)[0]["loss"] == pytest.approx(2.0 * plain[0]["loss"], abs=1e-12)


def test_links_of_the_readme_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text()
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    assert len(links) >= 6
    assert [link for link in links if not (ROOT / link).exists()] == []
