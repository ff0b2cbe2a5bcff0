"""Doors, rules, seal and saved copy."""

from __future__ import annotations

import json
import os
import sys
import types

import pytest
import yaml

from hyper_parallel.config import manager, resolver
from hyper_parallel.config.errors import ConfigError
from hyper_parallel.config.target import Target
from tests.config import trees
from tests.config.targets import ScaledLoss
from tests.config.trees import Trainer

RECIPE = "--recipe=tests.config.trees."
EXAMPLES = (
    "python -m hyper_parallel.train --model_spec qwen3_moe:debug or "
    "python -m hyper_parallel.train --recipe recipes.qwen3_moe.debug or "
    "python -m hyper_parallel.train --config-file run.yaml"
)


def load(*argv: str, world_size: int = 1) -> Trainer.Config:
    return manager.load(Trainer.Config, argv, world_size=world_size)


def faults_of(*argv: str, world_size: int = 1) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(*argv, world_size=world_size)
    return [str(fault) for fault in caught.value.faults]


@pytest.fixture
def families(monkeypatch):
    """A models package with one family, in the place of the real one."""

    def create_model_spec(flavor: str = "debug") -> trees.Spec:
        widths = {"debug": 2, "large": 64}
        if flavor not in widths and not os.path.isdir(flavor):
            raise ConfigError.one("model_spec", f"unknown flavor {flavor!r}", "choose one of debug, large")
        return trees.Spec(sizes=trees.Sizes(width=widths.get(flavor, 7)))

    models = types.ModuleType("hyper_parallel.models")
    models.FAMILIES = ("alpha", "alpha_moe")
    family = types.ModuleType("hyper_parallel.models.alpha")
    family.create_model_spec = create_model_spec
    family.FLAVORS = {"debug": {}, "large": {}}
    monkeypatch.setitem(sys.modules, "hyper_parallel.models", models)
    monkeypatch.setitem(sys.modules, "hyper_parallel.models.alpha", family)


def test_recipe_door_applies_flags_to_a_sealed_private_tree():
    tree = load(RECIPE + "shared", "--training.steps", "3", "--model.width", "5")
    assert (tree.training.steps, tree.model_spec.sizes.width, tree.dump_folder) == (3, 5, "shared")
    assert (trees.SHARED.training.steps, trees.SHARED.model_spec.sizes.width) == (10, 8)
    with pytest.raises(AttributeError, match="sealed"):
        tree.model_spec.sizes.width = 1


def test_model_door(families, tmp_path):
    assert load("--model_spec", "alpha").model_spec.sizes.width == 2
    assert load("--model-spec=alpha:large").model_spec.sizes.width == 64
    folder = tmp_path / "a:b"
    folder.mkdir()
    assert load("--model_spec", f"alpha:{folder}").hf_assets_path is None
    (folder / "tokenizer.json").write_text("{}")
    tree = load("--model_spec", f"alpha:{folder}")
    assert (tree.model_spec.sizes.width, tree.hf_assets_path) == (7, str(folder))
    assert load("--model_spec", f"alpha:{folder}", "--hf_assets_path", "mine").hf_assets_path == "mine"


def test_a_flavor_wins_over_a_folder_of_the_same_name(families, tmp_path, monkeypatch):
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "tokenizer.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    tree = load("--model_spec", "alpha:large")
    assert (tree.model_spec.sizes.width, tree.hf_assets_path) == (64, None)


@pytest.mark.parametrize(
    ("argv", "fault"),
    [
        ([], f"command line: nothing says what to train; give exactly one of {EXAMPLES}"),
        (["--training.steps", "3"], f"command line: nothing says what to train; give exactly one of {EXAMPLES}"),
        (
            ["--model_spec", "alpha", "--recipe", "a.b"],
            f"command line: --model_spec alpha and --recipe a.b are given; give exactly one of {EXAMPLES}",
        ),
        (
            ["--model_spec", "alpha", "--model_spec", "alpha"],
            f"command line: --model_spec alpha and --model_spec alpha are given; give exactly one of {EXAMPLES}",
        ),
        (
            ["--model_spec"],
            "model_spec: expected FAMILY[:FLAVOR|:FOLDER], got nothing; write --model_spec qwen3_moe:debug",
        ),
        (
            ["--model_spec", "alpha", "b"],
            "b: the word after --model_spec belongs to no flag; write --name value or --name=value",
        ),
        (
            ["--model_spec", "alph"],
            "model_spec: 'alph' is no model family; did you mean 'alpha'? choose one of alpha, alpha_moe",
        ),
        (["--model_spec", "zzz"], "model_spec: 'zzz' is no model family; choose one of alpha, alpha_moe"),
        (["--model_spec", "alpha:"], "model_spec: 'alpha:' ends without a flavor; write alpha, or alpha:FLAVOR"),
        (["--model_spec", "alpha:xl"], "model_spec: unknown flavor 'xl'; choose one of debug, large"),
        (["word"], "word: the word belongs to no flag; write --name value or --name=value"),
        (["run.yaml"], "run.yaml: there is no such file; give a YAML file"),
        (["--config-file", "run.yaml"], "run.yaml: there is no such file; give a YAML file"),
        (["--config_file"], "config_file: expected FILE.yaml, got nothing; write --config-file run.yaml"),
        (
            ["run.yaml", "--config-file", "other.yaml"],
            "command line: --config-file other.yaml and --config-file run.yaml are given; "
            f"give exactly one of {EXAMPLES}",
        ),
        (["--recipe", "good"], "recipe: 'good' is no dotted path; write package.module.name"),
        ([RECIPE + "goood"], "recipe: tests.config.trees has no 'goood'; did you mean 'good'?"),
        (
            ["--recipe=tests.config.targets.NOT_CALLABLE"],
            "recipe: tests.config.targets.NOT_CALLABLE is no function; name a function that returns Config",
        ),
        ([RECIPE + "wrong_return"], "recipe: tests.config.trees.wrong_return returned int; return a Config from it"),
        ([RECIPE + "refuses"], "a.b: is wrong; mend it"),
        (
            [RECIPE + "good", "--training.train_iters=0"],
            "training.train_iters: 0 is below 1; give 1 or more",
        ),
        ([RECIPE + "good", "--lr", "3"], "lr: is no setting; did you mean 'optimizer.lr'?"),
    ],
)  # fmt: skip
def test_faults(argv, fault, families):
    assert faults_of(*argv) == [fault]


