"""Command-line words: forms of a flag, names of a setting, and the exact fault of every misuse."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from hyper_parallel.config.configurable import ConfigNode, setting
from hyper_parallel.config.errors import ConfigError
from hyper_parallel.config.overrides import Override, apply, parse, stray
from tests.config.trees import Spec, Trainer


def applied(*argv: str) -> Trainer.Config:
    tree = Trainer.Config(model_spec=Spec())
    overrides, positional = parse(argv)
    assert not positional
    apply(tree, overrides)
    return tree


def faults_of(*argv: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        applied(*argv)
    return [str(fault) for fault in caught.value.faults]


def test_parse():
    assert parse(["a", "--x", "1", "-2", "--y=3", "--z", "-h", "--w=a=b", "--v="]) == (
        [
            Override("x", ("1", "-2")),
            Override("y", ("3",)),
            Override("z", ()),
            Override("-h", ()),
            Override("w", ("a=b",)),
            Override("v", ("",)),
        ],
        ["a"],
    )


@pytest.mark.parametrize(
    ("argv", "path", "value"),
    [
        (["--training.max_steps=3"], "training.steps", 3),
        (["--training.max_steps", "3"], "training.steps", 3),
        (["--training.steps", "3", "--training.steps", "4"], "training.steps", 4),
        (["--training.micro-batch-size", "2"], "training.micro_batch_size", 2),
        (["--training.steps", "None"], "training.steps", None),
        (["--training.max_grad_norm", "1e9"], "training.max_grad_norm", 1e9),
        (["--compile.enable"], "compile.enable", True),
        (["--jit.enable"], "compile.enable", True),
        (["--compile.enable", "false"], "compile.enable", False),
        (["--compile.enable=yes"], "compile.enable", True),
        (["--optimizer.swap", "off"], "optimizer.swap", "off"),
        (["--optimizer.betas", "0.5", "0.6"], "optimizer.betas", (0.5, 0.6)),
        (["--optimizer.betas", "[0.5, 1]"], "optimizer.betas", (0.5, 1.0)),
        (["--optimizer.betas=[0.5,1]"], "optimizer.betas", (0.5, 1.0)),
        (["--optimizer.names", "007", "b"], "optimizer.names", ["007", "b"]),
        (["--optimizer.names", "one"], "optimizer.names", ["one"]),
        (["--optimizer.names", "[]"], "optimizer.names", []),
        (["--dump_folder", "007"], "dump_folder", "007"),
        (["--metrics.sinks.1.folder", "x"], "metrics.sinks.1.folder", "x"),
        (["--loss.scale", "0.5"], "loss.scale", 0.5),
        (["--loss_fn.scale", "0.5"], "loss.scale", 0.5),
        (["--model_spec.sizes.width", "2"], "model_spec.sizes.width", 2),
        (["--model.width", "2"], "model_spec.sizes.width", 2),
    ],
)
def test_values_arrive_in_the_type_of_the_field(argv, path, value):
    node = applied(*argv)
    for segment in path.split("."):
        node = node[int(segment)] if segment.isdecimal() else getattr(node, segment)
    assert type(node) is type(value) and node == value


@pytest.mark.parametrize(
    ("argv", "fault"),
    [
        (["--optimizer.lrr=1"], "optimizer.lrr: is no setting; did you mean 'optimizer.lr'?"),
        (["--lr", "1"], "lr: is no setting; did you mean 'optimizer.lr'?"),
        (["--trainig.steps", "1"], "trainig.steps: is no setting; did you mean 'training.steps'?"),
        (["--training.stesp", "1"], "training.stesp: is no setting; did you mean 'training.steps'?"),
        (["--qqq", "1"], "qqq: is no setting; --help lists all settings"),
        (["--training", "1"], "training: is a group of settings; set what is in it, as in --training.steps"),
        (
            ["--metrics.sinks", "x"],
            "metrics.sinks: is a group of settings; set what is in it, as in --metrics.sinks.0.folder",
        ),
        (
            ["--metrics.sinks.2.folder", "x"],
            "metrics.sinks.2.folder: is no setting; did you mean 'metrics.sinks.1.folder'?",
        ),
        (["--model_spec.factory", "x"], "model_spec.factory: is no setting; choose one of width"),
        (
            ["--loss._target_", "x"],
            "loss._target_: a class cannot be changed on the command line; choose it in a recipe or in YAML",
        ),
        (["--loss.model", "x"], "loss.model: is no setting; choose one of scale, kind, betas, names, marker"),
        (
            ["--training.max_steps", "10x"],
            "training.max_steps: expected int or None, got text '10x'; give a whole number",
        ),
        (["--training.seq-len", "10x"], "training.seq-len: expected int, got text '10x'; give a whole number"),
        (["--training.seq_len"], "training.seq_len: expected int, got nothing; write --training.seq_len VALUE"),
        (["--training.seq_len="], "training.seq_len: expected int, got nothing; give a whole number"),
        (
            ["--training.seq_len", "3", "4"],
            "4: the word after --training.seq_len belongs to no flag; write --name value or --name=value",
        ),
        (["--compile.enable", "maybe"], "compile.enable: expected bool, got text 'maybe'; give true or false"),
        (
            ["--optimizer.betas", "1"],
            "optimizer.betas: expected 2 values (float, float), got 1; give exactly that many",
        ),
        (["--optimizer.swap", "of"], "optimizer.swap: expected one of on, off, got text 'of'; did you mean 'off'?"),
        (
            ["--training.steps", "3", "--training.train_iters", "3"],
            "training.train_iters: training.steps is the same setting and is given too; keep one of them",
        ),
        (
            ["--loss.scale", "3", "--loss_fn.scale", "3"],
            "loss_fn.scale: loss.scale is the same setting and is given too; keep one of them",
        ),
        (["--x", "1"], "x: is no setting; --help lists all settings"),
    ],
)  # fmt: skip
def test_faults(argv, fault):
    assert faults_of(*argv) == [fault]


def test_all_faults_are_collected():
    argv = ["--lr", "1", "--training.seq_len", "x", "--compile.enable", "2", "--training.steps", "1", "2"]
    assert [fault.split(":")[0] for fault in faults_of(*argv)] == ["lr", "training.seq_len", "compile.enable", "2"]


def test_a_name_that_two_settings_claim_means_the_first():
    @dataclass(kw_only=True, slots=True)
    class Part(ConfigNode):
        size: int = setting(1, aliases=("old.size",))

    @dataclass(kw_only=True, slots=True)
    class Parts(ConfigNode):
        first: Any = field(default_factory=Part)
        second: Any = field(default_factory=Part)

    tree = Parts()
    apply(tree, [Override("old.size", ("5",))])
    assert (tree.first.size, tree.second.size) == (5, 1)


def test_apply_tells_what_the_user_wrote():
    overrides, _ = parse(["--training.train_iters", "3"])
    assert apply(Trainer.Config(), overrides) == {"training.steps": "training.train_iters"}


def test_stray_words():
    (fault,) = stray(["a"])
    assert str(fault) == "a: the word belongs to no flag; write --name value or --name=value"
