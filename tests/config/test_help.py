"""--help: every setting of the composed tree, in the words of its field."""

from __future__ import annotations

from typing import Literal

import pytest

from hyper_parallel.config import manager
from hyper_parallel.config.help import metavar, written
from hyper_parallel.config.schema import settings
from tests.config import trees
from tests.config.trees import Trainer


@pytest.fixture
def page(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "140")

    def show(*argv: str) -> str:
        with pytest.raises(SystemExit) as left:
            manager.load(Trainer.Config, argv, world_size=1)
        assert left.value.code == 0
        return " ".join(capsys.readouterr().out.replace("│", " ").split())

    return show


def test_every_setting_is_there_once_with_its_doc_and_default(page):
    text = page("--recipe", "tests.config.trees.good", "--help")
    for setting in settings(trees.good()):
        assert text.count(f" --{setting.path} ") == 1, setting.path
        assert setting.doc in text
    assert "--training.steps INT|None Optimizer steps of the whole run" in text
    assert "Also --training.max_steps, --training.train_iters. (default: 10)" in text
    assert "--optimizer.betas FLOAT FLOAT Decay of two means. (default: 0.9 0.95)" in text
    assert "--optimizer.swap {on,off} Swap or not. (default: on)" in text
    assert "--compile.enable {true,false} Turn it on. (default: false)" in text
    assert "--loss.scale FLOAT Multiplies the loss. (default: 1.0)" in text
    assert "--metrics.sinks.1.folder TEXT Where. (default: b)" in text
    assert "Updates the weights." in text and "A loss of a user's project." in text
    assert "--loss.model" not in text and "--model_spec.factory" not in text


def test_the_doors_stand_at_the_top(page):
    text = page("--help")
    order = [text.index(flag) for flag in ("--model_spec FAMILY[:FLAVOR|:FOLDER]", "--recipe PACKAGE", "--dump_folder")]
    assert order == sorted(order)
    assert "python -m hyper_parallel.train --recipe recipes.qwen3_moe.debug" in text


def test_the_page_shows_the_tree_of_the_door(page):
    assert "--model_spec.sizes.width" not in page("-h")
    assert "--model_spec.sizes.width INT Width of it. (default: 4)" in page("-h", "--recipe", "tests.config.trees.good")


def test_what_a_target_needs_is_required(page):
    assert "--loss.rate FLOAT (required)" in page("--help", "--recipe", "tests.config.trees.incomplete")


def test_only_the_first_process_of_a_node_prints(page, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert page("--help") == ""


def test_words():
    assert metavar(Literal["none", "full"] | None) == "{none,full}|None"
    assert metavar(tuple[int, ...]) == "[INT ...]" and metavar(dict[str, int]) == "{NAME: VALUE}"
    values = (None, True, (1, 2.5), [], {"a": 1}, "")
    assert [written(value) for value in values] == ["None", "true", "1 2.5", "[]", "{a: 1}", "''"]
