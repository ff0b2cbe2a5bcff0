"""model/data/train files and the flags after them."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import pytest

from hyper_parallel import train
from hyper_parallel.config import overrides, yaml_file
from hyper_parallel.config.errors import ConfigError
from hyper_parallel.trainer import HyperTrainerConfig, parse_args
from hyper_parallel.trainer.legacy import read_legacy

FILE = """\
model:
  name: qwen3_moe
data:
  type: json_file
train:
  max_steps: 5
  gradient_checkpointing:
    activation_checkpoint: off
  optimizer:
    lr: 1e-4
    max_grad_norm: 1.0e9
    betas: [0.8, 0.9]
"""


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(text: str, name: str = "run.yaml") -> str:
    Path(name).write_text(text)
    return name


def parse(*words: str) -> HyperTrainerConfig:
    return parse_args(HyperTrainerConfig, words)


def faults_of(*words: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(*words)
    return [str(fault) for fault in caught.value.faults]


def test_values_take_the_type_of_their_field():
    args = parse(write(FILE))
    assert type(args) is HyperTrainerConfig
    optimizer = args.train.optimizer
    assert (optimizer.lr, optimizer.max_grad_norm, optimizer.betas) == (1e-4, 1e9, (0.8, 0.9))
    assert args.train.gradient_checkpointing.activation_checkpoint == "off"
    assert (args.train.max_steps, args.data.type, args.model.name) == (5, "json_file", "qwen3_moe")
    assert args.data.max_seq_len == 2048  # left out


@pytest.mark.parametrize(
    "words",
    [
        ("run.yaml",),
        ("--config-file", "run.yaml"),
        ("--config_file=run.yaml",),
        ("run.yaml", "--train.seed=9"),
        ("--train.seed", "9", "--config-file", "run.yaml"),
    ],
)
def test_the_file_is_a_word_or_a_flag(words):
    write(FILE)
    args = parse(*words)
    assert (args.train.max_steps, args.train.seed) == (5, 9 if "9" in str(words) else 42)


def test_without_a_file_all_is_at_its_default():
    assert parse() == HyperTrainerConfig()
    assert parse("--train.max_steps=3").train.max_steps == 3


@pytest.mark.parametrize("words", [("--train.max_steps=3",), ("--train.max_steps", "3"), ("--train.max-steps", "3")])
def test_flags_win_over_the_file(words):
    assert parse(write(FILE), *words).train.max_steps == 3


def test_flags_of_other_kinds():
    args = parse(
        "--train.debug.deterministic",
        "--train.accelerator.comm_fusion=false",
        "--train.optimizer.betas", "0.7", "0.8",
        "--model.config_overrides", "{num_experts: 4}",
        "--train.gradient_checkpointing.activation_checkpoint", "off",
        "--train.max_steps=null",
    )  # fmt: skip
    assert args.train.debug.deterministic is True
    assert args.train.accelerator.comm_fusion is False
    assert args.train.optimizer.betas == (0.7, 0.8)
    assert args.model.config_overrides == {"num_experts": 4}
    assert args.train.gradient_checkpointing.activation_checkpoint == "off"
    assert args.train.max_steps is None


def test_a_missing_file_is_an_error():
    assert faults_of("nowhere.yaml") == ["nowhere.yaml: there is no such file; give a YAML file"]
    assert faults_of("--config-file") == ["config-file: expected a file, got nothing; write --config-file FILE.yaml"]


def test_a_second_file_is_an_error():
    write(FILE)
    assert faults_of("run.yaml", "other.yaml") == [
        "other.yaml: the word belongs to no flag; write --name value or --name=value"
    ]


def test_unknown_names_are_errors_with_the_nearest_name_and_their_line():
    name = write(FILE + "    lrr: 1\n  optimzer: {lr: 1}\n  checkpoint: {save_step: 5}\n")
    assert faults_of(name) == [
        "train.optimizer.lrr: is no setting of a model/data/train file (run.yaml:13); did you mean 'lr'?",
        "train.optimzer: is no setting of a model/data/train file (run.yaml:14); did you mean 'optimizer'?",
        "train.checkpoint.save_step: is no setting of a model/data/train file (run.yaml:15); "
        "did you mean 'save_steps'?",
    ]


@pytest.mark.parametrize(
    ("group", "remedy"),
    [
        ("parallel", "train.accelerator"),
        ("optim", "train.optimizer"),
        ("memory", "train.gradient_checkpointing"),
        ("profiler", "train.profile"),
        ("runtime", "train"),
        ("seed", "train.seed"),
        ("optimizer", "train.optimizer"),
        ("max_seq_len", "data.max_seq_len"),
        ("weights_path", "model.weights_path"),
    ],
)
def test_groups_of_older_files_are_refused_with_where_they_moved(group, remedy):
    assert faults_of(write(f"{FILE}{group}: {{}}\n")) == [f"{group}: has moved (run.yaml:13); write it as {remedy}"]


def test_groups_of_other_files_are_refused():
    assert faults_of(write(FILE + "training: {}\nwheels: 4\n")) == [
        "training: is no group of a model/data/train file (run.yaml:13); did you mean 'train'?",
        "wheels: is no group of a model/data/train file (run.yaml:14); choose one of data, model, train",
    ]


def test_all_faults_at_once():
    name = write("model: qwen3\ndata:\n  max_seq_len: 10x\n  tpye: dummy\noptim: {}\ntrain:\n  seed: true\n")
    assert faults_of(name, "--train.max_step", "3", "--train.eval.eval_steps=often") == [
        "optim: has moved (run.yaml:5); write it as train.optimizer",
        "data.tpye: is no setting of a model/data/train file (run.yaml:4); did you mean 'type'?",
        "model: expected ModelArguments, got text 'qwen3' (run.yaml:1); give a mapping of its fields",
        "data.max_seq_len: expected int, got text '10x' (run.yaml:3); give a whole number",
        "train.seed: expected int, got bool true (run.yaml:7); give a whole number",
        "train.max_step: is no setting; did you mean 'train.max_steps'?",
        "train.eval.eval_steps: expected int, got text 'often'; give a whole number",
    ]


def test_lenient_leaves_unknown_names_out_with_one_warning(caplog):
    name = write(FILE + "    lrr: 1\n  wheels: {front: 2}\n")
    with caplog.at_level(logging.WARNING, logger="hyper_parallel"):
        args = parse("--legacy-lenient", "--config-file", name)
    assert args == parse(write(FILE, "clean.yaml"))
    [message] = caplog.messages
    assert message.startswith(
        "run.yaml: 2 unknown names are left out: train.optimizer.lrr (did you mean 'lr'?), train.wheels (choose one of "
    )


def test_lenient_forgives_nothing_else(caplog):
    name = write("train:\n  seed: x\n  wheels: 4\noptim: {}\n")
    with caplog.at_level(logging.WARNING, logger="hyper_parallel"):
        faults = faults_of(name, "--legacy_lenient", "--train.sed", "1")
    assert [fault.partition(":")[0] for fault in faults] == ["optim", "train.seed", "train.sed"]
    assert len(caplog.messages) == 1
    assert faults_of("--legacy-lenient", "run.yaml") == [
        "run.yaml: the word after --legacy-lenient belongs to no flag; write --name value or --name=value"
    ]


def test_the_same_through_the_file_door():
    flags, _ = overrides.parse(["--train.seed", "3"])
    args = read_legacy(yaml_file.read(write(FILE)), flags, lenient=False)
    assert args == parse("run.yaml", "--train.seed=3")


# The doors: exit codes, and nothing is created


def test_the_command_line_of_a_script_ends_it_with_code_2(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["script.py", write(FILE), "--train.max_step=3", "--train.sed=1"])
    with pytest.raises(SystemExit) as caught:
        parse_args(HyperTrainerConfig)
    assert caught.value.code == 2
    assert isinstance(caught.value, ConfigError)
    assert capsys.readouterr().err.splitlines() == [
        "train.max_step: is no setting; did you mean 'train.max_steps'?",
        "train.sed: is no setting; did you mean 'train.seed'?",
    ]
    assert os.listdir() == ["run.yaml"]


def test_help_lists_the_fields(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["script.py", "--help"])
    with pytest.raises(SystemExit) as caught:
        parse_args(HyperTrainerConfig)
    assert caught.value.code == 0
    page = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "--train.optimizer.lr-min FLOAT" in page or "--train.optimizer.lr_min FLOAT" in page
    assert "Save every this many steps, and after the last one. 0: never." in page
    assert "--config_file" in page and "--legacy_lenient" in page


@pytest.mark.parametrize(
    ("text", "flags", "expected"),
    [
        (FILE + "  global_batch_size: 0\n", [], "train.global_batch_size: 0 is below 1 (run.yaml:13); give 1 or more"),
        (
            FILE + "  accelerator: {pp_vpp: 2}\n",
            ["--train.seed=1"],
            "train.accelerator.pp_vpp: int 2 is not supported: pipelines are split by the model, and run by their own "
            "schedule (run.yaml:13); leave it out",
        ),
        (FILE + "    lrr: 1\n", [], "train.optimizer.lrr: is no setting of a model/data/train file (run.yaml:13); "),
        (FILE + "parallel: {}\n", [], "parallel: has moved (run.yaml:13); write it as train.accelerator"),
        (FILE, ["--train.accelerator.pp_vpp", "2"], "train.accelerator.pp_vpp: int 2 is not supported: "),
        (FILE, ["--train.global_batch_size", "0"], "train.global_batch_size: 0 is below 1; give 1 or more"),
        (FILE, ["--train.seed", "x"], "train.seed: expected int, got text 'x'; give a whole number"),
        (
            FILE,
            ["--train.max-steps", "5", "--training.steps", "6"],
            "training.steps: train.max_steps is the same setting and is given too; keep one of them",
        ),
    ],
)
def test_the_front_door_tells_every_fault_with_exit_code_2_and_creates_nothing(text, flags, expected, capsys):
    assert train.main(["--config-file", write(text), *flags]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(expected) and len(captured.err.splitlines()) == 1
    assert captured.out == ""
    assert os.listdir() == ["run.yaml"]


def test_old_import_paths():
    from hyper_parallel import trainer
    from hyper_parallel.trainer import config, legacy, llm_trainer

    assert config.HyperTrainerConfig is trainer.HyperTrainerConfig is legacy.HyperTrainerConfig
    assert config.parse_args is trainer.parse_args is legacy.parse_args
    assert trainer.LLMTrainer is llm_trainer.LLMTrainer
    assert legacy._legacy_to_trainer_config is legacy.legacy_to_trainer_config
    for module in (trainer, config):
        with pytest.raises(AttributeError, match="has no attribute 'LMTrainer'"):
            module.LMTrainer  # noqa: B018
