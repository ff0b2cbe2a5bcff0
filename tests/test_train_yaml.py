"""The YAML door: every mistake is told with its path, line and remedy, ends with exit code 2, and creates nothing."""

from __future__ import annotations

import os

import pytest

from hyper_parallel import train
from hyper_parallel.trainer.hyper_trainer import HyperTrainer
from tests.config import yaml_targets

MODEL = "model: {_target_: hyper_parallel.models.qwen3_moe.create_model_spec}\n"
ADAMW = "hyper_parallel.components.optimizer.AdamW.Config"
TRAINING = "hyper_parallel.trainer.config.TrainingConfig"
MINE = "tests.config.yaml_targets"


@pytest.fixture
def start(tmp_path, monkeypatch, capsys):
    """Writes run.yaml into an empty folder and trains it; returns (exit code, lines of stderr)."""
    monkeypatch.chdir(tmp_path)
    yaml_targets.CALLS.clear()

    def write_and_train(text: str, *argv: str) -> tuple[int, list[str]]:
        (tmp_path / "run.yaml").write_text(text)
        code = train.main(["--config-file", "run.yaml", *argv])
        printed = capsys.readouterr()
        assert printed.out == ""
        return code, printed.err.splitlines()

    return write_and_train


CASES = {
    "a schedule that does not fit a run of the default length": (
        f"lr_scheduler: {{warmup_steps: 101, min_lr: 3}}\noptimizer: {{_target_: {ADAMW}, lr: 1}}\n",
        [
            "lr_scheduler.warmup_steps: 101: with training.steps 100, warm-up does not fit (run.yaml:2); "
            "let warmup_steps and decay_steps add up to 100 or fewer",
            "lr_scheduler.min_lr: 3.0 is above optimizer.lr 1.0, so the rate would rise where it should fall "
            "(run.yaml:2); lower min_lr or raise lr",
        ],
    ),
    "a rate that is none is not compared": (
        f"lr_scheduler: {{min_lr: 3}}\noptimizer: {{_target_: {ADAMW}, lr: -1}}\n",
        ["optimizer.lr: -1.0 is not above 0 (run.yaml:3); give a positive learning rate, such as 3e-4"],
    ),
    "unknown group, before any target is imported": (
        "trainig: {steps: 3}\noptimizer: {_target_: imported.Nowhere}\n",
        ["trainig: TrainerConfig has no such field (run.yaml:2); did you mean 'training'?"],
    ),
    "a group of another tree": (
        "optim: {lr: 1}\n",
        ["optim: TrainerConfig has no such field (run.yaml:2); did you mean 'optimizer'?"],
    ),
    "no _target_": (
        "optimizer:\n  lr: 1e-4\n",
        [f"optimizer: names no _target_ (run.yaml:2); write `_target_: {ADAMW}` in it"],
    ),
    "an empty group": (
        "optimizer:\n",
        [f"optimizer: is given without content (run.yaml:2); write `_target_: {ADAMW}` in it, or leave it out"],
    ),
    "no group": (
        "optimizer: adamw\n",
        [
            "optimizer: expected a group with a _target_, got text 'adamw' (run.yaml:2); "
            f"write `_target_: {ADAMW}` in it"
        ],
    ),
    "a _target_ that is no path": (
        "optimizer: {_target_: 3}\n",
        ["optimizer._target_: expected a dotted path, got int 3 (run.yaml:2); write package.module.name"],
    ),
    "a module that does not exist": (
        "optimizer: {_target_: nowhere.AdamW}\n",
        [
            "optimizer._target_: no module named 'nowhere' (run.yaml:2); "
            "install it, or start in the folder that holds it"
        ],
    ),
    "a name that the module does not have": (
        "optimizer: {_target_: hyper_parallel.components.optimizer.AdamV}\n",
        [
            "optimizer._target_: hyper_parallel.components.optimizer has no 'AdamV' (run.yaml:2); "
            "did you mean 'AdamW'?"
        ],
    ),
    "not callable": (
        f"optimizer: {{_target_: {MINE}.NOT_CALLABLE}}\n",
        [f"optimizer._target_: {MINE}.NOT_CALLABLE is int 3, not callable (run.yaml:2); name a class or a function"],
    ),
    "a component in the place of its Config": (
        "optimizer: {_target_: hyper_parallel.components.optimizer.AdamW}\n",
        [
            "optimizer._target_: hyper_parallel.components.optimizer.AdamW is built from its Config (run.yaml:2); "
            f"write {ADAMW}"
        ],
    ),
    "an unknown field": (
        f"optimizer:\n  _target_: {ADAMW}\n  lrr: 1\n",
        ["optimizer.lrr: AdamW.Config has no field 'lrr' (run.yaml:4); did you mean 'lr'?"],
    ),
    "an unknown argument": (
        f"optimizer:\n  _target_: {MINE}.Sgd\n  lrr: 1\n",
        [f"optimizer.lrr: {MINE}.Sgd has no argument 'lrr' (run.yaml:4); did you mean 'lr'?"],
    ),
    "an unknown size of the model": (
        "",
        [
            "model.num_hidden_layerz: qwen3_moe has no such field (run.yaml:1); did you mean 'num_hidden_layers'?",
        ],
    ),
    "a required argument, less what is configured and what the slot supplies": (
        f"optimizer:\n  _target_: {MINE}.Sgd\n  nesterov: true\n",
        [f"optimizer.lr: {MINE}.Sgd needs it (run.yaml:2); write --optimizer.lr VALUE"],
    ),
    "a required argument of one of several": (
        f"callbacks:\n- _target_: {MINE}.Watch\n  every: 3\n- _target_: {MINE}.Watch\n",
        [f"callbacks.1.every: {MINE}.Watch needs it (run.yaml:5); write --callbacks.1.every VALUE"],
    ),
    "a class that needs what the run does not supply": (
        "optimizer: {_target_: hyper_parallel.components.optimizer.OptimizersContainer.Config}\n",
        [
            "optimizer: OptimizersContainer needs optimizers, but the run supplies model_parts, params, model "
            "(run.yaml:2); name another class, or give that argument a default"
        ],
    ),
    "a required field": (
        f"loss_fn:\n  _target_: {MINE}.ScaledLoss.Config\n",
        ["loss_fn.factor: ScaledLoss.Config needs it (run.yaml:2); give it a value"],
    ),
    "wrong types, each told": (
        f"training:\n  _target_: {TRAINING}\n  max_steps: 10x\n  seq_len: true\n  gc_steps: 1.5\n  dtype: float8\n"
        f"optimizer:\n  _target_: {ADAMW}\n  lr: fast\n  betas: [0.9]\n",
        [
            "training.max_steps: expected int or None, got text '10x' (run.yaml:4); give a whole number",
            "training.seq_len: expected int, got bool true (run.yaml:5); give a whole number",
            "training.gc_steps: expected int, got float 1.5 (run.yaml:6); give a whole number",
            "training.dtype: expected one of float32, bfloat16, float64, got text 'float8' (run.yaml:7); "
            "did you mean 'float64'?",
            "optimizer.lr: expected float, got text 'fast' (run.yaml:10); give a number",
            "optimizer.betas: expected 2 values (float, float), got 1 (run.yaml:11); give exactly that many",
        ],
    ),
    "a wrong type of a callable's argument": (
        f"optimizer:\n  _target_: {MINE}.Sgd\n  lr: fast\n  nesterov: 1\n",
        [
            "optimizer.lr: expected float, got text 'fast' (run.yaml:4); give a number",
            "optimizer.nesterov: expected bool, got int 1 (run.yaml:5); give true or false",
        ],
    ),
    "a Config of another slot": (
        f"loss: {{_target_: {ADAMW}}}\n",
        ["loss._target_: AdamW.Config makes an AdamW, not a BaseLoss (run.yaml:2); name what makes a BaseLoss"],
    ),
    "a section in the place of another": (
        "training: {_target_: hyper_parallel.trainer.config.ParallelismConfig}\n",
        [
            "training._target_: ParallelismConfig is a ParallelismConfig, not a TrainingConfig (run.yaml:2); name "
            "hyper_parallel.config.sections.TrainingConfig, or a function annotated to return one"
        ],
    ),
    "plain data in the place of a component": (
        f"optimizer: {{_target_: {TRAINING}}}\n",
        [
            "optimizer._target_: TrainingConfig is plain data, which builds nothing (run.yaml:2); "
            "name what makes an OptimizersContainer"
        ],
    ),
    "a function that makes a number": (
        f"optimizer: {{_target_: {MINE}.number}}\n",
        [
            "optimizer._target_: number makes an int, not an OptimizersContainer (run.yaml:2); "
            "name what makes an OptimizersContainer"
        ],
    ),
    "a _target_ inside a component": (
        f"optimizer:\n  _target_: {MINE}.Sgd\n  lr: 1\n  note: {{a: [{{_target_: {MINE}.number}}]}}\n",
        [
            "optimizer.note.a.0._target_: a component inside this one cannot be chosen (run.yaml:5); "
            "remove it, and configure optimizer by its own arguments"
        ],
    ),
    "no component where a component must be": (
        "validator: {_target_: hyper_parallel.components.validator.Validator.Config, dataloader: null}\n"
        "metrics: {_target_: hyper_parallel.components.metrics.MetricsProcessor.Config, sinks: [jsonl]}\n",
        [
            "validator.dataloader: expected a group with a _target_, got nothing (run.yaml:2); give it a _target_",
            "metrics.sinks.0: expected a group with a _target_, got text 'jsonl' (run.yaml:3); give it a _target_",
        ],
    ),
    "positional-only parameters": (
        f"optimizer: {{_target_: {MINE}.positional}}\n",
        [
            f"optimizer._target_: {MINE}.positional: its parameter 'lr' is positional-only (run.yaml:2); "
            "wrap it in a function with named parameters"
        ],
    ),
    "a Config that raises": (
        f"optimizer: {{_target_: {MINE}.Unsuitable.Config}}\n",
        [f"optimizer: {MINE}.Unsuitable.Config raised ValueError: size is wrong (run.yaml:2); see "],
    ),
    "two names of a group": (
        f"loss: {{_target_: {MINE}.ScaledLoss.Config, factor: 1}}\nloss_fn: {{_target_: nowhere.Loss}}\n",
        ["loss_fn: loss is the same group and is given too (run.yaml:3); keep one of them"],
    ),
    "two names of a field": (
        f"training:\n  _target_: {TRAINING}\n  train_iters: 3\n  max_steps: 3\n",
        [
            "training.max_steps: training.train_iters is the same setting and is given too (run.yaml:5); "
            "keep one of them"
        ],
    ),
    "a name twice": (
        f"training:\n  _target_: {TRAINING}\n  steps: 3\n  steps: 4\n",
        ["training.steps: is given twice, on lines 4 and 5 (run.yaml:5); keep one of them"],
    ),
    "a rule of a section, in the user's words": (
        f"training:\n  _target_: {TRAINING}\n  train_iters: 0\n",
        ["training.train_iters: 0 is below 1 (run.yaml:4); give 1 or more"],
    ),
    "a rule across sections": (
        f"training:\n  _target_: {TRAINING}\n  global_batch_size: 10\n  local_batch_size: 4\n",
        [
            "training.global_batch_size: 10 is not a multiple of training.micro_batch_size 4 x data-parallel size 1 "
            "(run.yaml:4); set global_batch_size to 8 or 12, or change micro_batch_size"
        ],
    ),
    "groups of another tree": (
        "accelerator:\n  tp_size: 1\n  tp_sizes: 2\nfsdp_config: {dp_shard_size: x}\n",
        [
            "accelerator.tp_sizes: no setting answers to it (run.yaml:4); did you mean 'accelerator.tp_size'?",
            "fsdp_config.dp_shard_size: expected int, got text 'x' (run.yaml:5); give a whole number",
        ],
    ),
    "a setting by itself and in a group of another tree": (
        "parallelism: {tensor_parallel_degree: 1}\naccelerator: {tp_size: 1}\n",
        [
            "accelerator.tp_size: parallelism.tensor_parallel_degree is the same setting and is given too "
            "(run.yaml:3); keep one of them"
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_mistakes_in_the_file(case, start, tmp_path):
    text, faults = CASES[case]
    model = MODEL.replace("}", ", num_hidden_layerz: 3}") if "size of the model" in case else MODEL
    code, told = start(model + text)
    assert code == 2
    assert [
        line[: len(fault)] if fault.endswith("see ") else line for line, fault in zip(told, faults, strict=True)
    ] == faults
    assert os.listdir(tmp_path) == ["run.yaml"]
    assert yaml_targets.CALLS == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "run.yaml: the file is empty; say what to train, as `model:` with a `_target_`"),
        ("- model\n", "run.yaml: the file holds a list; write groups, as in `model:` and `training:`"),
        (
            "model: [1\n",
            "run.yaml: is no YAML: while parsing a flow sequence expected ',' or ']', but got '<stream end>' "
            "(run.yaml:2); mend the line",
        ),
        (
            f"model: {{_target_: {MINE}.model_of_nothing}}\n",
            f"model._target_: {MINE}.model_of_nothing returned a mapping of name, not the ModelSpec that it is "
            "annotated with (run.yaml:1); mend the function",
        ),
        (
            f"model: {{_target_: {MINE}.unannotated_model}}\n",
            "model._target_: nothing says what unannotated_model returns (run.yaml:1); annotate it with -> ModelSpec",
        ),
        (
            f"model: {{_target_: {MINE}.number}}\n",
            "model._target_: number makes an int, not a ModelSpec (run.yaml:1); name "
            "hyper_parallel.protocols.model_spec.ModelSpec, or a function annotated to return one",
        ),
        (f"model: {{_target_: {MINE}.model}}\n", f"model.layers: {MINE}.model needs it (run.yaml:1); give it a value"),
        (
            "model:\n  _target_: hyper_parallel.models.qwen3_moe.create_model_spec\n  num_attention_heads: 3\n",
            "model.num_key_value_heads: 2 does not divide num_attention_heads 3 (run.yaml:1); give a divisor",
        ),
        (
            "training: {steps: 3}\n",
            "model: no model is chosen (run.yaml); give --model_spec FAMILY[:FLAVOR or :FOLDER], or name the "
            "model's create_model_spec as the _target_ of the file's model",
        ),
    ],
)  # fmt: skip
def test_files_and_models(text, fault, start, tmp_path):
    assert start(text) == (2, [fault])
    assert os.listdir(tmp_path) == ["run.yaml"]


