"""Runs that start from a Hugging Face folder, and the folders that they export, against transformers itself."""

from __future__ import annotations

import json
import logging
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hyper_parallel import train as front_door
from hyper_parallel.assets import TOKENIZER_FOLDER
from hyper_parallel.components.checkpoint import CheckpointError, CheckpointManager
from hyper_parallel.components.lr_scheduler import LRSchedulersContainer
from hyper_parallel.config.imports import import_object
from hyper_parallel.trainer.config import TrainerConfig
from tests.distributed_world import run_world
from tests.models.reference import transformers_model
from tests.trainer.runs import deterministic, metrics, small_corpus, tiny_config, train, with_parallelism

VOCAB = {"vocab_size": 4096}  # that of the embedded tokenizer
FOLDERS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "moe": ("qwen3_moe", "float32", {"mlp_only_layers": [1], "norm_topk_prob": True}, {"max_shard_size": "100KB"}),
    "moe, stacked": ("qwen3_moe", "float32", {}, {"save_original_format": False}),
    "moe, tied": ("qwen3_moe", "bfloat16", {"tie_word_embeddings": True}, {"max_shard_size": "100KB"}),
    "dense": ("qwen3", "bfloat16", {"attention_bias": True}, {}),
    "dense, tied": ("qwen3", "float32", {"tie_word_embeddings": True}, {"max_shard_size": "100KB"}),
}
"""Family, type of the weights, changes to its sizes, and how transformers shall save it."""

IDS = torch.randint(0, 4096, (2, 40), generator=torch.Generator().manual_seed(5))


def theirs(name: str) -> Any:
    family, dtype, changes, _ = FOLDERS[name]
    return transformers_model(family, getattr(torch, dtype), **VOCAB, **changes)


def in_float64(folder: Path) -> Any:
    """transformers' model from `folder`. Its grouped product refuses float64, its loop over experts takes any type."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of `FOLDERS`, as transformers writes them."""
    root = tmp_path_factory.mktemp("theirs")
    for name, (_, _, _, options) in FOLDERS.items():
        theirs(name).save_pretrained(root / name, **options)
    assert len(list((root / "moe").glob("*.safetensors"))) > 3
    return root


def starts_from(
    folder: Path, dump_folder: Path | str, *, steps: int = 1, dtype: str = "float64", **checkpoint: Any
) -> Any:
    """A run of the model in `folder`, from its weights, that rounds where transformers rounds."""
    config = tiny_config(dump_folder, steps=steps, dtype=dtype)
    model_type = json.loads((folder / "config.json").read_text())["model_type"]
    create = import_object(f"hyper_parallel.models.{model_type}.create_model_spec", "model")
    config.model_spec = create(str(folder), float64_rounding="transformers")
    config.lr_scheduler = LRSchedulersContainer.Config(decay_type="constant")  # of no length
    config.checkpoint = CheckpointManager.Config(**{"enable": False, "load_from": str(folder)} | checkpoint)
    return config


def does_not_fit(folder: Path, dump_folder: Path) -> str:
    """What a rank says of a folder whose model has another layer more, one with experts for one without."""
    config = starts_from(folder, dump_folder)
    config.model_spec.model.num_hidden_layers = 2
    config.model_spec.model.mlp_only_layers = ()
    with config.build() as trainer, pytest.raises(CheckpointError) as error:
        trainer.train()
    return str(error.value)


def train_and_export(config: TrainerConfig, folder: Path, dtype: torch.dtype) -> torch.Tensor | None:
    """Starts, takes a step whose learning rate is 0, exports to `folder`; logits in float32, of one whole model."""
    with config.build() as trainer:
        for group in trainer.optimizers.optimizers[0].param_groups:
            group["lr"] = 0.0
        trainer.train()
        assert (trainer.state.record.lr, trainer.state.record.step) == (0.0, 1)
        trainer.checkpointer.export_hf(folder)
        if dtype == torch.float32 and trainer.parallel_dims.tp == 1:
            with torch.no_grad():
                return trainer.model_parts[0](IDS).logits
    return None


def start_and_export(root: str, out: str) -> dict[str, Any]:
    """On a rank: logits and micro-batches of the start from every folder. Below `out`: an export of each, in the type
    that it has, after a step of learning rate 0, and the metrics of a step."""
    results: dict[str, Any] = {}
    for name, (family, dtype, _, _) in FOLDERS.items():
        config = starts_from(Path(root) / name, Path(out) / "runs" / name)
        assert not list(config.cross_faults(dist.get_world_size() if dist.is_initialized() else 1))
        with config.build() as trainer:
            trainer.checkpointer.load()
            with torch.no_grad():
                logits = trainer.model_parts[0](IDS).logits
            results[name] = {"logits": logits, "batch": next(iter(trainer.dataloader))}
        with starts_from(Path(root) / name, Path(out) / "runs" / name).build() as trainer:
            trainer.train()
        torch_dtype = getattr(torch, dtype)
        config = starts_from(Path(root) / name, Path(out) / "runs" / f"{name}, lr 0", dtype=dtype)
        config.parallelism.cpu_offload = name == "dense"
        results[name]["float32 logits"] = train_and_export(config, Path(out) / name, torch_dtype)
        for axis in ("tp", "ep") if dist.is_initialized() else ():
            if axis == "ep" and family == "qwen3":
                continue
            config = starts_from(Path(root) / name, Path(out) / "runs" / f"{name}, {axis}", dtype=dtype)
            train_and_export(with_parallelism(config, **{axis: 2}), Path(out) / f"{name}, {axis} 2", torch_dtype)
    results["refusal"] = does_not_fit(Path(root) / "moe", Path(out) / "runs" / "refusal")
    return results


@pytest.fixture(scope="module")
def started(folders: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[list[dict[str, Any]], Path]]:
    """Number of ranks -> what each has seen, and the folder of exports and metrics."""
    one, two = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    return {
        1: ([start_and_export(str(folders), str(one))], one),
        2: (run_world(2, start_and_export, str(folders), str(two), timeout=250), two),
    }


def cross_entropy_of(model: Any, micro_batches: list[dict[str, Any]]) -> tuple[torch.Tensor, int]:
    """Sum over the trained tokens, each document by itself, and their number."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for micro_batch in micro_batches:
        ids, labels = micro_batch["input_ids"].flatten(), micro_batch["labels"].flatten()
        ends = [int(end) for end in micro_batch["cu_seqlens"]]
        for first, last in pairwise(ends):
            logits = model(ids[None, first:last]).logits[0]
            total += F.cross_entropy(logits, labels[first:last], reduction="sum")
            count += int((labels[first:last] != -100).sum())
    return total, count


@pytest.mark.parametrize("name", FOLDERS)
def test_starts_from_the_model_that_transformers_has(name: str, folders: Path, started: Any) -> None:
    model = in_float64(folders / name)
    with torch.no_grad():
        logits = model(IDS).logits
        for results, out in started.values():
            sums = [cross_entropy_of(model, result[name]["batch"]) for result in results]
            loss = sum(total for total, _ in sums) / sum(count for _, count in sums)
            for result in results:
                assert result[name]["logits"].dtype == torch.float64
                assert (result[name]["logits"] - logits).abs().max() < 1e-9
            assert metrics(out / "runs" / name)[0]["loss"] == pytest.approx(float(loss), abs=1e-9)


@pytest.mark.parametrize("name", FOLDERS)
def test_exports_the_same_tensors_from_any_number_of_ranks(
    name: str, folders: Path, started: Any, tmp_path: Path
) -> None:
    model = theirs(name)
    model.save_pretrained(tmp_path)
    original = load_file(tmp_path / "model.safetensors")
    exported = {ranks: folder / name for ranks, (_, folder) in started.items()}
    stored = load_file(exported[1] / "model.safetensors")
    assert stored.keys() == original.keys()
    for tensor_name, tensor in original.items():
        assert stored[tensor_name].dtype == tensor.dtype, tensor_name
        assert stored[tensor_name].view(torch.uint8).equal(tensor.view(torch.uint8)), tensor_name

    files = sorted(file.name for file in exported[1].iterdir())
    assert files == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    split = [
        folder for folder in exported[2].parent.iterdir() if folder.name.startswith((f"{name}, tp", f"{name}, ep"))
    ]
    assert len(split) == (2 if name.startswith("moe") else 1)
    for file in files:
        for folder in (exported[2], *split):
            assert (exported[1] / file).read_bytes() == (folder / file).read_bytes(), (folder, file)

    again = AutoModelForCausalLM.from_pretrained(exported[2])
    assert type(again) is type(model) and again.dtype == model.dtype
    with torch.no_grad():
        assert torch.equal(in_float64(exported[2])(IDS).logits, in_float64(folders / name)(IDS).logits)
    if model.dtype == torch.float32:
        with torch.no_grad():
            logits = again(IDS).logits
        for results, _ in started.values():
            assert all((result[name]["float32 logits"] - logits).abs().max() < 2e-5 for result in results)
    text = "To be, or not to be\nthat is the question"
    ids = AutoTokenizer.from_pretrained(exported[2])(text)["input_ids"]
    assert ids == AutoTokenizer.from_pretrained(TOKENIZER_FOLDER)(text)["input_ids"]


# What a run starts from


def lines(caplog: pytest.LogCaptureFixture, config: TrainerConfig) -> list[str]:
    """What a run says about weights."""
    logger = logging.getLogger("hyper_parallel")
    logger.addHandler(caplog.handler)
    try:
        with config.build() as trainer:
            trainer.train()
    finally:
        logger.removeHandler(caplog.handler)
    said = [
        m
        for m in caplog.messages
        if m.startswith(("model ", "checkpoint: initial", "checkpoint: resumed", "checkpoint: config"))
    ]
    caplog.clear()
    return said


def test_a_run_goes_on_from_its_own_checkpoint_and_from_the_folder_before_there_is_one(
    folders: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, dump = folders / "moe", tmp_path / "run"
    drawn = f"model qwen3_moe:{folder}, 322,880 parameters in float64, initial weights drawn from seed 42"
    first, *others = lines(caplog, starts_from(folder, dump, steps=2, enable=True))
    assert first.startswith(drawn) and first.removeprefix(drawn) == (
        ", to be replaced by those of a checkpoint or of checkpoint.load_from"
    )
    assert len(others) == 1
    assert others[0].startswith(f"checkpoint: initial weights of {folder}, read in ")
    assert others[0].endswith(f" s (no complete checkpoint in {dump}/checkpoint)")
    _, resumed = lines(caplog, starts_from(folder, dump, steps=4, enable=True))
    assert resumed.startswith(f"checkpoint: resumed from {dump}/checkpoint/step-2 in ")
    assert resumed.endswith(f" s; {folder} is not read")
    straight = train(starts_from(folder, tmp_path / "straight", steps=4))
    assert deterministic(metrics(dump)) == deterministic(straight)

    only_sizes = starts_from(folder, tmp_path / "sizes", load_from=None)
    (line,) = lines(caplog, only_sizes)
    assert line == f"{drawn}: {folder} gave sizes alone, its weights are read with --checkpoint.load_from {folder}"
    assert metrics(tmp_path / "sizes")[0]["loss"] != straight[0]["loss"]
    _, disabled = lines(caplog, starts_from(folder, tmp_path / "disabled"))
    assert disabled.endswith(" s (checkpoint.enable is False)")
    assert deterministic(metrics(tmp_path / "disabled")) == deterministic(straight[:1])


def test_a_folder_whose_settings_differ_is_said_to(
    folders: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = starts_from(folders / "moe", tmp_path)
    config.model_spec.model.num_experts_per_tok = 3
    config.model_spec.model.rms_norm_eps = 1e-5
    _, warning, _ = lines(caplog, config)
    assert warning == (
        f"checkpoint: config.json in {folders / 'moe'} and this run's model differ: "
        "rms_norm_eps is 1e-06 there, 1e-05 here; num_experts_per_tok is 2 there, 3 here"
    )


def test_another_size_is_refused_by_name_on_every_rank(folders: Path, started: Any) -> None:
    messages = [result["refusal"] for results, _ in started.values() for result in results]
    assert [message.count(" (on rank 0)") for message in messages] == [0, 1, 1]
    for message in messages:
        first, *others = message.splitlines()
        assert first == f"checkpoint.load_from: the weights in {folders / 'moe'} do not fit the model:"
        assert others[0] == "missing: model.layers.1.mlp.gate.weight (8, 32)"
        kinds = [line.partition(":")[0] for line in others]
        assert (kinds.count("missing"), kinds.count("unexpected"), len(kinds)) == (25, 3 + 8 + 25, 61)


# Faults before anything is created


def unfinished(path: Path, folders: Path) -> None:
    (path / "step-1").mkdir(parents=True)


def without_weights(path: Path, folders: Path) -> None:
    path.mkdir()
    (path / "config.json").write_bytes((folders / "moe" / "config.json").read_bytes())


def sliding(path: Path, folders: Path) -> None:
    path.mkdir()
    content = json.loads((folders / "moe, stacked" / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(content | {"use_sliding_window": True}))
    (path / "model.safetensors").write_bytes((folders / "moe, stacked" / "model.safetensors").read_bytes())


@pytest.mark.parametrize(
    ("make", "below", "message"),
    [
        (lambda path, folders: None, "", "checkpoint.load_from: {path} is missing; give a folder that transformers'"),
        (lambda path, folders: path.touch(), "", "checkpoint.load_from: {path} is not a folder; "),
        (
            lambda path, folders: path.mkdir(),
            "",
            "checkpoint.load_from: {path} holds neither the config.json of a Hugging Face model nor a complete "
            "checkpoint; give a folder that transformers'",
        ),
        (
            unfinished,
            "step-1",
            "checkpoint.load_from: {path}/step-1 is not a complete checkpoint: it has no complete.json, so its save "
            "did not finish; ",
        ),
        (without_weights, "", "checkpoint.load_from: no weights at {path}/model.safetensors; give a folder"),
        (sliding, "", "{path}/config.json.use_sliding_window: True: sliding windows are not implemented; "),
        (
            lambda path, folders: path.symlink_to(folders / "dense"),
            "",
            "{path}/config.json: model_type is 'qwen3', not qwen3_moe; give --model_spec qwen3:{path}",
        ),
    ],
)
def test_faults(
    make: Any, below: str, message: str, folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "from"
    make(path, folders)
    capsys.readouterr()
    dump = tmp_path / "dump"
    flags = ["--checkpoint.load_from", str(path / below), "--dump_folder", str(dump)]
    assert front_door.main(["--model_spec", "qwen3_moe", *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith(message.format(path=path)), error
    assert error.count("\n") == 1
    assert not dump.exists()


def test_a_model_without_names_for_hugging_face(folders: Path, tmp_path: Path) -> None:
    config = starts_from(folders / "dense", tmp_path)
    config.model_spec.state_dict_adapter = None
    (fault,) = config.cross_faults(1)
    fact = f"{folders / 'dense'} is given, but qwen3 has no state_dict_adapter to read it with"
    assert str(fault) == f"checkpoint.load_from: {fact}; leave it out"
    config.checkpoint.load_from, config.checkpoint.enable, config.checkpoint.export_hf = None, True, "every"
    (fault,) = config.cross_faults(1)
    fact = "every, but qwen3 has no state_dict_adapter to name its weights with"
    assert str(fault) == f"checkpoint.export_hf: {fact}; set none"
    with config.build() as trainer, pytest.raises(CheckpointError, match="give its ModelSpec a state_dict_adapter"):
        trainer.checkpointer.export_hf(tmp_path / "export")


def test_from_the_command_line_to_a_loss(folders: Path, tmp_path: Path, started: Any) -> None:
    """The flags of a user: sizes and weights of one folder, in float32."""
    folder, dump = folders / "moe", tmp_path / "dump"
    flags = {
        "--model_spec": f"qwen3_moe:{folder}",
        "--checkpoint.load_from": str(folder),
        "--dump_folder": str(dump),
        "--dataloader.path": small_corpus(),
        "--training.steps": "1",
        "--training.seq_len": "32",
        "--training.global_batch_size": "8",
        "--training.micro_batch_size": "2",
    }
    assert front_door.main([word for flag in flags.items() for word in flag]) == 0
    assert metrics(dump)[0]["loss"] == pytest.approx(metrics(started[1][1] / "runs" / "moe")[0]["loss"], abs=1e-5)


def test_exports_again_below_the_dump_folder_and_nowhere_else(folders: Path, tmp_path: Path) -> None:
    with starts_from(folders / "dense", tmp_path / "run").build() as trainer:
        export = trainer.checkpointer.export_hf
        export(tmp_path / "run" / "step-1")
        trainer.model_parts[0].norm.weight.data.fill_(2.0)
        export(tmp_path / "run" / "step-1")
        export(tmp_path / "elsewhere")
        with pytest.raises(Exception, match="elsewhere already holds weights"):
            export(tmp_path / "elsewhere")
    stored = load_file(tmp_path / "run" / "step-1" / "model.safetensors")
    assert stored["model.norm.weight"].unique().tolist() == [2.0]