def test_a_recipe_that_raises_says_where():
    (fault,) = faults_of(RECIPE + "raises")
    assert fault.startswith("recipe: tests.config.trees.raises raised ValueError: no\nluck; see ")
    assert "trees.py:" in fault
    (fault,) = faults_of(RECIPE + "exits")
    assert fault.startswith("recipe: tests.config.trees.exits raised SystemExit: 3; see ")
    (fault,) = faults_of(RECIPE + "needs_argument")
    assert "needs_argument raised TypeError: needs_argument() missing 1 required positional argument: 'size'" in fault


def test_values_of_a_recipe_are_checked_against_their_annotations():
    assert faults_of(RECIPE + "mistyped") == [
        "optimizer: expected a Config to build, got int 3; give a Config or a Target",
        "compile: expected Switches, got nothing; give a mapping of its fields",
        "training.seq_len: expected int, got text '10x'; give a whole number",
    ]


def test_values_of_a_recipe_take_the_declared_type():
    optimizer = load(RECIPE + "listed_betas").optimizer
    assert optimizer.betas == (0.5, 0.6) and type(optimizer.lr) is float


def test_what_a_target_misses_is_a_fault_unless_the_slot_supplies_it():
    assert faults_of(RECIPE + "incomplete") == [
        "optimizer.rate: tests.config.targets.needs_rate needs it; write --optimizer.rate VALUE",
        "loss.rate: tests.config.targets.needs_rate needs it; write --loss.rate VALUE",
        "loss.params: tests.config.targets.needs_rate needs it; write --loss.params VALUE",
    ]
    tree = load(RECIPE + "incomplete", "--optimizer.rate", "1", "--loss.rate=2", "--loss.params", "p")
    assert (tree.optimizer.rate, tree.loss.params) == (1.0, "p")


def test_rules_of_nodes_and_across_sections():
    assert faults_of(RECIPE + "good", "--training.seq_len", "0", "--training.gc_steps=-1") == [
        "training.seq_len: 0 is below 1; give 1 or more",
        "training.gc_steps: -1 is below 0; give 0 or more",
    ]
    assert faults_of(RECIPE + "good", "--training.seq_len", "0", world_size=3) == [
        "training.seq_len: 0 is below 1; give 1 or more",
        "training.global_batch_size: not a multiple of 3; change it",
    ]
    assert faults_of(RECIPE + "good", world_size=3) == ["training.global_batch_size: not a multiple of 3; change it"]


def test_saved_files_hold_every_group_with_its_class(tmp_path, monkeypatch):
    folder = tmp_path / "new" / "out"
    tree = load(RECIPE + "good", "--dump_folder", str(folder), "--loss.kind", "off", "--optimizer.lr", "1e-5")
    manager.save(tree)
    assert sorted(os.listdir(folder)) == ["config.json", "config.yaml"]
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    assert saved == json.loads((folder / "config.json").read_text()) == resolver.document(tree)
    assert list(saved) == [
        "model", "hf_assets_path", "dump_folder", "optimizer", "loss", "metrics", "training", "compile"
    ]  # fmt: skip
    assert saved["model"] == {"_target_": "tests.config.trees.make_spec", "width": 4}
    assert saved["loss"] == {"_target_": "tests.config.targets.ScaledLoss", "kind": "off"}
    assert saved["optimizer"] == {
        "_target_": "tests.config.trees.Optimizer.Config", "lr": 1e-5, "betas": [0.9, 0.95], "names": [], "swap": "on"
    }  # fmt: skip
    assert saved["training"]["_target_"] == "hyper_parallel.config.sections.TrainingConfig"
    assert saved["metrics"]["sinks"][1] == {"_target_": "tests.config.trees.Sink.Config", "folder": "b"}

    (folder / "config.yaml").write_text("of an earlier run")
    manager.save(tree)
    assert yaml.safe_load((folder / "config.yaml").read_text()) == saved

    monkeypatch.setenv("RANK", "1")
    manager.save(tree.derive(dump_folder=str(tmp_path / "other")))
    assert not (tmp_path / "other").exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as caught:
        manager.save(trees.good().derive(dump_folder=str(tmp_path / "file" / "out")))
    assert str(caught.value) == (
        f"dump_folder: '{tmp_path}/file/out' cannot be written: Not a directory; give a folder that you may write to"
    )


def test_loading_creates_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    load(RECIPE + "good")
    faults_of(RECIPE + "good", "--x", "1")
    assert os.listdir(tmp_path) == []


def test_report_prints_one_line_a_fault(capsys):
    manager.report(ConfigError.one("a", "two\nlines", "mend"))
    assert capsys.readouterr() == ("", "a: two lines; mend\n")


def test_target_in_a_tree_that_cannot_be_saved_is_a_fault():
    def local() -> int:
        return 1

    tree = trees.good().derive(loss=Target.of(local))
    (fault,) = manager.check(tree, 1)
    assert fault.path == "loss._target_"
    assert not manager.check(tree.derive(loss=Target.of(ScaledLoss)), 1)