def test_a_factory_that_raises_says_where(start):
    code, (told,) = start(f"model: {{_target_: {MINE}.model_that_raises}}\n")
    assert code == 2
    assert told.startswith(f"model: {MINE}.model_that_raises raised KeyError: 'lost' (run.yaml:1); see ")
    assert "yaml_targets.py:" in told


@pytest.mark.parametrize(
    ("argv", "faults"),
    [
        (["--optimizer.lrr=1"], ["optimizer.lrr: is no setting; did you mean 'optimizer.lr'?"]),
        (["--optimizer.lr", "fast"], ["optimizer.lr: expected float, got text 'fast'; give a number"]),
        (
            [f"--optimizer._target_={MINE}.Sgd"],
            ["optimizer._target_: a class cannot be changed on the command line; choose it in a recipe or in YAML"],
        ),
        (["--train_iters=0"], ["train_iters: is no setting; did you mean 'training.train_iters'?"]),
        (["--training.max_steps=0"], ["training.max_steps: 0 is below 1; give 1 or more"]),
        (["--legacy-lenient"], ["legacy-lenient: run.yaml is no file of groups model, data and train; remove it"]),
    ],
)
def test_mistakes_on_the_command_line(argv, faults, start, tmp_path):
    text = MODEL + f"optimizer: {{_target_: {ADAMW}, lr: 1e-4}}\ntraining: {{max_steps: 7}}\n"
    assert start(text, *argv) == (2, faults)
    assert os.listdir(tmp_path) == ["run.yaml"]


