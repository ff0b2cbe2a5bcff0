"""The constraints of rfc 000, section 8, at the door of `train_lm`: each case is named by its rule.

What the file shows is refused before anything is made. What a part of the user's own does is told when it is built, or
in the step in which it does it.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from hyper_parallel import train
from hyper_parallel.components.data.causal_batch import causal_batch
from hyper_parallel.trainer import base
from hyper_parallel.trainer.base import BaseTrainer
from hyper_parallel.trainer.step import loss_scales
from tests.models.auto.folders import save, tiny_model

PARTS = "tests.trainer.text_parts"
MODEL = """\
model:
  _target_: hyper_parallel.models.auto.HyperAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: ../qwen3_moe
"""
TRAINING = "training: {max_steps: 1, seq_len: 16, global_batch_size: 4, micro_batch_size: 2}\n"
FSDP = "fsdp_config: {dp_shard_size: 1}\n"
DATASET = f"dataset: {{_target_: {PARTS}.CountingDataset, rows: 8}}\n"
COLLATE = "collate_fn: {_target_: hyper_parallel.components.data.MakeMicroBatchCollator}\n"
LOADER = "dataloader: {_target_: hyper_parallel.components.data.build_dataloader}\n"
LOSS = f"loss_fn: {{_target_: {PARTS}.ScaledModelOutputLoss, scale: 0.5}}\n"
OPTIMIZER = f"optimizer: {{_target_: {PARTS}.SGDOptimizer, lr: 1.0e-3}}\n"
REST = "checkpoint: {enabled: false}\n"
EVALUATE = "hyper_parallel.trainer.callbacks.EvaluateCallback.Config"
YAML = MODEL + TRAINING + FSDP + DATASET + COLLATE + LOADER + LOSS + OPTIMIZER + REST

Changes = dict[str, str]
"""Text of the file -> what stands in its place."""


def loss(path: str) -> Changes:
    return {LOSS: f"loss_fn: {{_target_: {path}}}\n"}


def collate(name: str) -> Changes:
    return {COLLATE: f"collate_fn: {{_target_: {PARTS}.{name}}}\n"}


def accelerator(sizes: str) -> Changes:
    return {FSDP: f"accelerator: {{{sizes}}}\n"}


def config_of(folder: str) -> str:
    return MODEL.replace("from_pretrained", "from_config").replace(
        "pretrained_model_name_or_path: ../qwen3_moe", f"config: ../{folder}"
    )


REFUSED: dict[str, tuple[Changes, int, str]] = {
    # rule: (changes, ranks, all that is printed, which may go on behind a last ...)
    "config: a model": (
        {MODEL: ""},
        1,
        "model: no model is chosen (run.yaml); give --model_spec FAMILY[:FLAVOR or :FOLDER], or name the model's "
        "create_model_spec as the _target_ of the file's model",
    ),
    "config: a model's target": (
        {"  _target_: hyper_parallel.models.auto.HyperAutoModelForCausalLM.from_pretrained\n": ""},
        1,
        "model: names no _target_ (run.yaml:1); write `_target_: hyper_parallel.models.FAMILY.create_model_spec` in it",
    ),
    "config: an optimizer's target": (
        {OPTIMIZER: "optimizer: {lr: 1.0e-3}\n"},
        1,
        "optimizer: names no _target_ (run.yaml:10); write `_target_: "
        "hyper_parallel.components.optimizer.AdamW.Config` in it",
    ),
    "config: an optimizer": (
        {OPTIMIZER: "optimizer:\n"},
        1,
        "optimizer: is given without content (run.yaml:10); write `_target_: "
        "hyper_parallel.components.optimizer.AdamW.Config` in it, or leave it out",
    ),
    "config: a dataset": (
        {DATASET: ""},
        1,
        "collate_fn: is given, but dataset is not (run.yaml:6); give a dataset, or leave it out\n"
        "dataloader: hyper_parallel.components.data.dataset_loader.build_dataloader needs dataset, collate_fn, "
        "batch_size, but dataset is not given (run.yaml:7); give a dataset, or leave it out",
    ),
    "config: a dataset of a dataloader": (
        {DATASET: "", COLLATE: ""},
        1,
        "dataloader: hyper_parallel.components.data.dataset_loader.build_dataloader needs dataset, collate_fn, "
        "batch_size, but dataset is not given (run.yaml:6); give a dataset, or leave it out",
    ),
    "config: a collate_fn": (
        {COLLATE: ""},
        1,
        "collate_fn: is missing, but dataset is given (run.yaml); give "
        "hyper_parallel.components.data.MakeMicroBatchCollator, or one of yours",
    ),
    "config: a dataloader": (
        {LOADER: ""},
        1,
        "dataloader: TextDataLoader.Config reads for itself, but dataset is given (run.yaml); give "
        "hyper_parallel.components.data.build_dataloader, or leave dataset out",
    ),
    "config: steps above 0": (
        {"max_steps: 1": "max_steps: 0"},
        1,
        "training.max_steps: 0 is below 1 (run.yaml:4); give 1 or more",
    ),
    "config: epochs above 0": (
        {"max_steps: 1": "num_train_epochs: -1"},
        1,
        "training.num_train_epochs: -1 is below 1 (run.yaml:4); give 1 or more",
    ),
    "config: steps or epochs": (
        {"max_steps: 1": "max_steps: 1, num_train_epochs: 1"},
        1,
        "training.num_train_epochs: 1 is given beside steps 1 (run.yaml:4); set one of the two",
    ),
    "config: a callable": (
        loss(f"{PARTS}.__doc__"),
        1,
        "loss_fn._target_: tests.trainer.text_parts.__doc__ is text 'Parts of a run as users write them, chosen by "
        "`_target_` from outside the package.', not callable (run.yaml:9); name a class or a function",
    ),
    "config: an argument that it has not": (
        {"scale: 0.5": "scal: 0.5"},
        1,
        "loss_fn.scal: tests.trainer.text_parts.ScaledModelOutputLoss has no argument 'scal' (run.yaml:9); did you "
        "mean 'scale'?",
    ),
    "config: an argument that it needs": (
        {", lr: 1.0e-3": ""},
        1,
        "optimizer.lr: tests.trainer.text_parts.SGDOptimizer needs it (run.yaml:10); write --optimizer.lr VALUE",
    ),
    "config: a loss that makes no module": (
        loss(f"{PARTS}.no_loss"),
        1,
        "loss_fn._target_: no_loss makes a float, not a BaseLoss (run.yaml:9); name what makes a BaseLoss",
    ),
    "config: a loss that is called otherwise": (
        loss("torch.nn.CrossEntropyLoss"),
        1,
        "loss_fn: CrossEntropyLoss.forward takes no model_output and labels (run.yaml:9); derive a module from it "
        "with forward(*, model_output, labels)",
    ),
    "topology: tp divides the ranks": (
        accelerator("tp_size: 2"),
        3,
        "accelerator.tp_size: dp_replicate 1 x tp 2 = 2 does not divide the world size 3 (run.yaml:5); set divisors"
        " of 3, or start a multiple of 2 ranks",
    ),
    "topology: tp x cp divides the ranks": (
        accelerator("tp_size: 2, cp_size: 2") | {LOSS: ""},
        6,
        "accelerator.cp_size: dp_replicate 1 x cp 2 x tp 2 = 4 does not divide the world size 6 (run.yaml:5); set "
        "divisors of 6, or start a multiple of 4 ranks",
    ),
    "topology: shards divide the ranks": (
        {"dp_shard_size: 1": "dp_shard_size: 3"},
        8,
        "fsdp_config.dp_shard_size: dp_replicate 1 x dp_shard 3 = 3 ranks, but the world size is 8 (run.yaml:5); "
        "start 3 ranks (torchrun --nproc_per_node=3), or set dp_shard -1 to take what is left\n"
        "training.global_batch_size: 4 is not a multiple of training.micro_batch_size 2 x data-parallel size 3 "
        "(run.yaml:4); set global_batch_size to 6, or change micro_batch_size",
    ),
    "topology: no pipeline of such a model": (
        accelerator("pp_size: 2"),
        2,
        "model.pipelining_fn: None: this family cannot be taken apart; parallelism.pp is 2 (run.yaml:1); change it,"
        " or set parallelism.pp 1",
    ),
    "topology: ep divides the ranks": (
        accelerator("ep_size: 2"),
        1,
        "accelerator.ep_size: 2 does not divide dp_shard 1 x cp 1 = 1, the ranks that experts are spread over "
        "(run.yaml:5); set 1, or start so many ranks that dp_shard x cp is a multiple of 2",
    ),
    "topology: ep divides the experts": (
        accelerator("ep_size: 3") | {"global_batch_size: 4": "global_batch_size: 6"},
        3,
        "accelerator.ep_size: 3 does not divide the model's num_experts 4 (run.yaml:5); set a divisor of 4",
    ),
    "batch: divides into micro-batches": (
        {"global_batch_size: 4": "global_batch_size: 5"},
        1,
        "training.global_batch_size: 5 is not a multiple of training.micro_batch_size 2 x data-parallel size 1 "
        "(run.yaml:4); set global_batch_size to 4 or 6, or change micro_batch_size",
    ),
    "batch: divides over the ranks": (
        {"dp_shard_size: 1": "dp_shard_size: 4"},
        4,
        "training.global_batch_size: 4 is not a multiple of training.micro_batch_size 2 x data-parallel size 4 "
        "(run.yaml:4); set global_batch_size to 8, or change micro_batch_size",
    ),
    "closed: an unknown field": (
        {"max_steps: 1": "max_stps: 1"},
        1,
        "training.max_stps: TrainingConfig has no field 'max_stps' (run.yaml:4); did you mean 'gc_steps'?",
    ),
    "closed: an unknown group": (
        {"checkpoint:": "checkpint:"},
        1,
        "checkpint: TrainerConfig has no such field (run.yaml:11); did you mean 'checkpoint'?",
    ),
    "closed: an unknown field of a group of another tree": (
        {"dp_shard_size: 1": "dp_shard_size: 1, comm_fusion: true"},
        1,
        "fsdp_config.comm_fusion: no setting answers to it (run.yaml:5); did you mean 'fsdp_config.dp_shard_size'?",
    ),
    "closed: a wrong type": (
        {"max_steps: 1": "max_steps: 10x"},
        1,
        "training.max_steps: expected int or None, got text '10x' (run.yaml:4); give a whole number",
    ),
    "closed: no such module": (
        {"text_parts.SGDOptimizer": "text_prts.SGDOptimizer"},
        1,
        "optimizer._target_: tests.trainer has no 'text_prts' (run.yaml:10); did you mean 'text_parts'?",
    ),
    "closed: no such name": (
        {"SGDOptimizer": "SGDOptimiser"},
        1,
        "optimizer._target_: tests.trainer.text_parts has no 'SGDOptimiser' (run.yaml:10); did you mean "
        "'SGDOptimizer'?",
    ),
    "closed: sizes of the model": (
        accelerator("tp_size: 8"),
        8,
        "accelerator.tp_size: 8 does not divide the model's num_attention_heads 4 (run.yaml:5); set a divisor of 4\n"
        "accelerator.tp_size: 8 does not divide the model's num_key_value_heads 2 (run.yaml:5); set a divisor of 2",
    ),
    "closed: tp without a plan": (
        {MODEL: config_of("gemma")} | accelerator("tp_size: 2"),
        2,
        "model: module model.embed_tokens (GemmaTextScaledWordEmbedding) has no place in a parallel plan for its "
        "weight (run.yaml:1); set tp, cp and ep 1, or choose another model",
    ),
    "closed: another architecture": (
        {MODEL: config_of("mistral")},
        1,
        "model: module MistralForCausalLM has a sliding window of 8 tokens, which is not implemented (run.yaml:1); "
        "choose another model: this one is not understood",
    ),
    "closed: a folder that is none": (
        {"../qwen3_moe": "elsewhere"},
        1,
        "model.pretrained_model_name_or_path: elsewhere is no folder (run.yaml:3); download it: hf download elsewhere",
    ),
    "closed: a type that training gives": (
        {"../qwen3_moe\n": "../qwen3_moe\n  torch_dtype: bfloat16\n"},
        1,
        "model.torch_dtype: 'bfloat16', but training.dtype, or the types of mixed precision, says that "
        "(run.yaml:4); leave it out here",
    ),
    "closed: evaluation without data": (
        {REST: f"{REST}validator: {{enable: true}}\n"},
        1,
        "validator.dataloader.path: not given, but dataset is given: the embedded corpus is not held-out data of "
        "that (run.yaml:12); give a file of held-out text",
    ),
    "closed: evaluation that is off": (
        {REST: f"{REST}callbacks:\n- {{_target_: {EVALUATE}, eval_steps: 2}}\n"},
        1,
        "callbacks.0.eval_steps: 2, but validator.enable is False, so there is no held-out data (run.yaml:13); set "
        "validator.enable True",
    ),
    "closed: a checkpoint that is not there": (
        {"enabled: false": "load_from: nowhere"},
        1,
        "checkpoint.load_from: nowhere is missing (run.yaml:11); give a folder that transformers' save_pretrained()"
        " wrote, or the dump folder of a run with checkpoints",
    ),
    "closed: adapters": (
        {REST: f"{REST}peft: {{r: 8}}\n"},
        1,
        "peft: TrainerConfig has no such field (run.yaml:12); choose one of ...",
    ),
    "closed: packing of another tree": (
        {REST: f"{REST}packed_sequence: {{enable: true}}\n"},
        1,
        "packed_sequence: TrainerConfig has no such field (run.yaml:12); choose one of ...",
    ),
    "closed: mixed precision of another tree": (
        {REST: f"{REST}mixed_precision: {{enable: true}}\n"},
        1,
        "mixed_precision: TrainerConfig has no such field (run.yaml:12); choose one of ...",
    ),
    "closed: logging of another tree": (
        {REST: f"{REST}wandb: {{enabled: true}}\n"},
        1,
        "wandb: TrainerConfig has no such field (run.yaml:12); choose one of ...",
    ),
}
ENDED: dict[str, tuple[Changes, int, str]] = {
    # rule: (changes, exit code, all that is printed)
    "config: a length where there are no steps": (
        {
            "max_steps: 1": "num_train_epochs: 1",
            "CountingDataset": "CountingStream",
            "build_dataloader": "build_dataloader, shuffle: false",
        },
        2,
        "training.epochs: 1 is given, but nobody knows the length of streamed data; give training.steps instead",
    ),
    "config: a row where there are no steps": (
        {"max_steps: 1": "num_train_epochs: 1", "rows: 8": "rows: 0"},
        2,
        "dataset: it has 0 rows, fewer than training.global_batch_size 4; give more data, or a smaller "
        "global_batch_size",
    ),
    "config: an item where there are no steps": (
        {"max_steps: 1": "num_train_epochs: 1", LOADER: f"dataloader: {{_target_: {PARTS}.no_items}}\n"},
        2,
        "dataloader: it has no item, on one rank at least; give more data, or fewer ranks",
    ),
    "config: a shuffled stream": (
        {"CountingDataset": "CountingStream"},
        2,
        "dataloader.shuffle: True, but CountingStream has no length, so it gives rows in its own order; set False, "
        "and shuffle in the dataset",
    ),
    "config: rows left over": (
        {"rows: 8": "rows: 7", "build_dataloader": "build_dataloader, drop_last: false"},
        2,
        "dataloader.drop_last: False, but 3 of 7 rows do not fill a step at the end of an epoch; set True, or give "
        "rows that fill all steps",
    ),
    "config: a loss that makes no module": (
        loss(f"{PARTS}.number"),
        2,
        "loss: the target made a float, which is neither a torch.nn.Module nor a BaseLoss; derive it from "
        "torch.nn.Module, with forward(*, model_output, labels)",
    ),
    "config: a loss to train": (
        loss(f"{PARTS}.TrainedLoss"),
        2,
        "loss: TrainedLoss has parameters to train (temperature), which no optimizer would; set requires_grad "
        "False, or put them in the model",
    ),
    "config: an optimizer that is none": (
        {OPTIMIZER: f"optimizer: {{_target_: {PARTS}.number}}\n"},
        2,
        "optimizer: the target made a float, which is neither a torch.optim.Optimizer nor a container; return one, "
        "or an object whose get_optimizer() does",
    ),
    "config: an optimizer of another model": (
        {OPTIMIZER: f"optimizer: {{_target_: {PARTS}.strange_optimizer}}\n"},
        2,
        "optimizer: SGD 0 holds 1 parameter(s) that its model part does not have, so their state has no name to be "
        "saved under; build it from the parameters of the model that it is given",
    ),
    "config: a scheduler that is none": (
        {OPTIMIZER: f"{OPTIMIZER}lr_scheduler: {{_target_: {PARTS}.number}}\n"},
        2,
        "lr_scheduler: the target made a float, which has no step, state_dict, load_state_dict; return a torch "
        "LRScheduler, or write them",
    ),
    "config: a scheduler that asks for the loss": (
        {OPTIMIZER: f"{OPTIMIZER}lr_scheduler: {{_target_: {PARTS}.on_plateau}}\n"},
        2,
        "lr_scheduler: a ReduceLROnPlateau, whose step() takes more than the trainer knows after a step; give one "
        "whose step() takes no argument",
    ),
    "config: a dataloader that is none": (
        {LOADER: f"dataloader: {{_target_: {PARTS}.number}}\n"},
        2,
        "dataloader: the target made a float, which cannot be iterated over; return an iterable of the "
        "micro-batches of each step",
    ),
    "config: no language model": (
        {MODEL: f"model: {{_target_: {PARTS}.a_linear_layer}}\n"},
        2,
        "model_spec: tests.trainer.text_parts.a_linear_layer made a Linear, which is no BaseModel; return what "
        "HyperAutoModelForCausalLM.from_config or from_pretrained gives, or a BaseModel",
    ),
    "batch: a list": (
        collate("one_micro_batch"),
        1,
        "error: an item of the dataloader is a dict; it must be a list of the 2 micro-batches of a step, each a "
        "dict; let collate_fn make it",
    ),
    "batch: a list that is not empty": (
        collate("no_micro_batch"),
        1,
        "error: an item of the dataloader is a list of 0; it must be a list of the 2 micro-batches of a step, each "
        "a dict; let collate_fn make it",
    ),
    "batch: a list of dicts": (
        collate("bare_micro_batches"),
        1,
        "error: a micro-batch is a Tensor, not a dict; let collate_fn return a list of dicts",
    ),
    "batch: labels": (
        collate("unlabelled_micro_batches"),
        1,
        "error: a micro-batch has input_ids; it needs input_ids, and either labels (not shifted) or shift_labels "
        "(aligned with the logits)",
    ),
    "batch: a loss from the output": (
        loss(f"{PARTS}.LossByToken"),
        1,
        "error: loss: LossByToken returned a tensor of [2, 16]; return a mean as a scalar tensor, or a dict of such",
    ),
    "batch: a loss that is a tensor": (
        loss(f"{PARTS}.LossOfNumbers"),
        1,
        "error: loss: LossOfNumbers returned a float; return a mean as a scalar tensor, or a dict of such",
    ),
    "closed: a loss without a token": (
        collate("masked_micro_batches") | loss(f"{PARTS}.LossOfOne"),
        1,
        "error: step 1: the loss is 2.0 though no label of the step is to be trained (all are -100); a loss must be"
        " a sum over the labels that are",
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    save(tiny_model("qwen3_moe", vocab_size=4096), root / "qwen3_moe")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    transformers.MistralConfig(**sizes, sliding_window=8).save_pretrained(root / "mistral")
    transformers.GemmaConfig(**sizes, num_key_value_heads=2, head_dim=8).save_pretrained(root / "gemma")
    return root


@pytest.fixture
def start(
    folders: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[Changes, int], tuple[int, str]]:
    """Trains the changed file in an empty folder; returns the exit code, and what is printed beside the log."""
    monkeypatch.chdir(tempfile.mkdtemp(dir=folders))
    monkeypatch.setattr(logging.getLogger("hyper_parallel"), "handlers", [])  # those of a run before print elsewhere

    def write_and_train(changes: Changes, ranks: int) -> tuple[int, str]:
        text = YAML
        for was, becomes in changes.items():
            assert text.count(was) == 1, was
            text = text.replace(was, becomes)
        Path("run.yaml").write_text(text)
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        code = train.main(["--config-file", "run.yaml"], prog="hyper_parallel.train_lm")
        lines = capsys.readouterr().err.splitlines()
        return code, "\n".join(line for line in lines if not line[:2].isdigit())  # lines of the log have the time

    return write_and_train


@pytest.mark.parametrize("rule", REFUSED)
def test_what_the_file_shows_is_refused_before_anything_is_made(start: Any, rule: str) -> None:
    changes, ranks, told = REFUSED[rule]
    code, printed = start(changes, ranks)
    assert code == 2
    assert (printed[: len(told) - 3] + "..." if told.endswith("...") else printed) == told
    assert os.listdir() == ["run.yaml"]


@pytest.mark.parametrize("rule", ENDED)
def test_what_a_part_does_ends_the_run(start: Any, rule: str) -> None:
    changes, code, told = ENDED[rule]
    assert start(changes, 1) == (code, told)


def test_what_is_on_its_way_to_the_device_is_not_read_by_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """batch: tensors are moved without waiting, so the host counts its own copy. Reading one of meta would raise."""
    monkeypatch.setattr(base, "get_platform", lambda: SimpleNamespace(device=lambda: torch.device("meta")))
    ids = torch.arange(16).view(2, 8)
    micro_batch = causal_batch({"input_ids": ids, "labels": ids.where(ids != 3, -100)}, seq_len=8, vocab_size=16)
    moved = BaseTrainer.get_batch(None, micro_batch)  # type: ignore[arg-type]  # it asks nothing of its trainer
    assert moved.pop("cu_seqlens") == [0, 8, 16]
    assert {name: x.device.type for name, x in moved.items()} == dict.fromkeys(
        ("input_ids_BT", "position_ids_BT", "labels_BT"), "meta"
    )
    _, valid_tokens = loss_scales([micro_batch["labels"]], "token_weighted", None, torch.device("cpu"))
    assert int(valid_tokens) == 13  # of 16, without the last of each row and the masked one
