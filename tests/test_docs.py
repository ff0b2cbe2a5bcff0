"""What the documents show is what the code does."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from hyper_parallel.config import manager
from hyper_parallel.config.errors import ConfigError
from hyper_parallel.config.plain_sections import fill_targets
from hyper_parallel.config.schema import slot_table
from hyper_parallel.trainer.config import TrainerConfig
from tests.trainer.runs import tiny_config, train

ROOT = Path(__file__).resolve().parent.parent
COMPONENTS = (ROOT / "docs" / "components.md").read_text()
YAML = (ROOT / "docs" / "yaml.md").read_text()


def snippets(text: str = COMPONENTS, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


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


def test_yaml_as_documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what is documented as the class or the mistake of each."""
    monkeypatch.chdir(tmp_path)
    strict, plain = snippets(YAML, "yaml")
    names: dict[str, Any] = {"text": strict}
    exec(snippets(YAML)[0], names)
    assert (names["tree"].model_spec.model.num_hidden_layers, names["tree"].optimizer.lr) == (2, 1e-3)

    Path("run.yaml").write_text(plain)
    tree = manager.load(TrainerConfig, ["run.yaml"], world_size=1)
    assert (tree.training.steps, tree.activation_checkpoint.mode, tree.checkpoint.enable) == (20, "full", False)

    Path("run.yaml").write_text(
        "model: {_target_: hyper_parallel.models.qwen3_moe.create_model_spec}\n"
        "training:\n  max_steps: 10x\n"
        "optimizer:\n  _target_: hyper_parallel.components.optimizer.AdamW.Config\n\n  lrr: 1\n"
        "loss:\n  _target_: my_projct.Loss\n"
    )
    with pytest.raises(ConfigError) as caught:
        manager.load(TrainerConfig, ["run.yaml"], world_size=1)
    assert str(caught.value) == snippets(YAML, "text")[0].strip()


def test_groups_whose_target_may_be_left_out_are_those_documented() -> None:
    named = re.search(r"its `_target_` may be left out: (.*?)\. The groups", YAML, re.DOTALL)
    assert named is not None
    empty = fill_targets({f.name: {} for f in dataclasses.fields(TrainerConfig)}, TrainerConfig)
    filled = {name for name, group in empty.content.items() if group}
    assert set(re.findall(r"`(\w+)`", named[1])) == filled


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))])
def test_links_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text())
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []
