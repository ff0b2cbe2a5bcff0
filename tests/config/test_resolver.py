"""resolve_root: the tree that YAML's content describes, what is called on the way, and the way back."""

from __future__ import annotations

import builtins
import datetime
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from hyper_parallel.components.checkpoint import CheckpointManager
from hyper_parallel.components.data import TextDataLoader
from hyper_parallel.components.loss import AutoCELoss, CausalLMLoss
from hyper_parallel.components.lr_scheduler import LRSchedulersContainer
from hyper_parallel.components.metrics import ConsoleLog, JsonLines, MetricsProcessor, ProgressBar, TensorBoard
from hyper_parallel.components.optimizer import AdamW
from hyper_parallel.components.profiler import Profiler
from hyper_parallel.components.tokenizer import HuggingFaceTokenizer
from hyper_parallel.components.validator import Validator
from hyper_parallel.config import manager, resolver
from hyper_parallel.config.errors import ConfigError
from hyper_parallel.config.plain_sections import fill_targets
from hyper_parallel.config.target import Target
from hyper_parallel.protocols.model_spec import ModelSpec
from hyper_parallel.trainer import config as trainer_config
from hyper_parallel.trainer.config import TrainerConfig
from recipes import qwen3_moe
from tests.config import trees, yaml_targets

ROOT = Path(__file__).resolve().parent.parent.parent
COMPLETE = ROOT / "recipes" / "yaml" / "qwen3_moe_complete.yaml"
MINE = "tests.config.yaml_targets"
MODULE = "hyper_parallel.components"
MODEL = {"_target_": "hyper_parallel.models.qwen3_moe.create_model_spec"}

GROUPS = {
    "model": ModelSpec,
    "tokenizer": HuggingFaceTokenizer.Config,
    "dataloader": TextDataLoader.Config,
    "optimizer": AdamW.Config,
    "lr_scheduler": LRSchedulersContainer.Config,
    "loss": CausalLMLoss.Config,
    "training": trainer_config.TrainingConfig,
    "parallelism": trainer_config.ParallelismConfig,
    "checkpoint": CheckpointManager.Config,
    "activation_checkpoint": trainer_config.ActivationCheckpointConfig,
    "metrics": MetricsProcessor.Config,
    "profiler": Profiler.Config,
    "validator": Validator.Config,
    "debug": trainer_config.DebugConfig,
    "compile": trainer_config.CompileConfig,
    "comm": trainer_config.CommConfig,
}
"""The sixteen fields of rfc 002's table, and what the complete file makes of each."""


@pytest.fixture(autouse=True)
def no_calls():
    yaml_targets.CALLS.clear()


def faults_of(raw, root=None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        resolver.resolve_root(raw, root)
    return [str(fault) for fault in caught.value.faults]


def test_the_complete_file_gives_every_group_its_type_and_values():
    raw = yaml.safe_load(COMPLETE.read_text())
    assert raw.keys() == {*GROUPS, "dump_folder"} and all("_target_" in raw[name] for name in GROUPS)
    tree = resolver.resolve_root(raw)
    assert type(tree) is TrainerConfig
    for name, kind in GROUPS.items():
        assert type(getattr(tree, "model_spec" if name == "model" else name)) is kind
    assert (tree.optimizer.lr, tree.optimizer.betas, tree.optimizer.eps) == (1e-3, (0.9, 0.95), 1e-8)
    assert (tree.model_spec.name, tree.model_spec.flavor) == ("qwen3_moe", "debug")
    assert tree.model_spec.model.router_aux_loss_coef == 1e-3
    assert [type(s) for s in tree.metrics.sinks] == [
        ProgressBar.Config, ConsoleLog.Config, JsonLines.Config, TensorBoard.Config
    ]  # fmt: skip
    assert tree.metrics.sinks[1].interval_steps == 5
    assert (tree.validator.dataloader.split, tree.validator.dataloader.shuffle) == ("validation", False)
    assert manager.check(tree, 1) == []


def test_the_short_file_is_the_debug_recipe():
    raw = yaml.safe_load((ROOT / "recipes" / "yaml" / "qwen3_moe_debug.yaml").read_text())
    recipe = qwen3_moe.debug()
    recipe.dump_folder = "outputs/qwen3_moe_debug"
    assert resolver.resolve_root(raw) == recipe


def test_groups_left_out_take_their_defaults():
    tree = resolver.resolve_root({"model": MODEL})
    expected = TrainerConfig(model_spec=tree.model_spec)
    assert tree == expected and type(tree.loss) is AutoCELoss.Config


def test_every_given_group_names_its_target():
    assert faults_of({"model": {}, "training": {"steps": 3}, "callbacks": [{"every": 3}]})[:2] == [
        "model: names no _target_; write `_target_: hyper_parallel.models.FAMILY.create_model_spec` in it",
        "training: names no _target_; write `_target_: hyper_parallel.config.sections.TrainingConfig` in it",
    ]


def test_faults_collect_over_groups():
    raw = {
        "model": {**MODEL, "flavour": 1},
        "loss_fn": {"_target_": "nowhere.Loss"},
        "training": {"_target_": "hyper_parallel.trainer.config.TrainingConfig", "train_iters": "x"},
        "optimizer": {"_target_": f"{MINE}.Sgd"},
    }
    assert faults_of(raw) == [
        "model.flavour: qwen3_moe has no such field; did you mean 'flavor'?",
        "loss_fn._target_: no module named 'nowhere'; install it, or start in the folder that holds it",
        "training.train_iters: expected int or None, got text 'x'; give a whole number",
    ]  # fmt: skip
    assert faults_of({"optimizer": {"_target_": f"{MINE}.Sgd"}}) == [
        f"optimizer.lr: {MINE}.Sgd needs it; write --optimizer.lr VALUE"
    ]


def test_an_unknown_group_is_told_before_any_target_is_imported(tmp_path, monkeypatch):
    (tmp_path / "imported_by_the_resolver.py").write_text("open('imported', 'w')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    raw = {"optimizer": {"_target_": "imported_by_the_resolver.X"}, "trainig": {}, "loss": {}}
    assert [fault.partition(":")[0] for fault in faults_of(raw)] == ["trainig", "loss"]
    assert os.listdir(tmp_path) == ["imported_by_the_resolver.py"]
    del raw["trainig"], raw["loss"]
    faults_of(raw)
    assert "imported" in os.listdir(tmp_path)


def test_what_is_no_mapping():
    assert faults_of([1]) == ["$: expected groups, got a list of 1; write groups, as in `model:` and `training:`"]


def test_a_function_that_makes_a_config_is_called_and_any_other_is_not():
    tree = resolver.resolve_root(
        {
            "model": {"_target_": f"{MINE}.model", "layers": 2},
            "optimizer": {"_target_": f"{MINE}.fast_adamw", "beta": "1e-1"},
            "lr_scheduler": {"_target_": f"{MINE}.Sgd", "lr": "1e-4", "params": 3},
        }
    )
    assert yaml_targets.CALLS == ["model", "fast_adamw"]
    assert tree.optimizer == AdamW.Config(lr=0.1, betas=(0.1, 0.95))
    assert tree.model_spec.model.num_hidden_layers == 2
    assert isinstance(tree.lr_scheduler, Target) and tree.lr_scheduler.configured() == {"lr": 1e-4, "params": 3}


def test_nothing_is_created_and_no_process_group_is_joined(tmp_path, monkeypatch):
    """Weights, files, tokenizers and datasets would need one of the things that fail here."""
    monkeypatch.chdir(tmp_path)

    def fail(*args, **kwargs):
        raise AssertionError(f"resolving called this with {args} {kwargs}")

    monkeypatch.setattr(torch.nn.Module, "__init__", fail)
    monkeypatch.setattr(torch.distributed, "init_process_group", fail)
    monkeypatch.setattr(torch.cuda, "init", fail)
    monkeypatch.setattr(builtins, "open", fail)
    raw = yaml.safe_load(COMPLETE.read_bytes())
    tree = resolver.resolve_root(raw)
    assert manager.check(tree, 1) == []
    assert os.listdir(tmp_path) == []


def test_sections_resolve_where_torch_cannot_be_imported():
    program = """
import sys
sys.modules["torch"] = None  # any import of it fails
from hyper_parallel.config import resolver
from hyper_parallel.config.errors import ConfigError
from tests.config.trees import Trainer
tree = resolver.resolve_root({
    "training": {"_target_": "hyper_parallel.config.sections.TrainingConfig", "max_steps": 7},
    "optimizer": {"_target_": "tests.config.trees.Optimizer.Config", "lr": "1e-4"},
    "loss_fn": {"_target_": "tests.config.targets.ScaledLoss", "kind": False},
}, Trainer.Config)
print(tree.training.steps, tree.optimizer.lr, tree.loss.kind)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "7 0.0001 off\n"), done.stderr


def round_trip(tree: TrainerConfig) -> TrainerConfig:
    return resolver.resolve_root(yaml.safe_load(resolver.to_yaml(tree)))


@pytest.mark.parametrize("recipe", [qwen3_moe.debug, qwen3_moe.pretrain_30b_a3b_64_devices])
def test_recipes_come_back_from_yaml(recipe):
    assert round_trip(recipe()) == recipe()


def test_classes_of_the_users_come_back_from_yaml():
    tree = qwen3_moe.debug()
    tree.loss = yaml_targets.ScaledLoss.Config(factor=1e-5)
    tree.optimizer = Target.of(yaml_targets.Sgd, lr=3e-4, note={"a": [1, "off", None]})
    tree.training.max_grad_norm = 1e9
    tree.validator.dataloader = Target.of(yaml_targets.unannotated_model, layers=3)
    other = round_trip(tree)
    assert other == tree
    assert (other.loss.factor, other.optimizer.lr, other.training.max_grad_norm) == (1e-5, 3e-4, 1e9)
    assert "_target_: tests.config.yaml_targets.ScaledLoss.Config" in resolver.to_yaml(tree)
    assert yaml_targets.CALLS == []


def test_text_that_looks_like_something_else_comes_back():
    tree = trees.good()
    tree.hf_assets_path, tree.optimizer.names, tree.optimizer.swap = "1e-4", ["off", "3", "null", "a: b"], "off"
    raw = yaml.safe_load(resolver.to_yaml(tree))
    del raw["model"]
    other = resolver.resolve_root(raw, trees.Trainer.Config)
    other.model_spec = tree.model_spec
    assert other == tree


def test_plain_sections_are_filled_where_they_leave_no_choice():
    filled = fill_targets(
        {
            "training": {"train_iters": 3},
            "gradient_checkpointing": {"mode": "full"},
            "checkpoint": {"enable": False},
            "optimizer": {"lr": 1},
            "loss": {"_target_": "mine.Loss"},
            "accelerator": {"tp_size": 1, "cp_size": 1},
            "fsdp_config": {"dp_shard_size": 2},
            "parallelism": {"dp_replicate": 3},
        },
        TrainerConfig,
    )
    sections = "hyper_parallel.config.sections"
    assert filled.faults == []
    assert filled.content == {
        "training": {"_target_": f"{sections}.TrainingConfig", "train_iters": 3},
        "gradient_checkpointing": {"_target_": f"{sections}.ActivationCheckpointConfig", "mode": "full"},
        "checkpoint": {
            "_target_": "hyper_parallel.components.checkpoint.manager.CheckpointManager.Config", "enable": False
        },
        "optimizer": {"lr": 1},
        "loss": {"_target_": "mine.Loss"},
        "parallelism": {
            "_target_": f"{sections}.ParallelismConfig", "dp_replicate": 3, "tp": 1, "cp": 1, "dp_shard": 2
        },
    }  # fmt: skip
    assert filled.written == {
        "parallelism.tp": "accelerator.tp_size",
        "parallelism.cp": "accelerator.cp_size",
        "parallelism.dp_shard": "fsdp_config.dp_shard_size",
    }


def test_a_switch_of_another_group_is_the_setting_that_it_stands_for():
    model = {"_target_": "mine.make_spec", "flavor": "debug"}
    filled = fill_targets({"model": model | {"validate_placement": True}}, TrainerConfig)
    assert filled.faults == []
    section = "hyper_parallel.config.sections.ParallelismConfig"
    assert filled.content == {"model": model, "parallelism": {"_target_": section, "mode": "validate"}}
    assert filled.written == {"parallelism.mode": "model.validate_placement"}
    both = {"model": model | {"validate_placement": True}, "parallelism": {"mode": "production"}}
    (fault,) = fill_targets(both, TrainerConfig).faults
    assert (fault.path, fault.fact) == (
        "model.validate_placement",
        "parallelism.mode is the same setting and is given too",
    )
    (fault,) = fill_targets({"model": model | {"validate_placement": "validate"}}, TrainerConfig).faults
    assert str(fault).startswith("model.validate_placement: expected bool, got text 'validate'")


def test_paths_as_they_were_written():
    written = {"loss": "loss_fn", "training.steps": "training.max_steps", "model_spec.model": "model"}
    paths = ["loss.factor", "loss", "training.steps", "training.seq_len", "model_spec.model.layers.0", "lossy"]
    assert [resolver.spelled(path, written) for path in paths] == [
        "loss_fn.factor", "loss_fn", "training.max_steps", "training.seq_len", "model.layers.0", "lossy"
    ]  # fmt: skip


def test_parse_training_args_is_the_same_tree_or_exit_code_2(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = "model: {_target_: hyper_parallel.models.qwen3_moe.create_model_spec}\ntraining: {train_iters: 3}\n"
    (tmp_path / "train.yaml").write_text(text)
    monkeypatch.setattr(sys, "argv", ["train_text.py", "train.yaml", "--training.max_norm=2"])
    tree = manager.parse_training_args()
    assert (tree.training.steps, tree.training.max_grad_norm) == (3, 2.0)
    with pytest.raises(AttributeError, match="sealed"):
        tree.training.steps = 4
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(SystemExit, match="2"):
        manager.parse_training_args(["train.yaml"])
    assert capsys.readouterr().err.startswith("training.global_batch_size: 8 is not a multiple of")
    assert os.listdir(tmp_path) == ["train.yaml"]


def shipped() -> list[str]:
    """Every YAML file and every recipe of the package."""
    import inspect

    import recipes
    from recipes import qwen3

    files = sorted(str(path) for path in (ROOT / "recipes" / "yaml").rglob("*.yaml"))
    modules = sorted(path.stem for path in Path(recipes.__file__).parent.glob("[a-z]*.py"))
    assert modules == ["qwen3", "qwen3_moe"]
    functions = [
        f"{module.__name__}.{name}"
        for module in (qwen3, qwen3_moe)
        for name, f in inspect.getmembers(module, inspect.isfunction)
        if f.__module__ == module.__name__
    ]
    assert len(files) >= 2 and len(functions) >= 4
    return files + functions


def test_everything_that_ships_resolves(capsys):
    assert manager.main(["--check", *shipped()]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out.count("\nmodel:\n") == len(shipped())
    assert "# recipes.qwen3_moe.pretrain_30b_a3b_64_devices, for 64 rank(s)\nmodel:\n" in printed.out


def test_check_tells_every_fault_of_every_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text("trainig: {}\n")
    (tmp_path / "b.yaml").write_text(yaml.safe_dump({"model": MODEL, "parallelism": {"dp_shard": 2}}))
    assert manager.main(["--check", "a.yaml", "b.yaml", "recipes.qwen3.nothing"]) == 2
    printed = capsys.readouterr()
    assert printed.out.startswith("# b.yaml, for 2 rank(s)\nmodel:\n")
    assert printed.err.splitlines() == [
        "trainig: TrainerConfig has no such field (a.yaml:1); did you mean 'training'?",
        "recipe: recipes.qwen3 has no 'nothing'; check the path",
    ]
    assert manager.main(["--check", "b.yaml", "--world_size", "3"]) == 2
    assert "3" in capsys.readouterr().err
    (tmp_path / "b.yaml").rename("b.txt")
    assert manager.main(["--check", "b.txt"]) == 0
    with pytest.raises(SystemExit, match="2"):
        manager.main(["--check", "b.txt", "--world_size", "0"])
    assert capsys.readouterr().err.endswith("error: argument --world_size: 0 is below 1\n")


def test_dates_and_numbered_names_come_back_and_objects_of_a_program_are_told(tmp_path):
    note = {1: datetime.date(2024, 5, 1), "b": b"x"}
    tree = resolver.resolve_root({"model": MODEL, "optimizer": {"_target_": f"{MINE}.Sgd", "lr": 1, "note": note}})
    assert resolver.resolve_root(yaml.safe_load(resolver.to_yaml(tree))) == tree
    tree.dump_folder = str(tmp_path / "run")
    tree.optimizer.note = {"a": [torch.float32]}
    with pytest.raises(ConfigError, match=r"^optimizer\.note\.a\.0: a value of type dtype cannot be saved; give text"):
        manager.save(tree)
    assert not os.path.exists(tree.dump_folder)
    tree.optimizer.note = note
    manager.save(tree)
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["optimizer"]["note"] == note


@pytest.mark.parametrize(
    ("value", "got"), [(None, "nothing"), ({"_target_": f"{MINE}.Watch"}, "a mapping of _target_"), ("x", "text 'x'")]
)
def test_what_is_no_list_of_components(value, got):
    remedy = "write each as `- _target_: ...`, or leave it out"
    assert faults_of({"callbacks": value}) == [
        f"callbacks: expected a list of groups with a _target_, got {got}; {remedy}"
    ]


def test_defaults_of_a_callable_are_its_own_matter():
    tree = resolver.resolve_root({"model": MODEL, "optimizer": {"_target_": "tests.config.targets.takes_later"}})
    assert manager.check(tree, 1) == [] and tree.optimizer.size is None
    tree.optimizer.size = "x"
    assert [fault.path for fault in manager.check(tree, 1)] == ["optimizer.size"]


@pytest.mark.parametrize(
    ("group", "target", "fault"),
    [
        ("loss", f"{MODULE}.loss.BaseLoss.Config", "BaseLoss.Config makes a BaseLoss, which is abstract; name a class"),
        ("optimizer", "hyper_parallel.config.target.Target", "Target is plain data, which builds nothing; name what"),
        (
            "model",
            "tests.config.yaml_targets.typed_for_checkers",
            "makes nothing, not a ModelSpec; name hyper_parallel",
        ),
    ],
)
def test_targets_that_make_nothing(group, target, fault):
    (found,) = faults_of({group: {"_target_": target}})
    assert found.startswith(f"{group}._target_: ") and fault in found