@pytest.fixture
def configs(monkeypatch):
    """HyperTrainer without its parts; the configs that it was built from."""
    built: list = []
    monkeypatch.setattr(HyperTrainer, "__init__", lambda self, config: built.append(config))
    monkeypatch.setattr(HyperTrainer, "train", lambda self: None)
    monkeypatch.setattr(HyperTrainer, "close", lambda self, failed=False: None)
    return built


def test_flags_follow_the_file(start, configs):
    text = (
        MODEL
        + f"optimizer: {{_target_: {ADAMW}, lr: 1e-4}}\ntraining: {{max_steps: 7}}\nfsdp_config: {{dp_shard_size: 1}}\n"
    )
    assert start(text, "--training.train_iters=10", "--optimizer.lr", "2e-4", "--model.num_hidden_layers", "2") == (
        0,
        [],
    )
    (config,) = configs
    assert (config.training.steps, config.optimizer.lr) == (10, 2e-4)
    assert (config.model_spec.model.num_hidden_layers, config.parallelism.dp_shard) == (2, 1)


def test_a_flag_gives_what_a_class_of_the_users_needs(start, configs):
    assert start(MODEL + f"optimizer: {{_target_: {MINE}.Sgd}}\n", "--optimizer.lr", "2e-4") == (0, [])
    assert (configs[0].optimizer.target_path, configs[0].optimizer.lr) == (f"{MINE}.Sgd", 2e-4)
    assert yaml_targets.CALLS == []


