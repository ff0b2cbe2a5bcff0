"""Runs of model/data/train arguments: what the aggregations give, weights that are loaded, scripts to their end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pyarrow import parquet

from hyper_parallel import models, train
from hyper_parallel.components.data.indexed import GPTDataset, IndexedWriter
from hyper_parallel.components.tokenizer import HuggingFaceTokenizer
from hyper_parallel.config.errors import ConfigError
from hyper_parallel.models.qwen3_moe import create_model_spec
from hyper_parallel.trainer import HyperTrainer, HyperTrainerConfig, LLMTrainer, parse_args
from hyper_parallel.trainer.legacy import legacy_to_trainer_config
from tests.distributed_world import run_world
from tests.trainer.runs import TINY, metrics

RECIPES = Path(train.__file__).parents[1] / "recipes" / "yaml" / "legacy"
TEXTS = ["To be, or not to be", "that is", "the question: whether 'tis nobler in the mind to suffer", "The slings"]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def text_arguments(**train: object) -> HyperTrainerConfig:
    """Four documents, one a micro-batch, all in one step."""
    Path("four.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in TEXTS))
    args = HyperTrainerConfig()
    args.model.name, args.model.config_overrides = "qwen3_moe", dict(TINY)
    args.data.type, args.data.train_path, args.data.text_key = "json_file", "four.jsonl", "body"
    args.data.max_seq_len, args.data.shuffle = 32, False
    args.train.max_steps, args.train.global_batch_size, args.train.checkpoint.save_steps = 1, 4, 0
    for name, value in train.items():
        setattr(args.train, name, value)
    return args


@torch.no_grad()
def losses_of(trainer: HyperTrainer) -> list[torch.Tensor]:
    """The loss of each predicted token of each text by itself, without a row around it."""
    tokenizer = HuggingFaceTokenizer.Config().build()
    losses = []
    for text in TEXTS:
        ids = torch.tensor([*tokenizer.encode(text), tokenizer.eos_id])
        logits = trainer.model_parts[0](ids[None, :-1]).logits
        losses.append(F.cross_entropy(logits[0], ids[1:], reduction="none"))
    return losses


def first_loss(args: HyperTrainerConfig, folder: str) -> float:
    args.train.checkpoint.output_dir = folder
    config = legacy_to_trainer_config(args)
    config.training.dtype = "float64"
    LLMTrainer(config).train()
    [line] = metrics(folder)
    return line["loss"]


def test_the_same_texts_by_other_types_of_data_train_the_same():
    expected = first_loss(text_arguments(), "json_file")

    Path("hub").mkdir()
    parquet.write_table(pyarrow.table({"body": TEXTS}), "hub/train.parquet")
    for streaming in (False, True):
        args = text_arguments()
        args.data.type, args.data.train_path, args.data.streaming = "hf_datasets", "hub", streaming
        assert first_loss(args, f"hub-{streaming}") == pytest.approx(expected, rel=1e-12)

    tokenizer = HuggingFaceTokenizer.Config().build()
    torch.save([{"input_ids": [*tokenizer.encode(text), tokenizer.eos_id]} for text in TEXTS], "ids.pt")
    args = text_arguments()
    args.data.type, args.data.train_path, args.data.text_key = "preset_pt", "ids.pt", "text"
    assert first_loss(args, "ids") == pytest.approx(expected, rel=1e-12)


def test_megatron_data_trains_the_samples_that_megatron_makes():
    tokenizer = HuggingFaceTokenizer.Config().build()
    with IndexedWriter("pair", dtype="uint16") as writer:
        for text in TEXTS * 6:
            writer.add_document([*tokenizer.encode(text), tokenizer.eos_id])
    args = text_arguments()
    args.data.type, args.data.train_path, args.data.text_key, args.data.shuffle = "megatron", "pair", "text", True
    args.data.max_seq_len = 16
    config = legacy_to_trainer_config(args)
    config.training.dtype = "float64"
    trainer = LLMTrainer(config)
    samples = GPTDataset(
        "pair", seq_len=16, seed=42, split="1,0,0", split_name="train", eod_token_id=tokenizer.eos_id, pad_token_id=0
    )
    with torch.no_grad():
        items = [samples[k] for k in range(4)]
        logits = trainer.model_parts[0](torch.stack([item["input_ids"] for item in items])).logits
        labels = torch.stack([item["labels"] for item in items])
        expected = float(F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)))
    trainer.train()
    [line] = metrics("outputs")
    assert line["loss"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("aggregation", ["token_weighted", "rank_average"])
def test_aggregation_of_documents_of_many_lengths(aggregation):
    args = text_arguments()
    args.train.optimizer.loss_aggregation = aggregation
    config = legacy_to_trainer_config(args)
    config.training.dtype = "float64"
    trainer = LLMTrainer(config)
    losses = losses_of(trainer)
    assert len({len(each) for each in losses}) == 4
    expected = {
        "token_weighted": float(torch.cat(losses).mean()),
        "rank_average": float(torch.stack([each.mean() for each in losses]).mean()),
    }
    assert abs(expected["token_weighted"] - expected["rank_average"]) > 1e-3
    trainer.train()
    [line] = metrics("outputs")
    assert line["loss"] == pytest.approx(expected[aggregation], rel=1e-12)
    assert (line["tokens"], line["lr"]) == (4 * 32, 0.0)


def test_weights_of_the_folder_are_those_that_are_trained():
    spec = create_model_spec("debug", **TINY)
    model = spec.model.build()
    model.init_weights(99)
    models.save_hf(model, "weights")
    args = text_arguments()
    args.model.config_overrides, args.model.weights_path = None, "weights"
    args.train.max_steps, args.train.optimizer.lr_warmup_ratio = 1, 1.0  # one step at rate 0
    trainer = LLMTrainer(args)
    trainer.train()
    trained = dict(trainer.model_parts[0].named_parameters())
    assert {*trained} == {name for name, _ in model.named_parameters()}
    assert all(torch.equal(trained[name], parameter) for name, parameter in model.named_parameters())


def test_the_resolved_run_is_saved_and_trains_again_the_same():
    args = text_arguments(max_steps=3)
    LLMTrainer(args).train()
    first = [line["loss"] for line in metrics("outputs")]
    assert train.main(["--config-file", "outputs/config.yaml", "--dump_folder", "again"]) == 0
    assert [line["loss"] for line in metrics("again")] == first


def test_faults_are_told_in_the_words_of_the_file_before_anything_is_written():
    args = text_arguments(micro_batch_size=3)
    args.train.optimizer.lr, args.train.accelerator.tp = 0.0, 7
    before = sorted(os.listdir())
    with pytest.raises(ConfigError) as caught:
        LLMTrainer(args)
    faults = {fault.path: str(fault) for fault in caught.value.faults}
    assert {"train.optimizer.lr", "train.accelerator.tp"} <= {*faults}
    assert faults["train.optimizer.lr"].startswith("train.optimizer.lr: 0.0 is not above 0; ")
    assert sorted(os.listdir()) == before and not dist.is_initialized()


def test_faults_of_the_data_are_told_in_the_words_of_the_file():
    args = text_arguments()
    args.train.global_batch_size = 8
    with pytest.raises(ConfigError) as caught:
        LLMTrainer(args)
    [fault] = caught.value.faults
    assert fault.path == "data.train_path"
    assert fault.fact.startswith("four.jsonl (4 documents, ")


def test_a_typed_tree_is_checked_and_left_as_it_is():
    config = legacy_to_trainer_config(text_arguments())
    LLMTrainer(config).train()
    config.training.steps = 2  # still open
    config.training.global_batch_size = 0
    with pytest.raises(ConfigError, match=r"^training\.global_batch_size: 0 is below 1"):
        LLMTrainer(config)


def sharded_run(folder: str) -> dict[str, torch.Tensor]:
    """On each rank: trains, validates, exports and saves; returns the whole trained weights."""
    os.chdir(folder)
    args = text_arguments(max_steps=3)
    args.train.accelerator.dp_shard, args.train.checkpoint.save_steps, args.train.eval.eval_steps = 2, 3, 3
    args.train.eval.eval_dataset, args.train.checkpoint.output_dir = "four.jsonl", "sharded"
    args.train.optimizer.loss_aggregation = "rank_average"
    config = legacy_to_trainer_config(args)
    config.training.dtype, config.validator.steps = "float64", 1
    trainer = LLMTrainer(config)
    trainer.train()
    return {name: parameter.full_tensor() for name, parameter in trainer.model_parts[0].named_parameters()}


@pytest.mark.slow
def test_two_ranks_train_validate_export_and_save_as_one_does(tmp_path):
    args = text_arguments(max_steps=3)
    args.train.optimizer.loss_aggregation = "rank_average"
    config = legacy_to_trainer_config(args)
    config.training.dtype = "float64"
    LLMTrainer(config).train()
    weights, _ = run_world(2, sharded_run, str(tmp_path))
    sharded = metrics("sharded")
    assert [line["loss"] for line in sharded] == pytest.approx([line["loss"] for line in metrics("outputs")], rel=1e-12)
    assert sharded[-1]["validation_loss"] > 0
    assert Path("sharded/checkpoint/step-3/complete.json").is_file()
    exported = models.load_hf("sharded/safetensors/step-3-hf", torch.float64)
    assert all(torch.equal(weights[name], parameter) for name, parameter in exported.named_parameters())


def run_script(*words: str, **variables: str) -> subprocess.CompletedProcess:
    Path("script.py").write_text(
        "from hyper_parallel.trainer import HyperTrainerConfig, LLMTrainer, parse_args\n\n"
        "LLMTrainer(parse_args(HyperTrainerConfig)).train()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(RECIPES.parents[2]), "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-W", "error::ResourceWarning", "script.py", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("file", ["qwen3_moe_dummy.yaml", "qwen3_moe_text.yaml"])
def test_every_file_that_ships_trains_as_a_script_to_a_clean_end(file):
    # With a process group, as under a launcher.
    launcher = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    words = [str(RECIPES / file), "--train.checkpoint.output_dir", "run", "--train.accelerator.dp=1"]
    result = run_script(*words, **launcher)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr and "destroy_process_group" not in result.stderr
    lines = metrics("run")
    assert [line["step"] for line in lines] == list(range(1, 11))
    assert lines[-1]["loss"] < lines[0]["loss"]
    if file == "qwen3_moe_text.yaml":
        assert (Path("run") / "checkpoint" / "step-10" / "complete.json").is_file()
        folder = Path("run") / "safetensors" / "step-10-hf"
        assert models.load_hf(folder).config.num_experts == 8
        assert list(Path("run/tb_traces").iterdir())
        assert lines[-1]["validation_loss"] > 0
    else:
        assert lines[0]["moe_max_load"] >= 1
        assert sorted(os.listdir("run")) == ["config.json", "config.yaml", "metrics.jsonl", "run.lock"]


def test_a_script_that_cannot_train_tells_why_and_ends_with_code_2():
    result = run_script("--model.name=qwen3_moe", "--train.accelerator.pp_vpp=2", "--data.streaming")
    assert (result.returncode, result.stdout) == (2, "")
    assert [line.partition(":")[0] for line in result.stderr.splitlines()] == [
        "train.accelerator.pp_vpp",
        "data.streaming",
    ]
    assert os.listdir() == ["script.py"]


def test_parse_args_and_the_front_door_make_the_same_tree():
    from hyper_parallel.config import manager, resolver

    file = str(RECIPES / "qwen3_moe_dummy.yaml")
    args = parse_args(HyperTrainerConfig, [file, "--train.seed=3"])
    through_door = manager.load(HyperTrainer.Config, [file, "--train.seed=3"], world_size=1)
    assert resolver.to_yaml(through_door) == resolver.to_yaml(legacy_to_trainer_config(args))