def test_the_file_may_stand_without_its_flag(start, configs, tmp_path):
    (tmp_path / "other.yml").write_text(MODEL)
    assert train.main(["other.yml", "--training.train_iters=10"]) == 0
    assert configs[0].training.steps == 10


def test_the_old_package_is_ours_with_one_line_about_it(start, configs, caplog):
    text = (
        MODEL.replace("hyper_parallel", "hyper_models")
        + "training: {_target_: hyper_models.trainer.config.TrainingConfig}\n"
    )
    assert start(text)[0] == 0
    assert [record.getMessage() for record in caplog.records] == [
        "deprecated: model._target_ hyper_models.models.qwen3_moe.create_model_spec, training._target_ "
        "hyper_models.trainer.config.TrainingConfig: the package is hyper_parallel now, write its name in the file"
    ]
    assert type(configs[0].training).__module__ == "hyper_parallel.config.sections"


def test_help_behind_a_file_shows_the_fields_of_the_classes_that_it_chose(start, tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(MODEL + f"optimizer: {{_target_: {MINE}.Sgd, lr: 0.5}}\n")
    with pytest.raises(SystemExit, match="0"):
        train.main(["run.yaml", "--help"])
    shown = capsys.readouterr().out
    assert "--optimizer.nesterov" in shown and "(default: 0.5)" in shown
    assert "--optimizer.weight_decay" not in shown and "--optimizer.params" not in shown
