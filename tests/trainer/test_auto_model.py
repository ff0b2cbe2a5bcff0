"""Models of transformers in HyperTrainer: the curves of our own model, of one process, and of a resumed run."""

from __future__ import annotations

import contextlib
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers

from hyper_parallel import explain
from hyper_parallel import train as cli
from hyper_parallel.components.checkpoint import CheckpointManager
from hyper_parallel.config.errors import ConfigError
from hyper_parallel.config.sections import (
    ActivationCheckpointConfig,
    CompileConfig,
    ParallelismConfig,
    TrainingConfig,
)
from hyper_parallel.distributed.distributed_setup import DistributedSetup
from hyper_parallel.distributed.parallel_dims import ParallelDims
from hyper_parallel.distributed.process_group import launched_world_size, rank
from hyper_parallel.models import auto, qwen3_moe
from hyper_parallel.protocols.model_spec import ModelSpec
from hyper_parallel.trainer import phases
from hyper_parallel.trainer.callbacks import MoEMonitorCallback
from hyper_parallel.trainer.config import TrainerConfig
from tests.distributed_world import run_world
from tests.models.auto.folders import FAMILIES, balance, save, tiny_model
from tests.models.reference import widened
from tests.trainer.runs import metrics, small_corpus, tiny_config, with_parallelism
from tests.trainer.test_tensor_parallel import worst

STEPS, SHORT = 20, 8
"""Of a whole run, and of one that only has to follow another."""
TOLERANCE = 1e-9


def config_of(
    spec: ModelSpec,
    folder: Path,
    *,
    rows: int = 4,
    mode: str = "none",
    swap: bool = False,
    compile: bool = False,
    placement: str = "production",
    saves: bool = False,
    **degrees: Any,
) -> TrainerConfig:
    config = with_parallelism(tiny_config(folder, steps=STEPS, micro_batch_size=rows), mode=placement, **degrees)
    config.model_spec = spec
    config.activation_checkpoint = ActivationCheckpointConfig(mode=mode, swap=swap)
    config.compile = CompileConfig(enable=compile, backend="aot_eager")
    if saves:
        config.checkpoint = CheckpointManager.Config(interval_steps=STEPS // 2, export_hf="last")
    return config


def train(config: TrainerConfig, world_size: int = 1, *, until: int = STEPS) -> list[dict[str, Any]]:
    """Trains, with transformers' roundings to float32 done in float64, so that 1e-9 means something."""
    assert not list(config.cross_faults(world_size))
    with config.build() as trainer:
        model = trainer.model_parts[0]
        trainer.training_steps = until
        with widened(model) if hasattr(getattr(model, "model", None), "rotary_emb") else contextlib.nullcontext():
            trainer.train()
    return metrics(config.dump_folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {f: save(tiny_model(f, vocab_size=4096), root / f) for f in FAMILIES}


def test_follows_our_own_model(tmp_path: Path, folders: dict[str, str]) -> None:
    own = config_of(qwen3_moe.create_model_spec(folders["qwen3_moe"]), tmp_path / "own")
    own.checkpoint = CheckpointManager.Config(enable=False, load_from=folders["qwen3_moe"])
    theirs = config_of(auto.pretrained_model_spec(folders["qwen3_moe"]), tmp_path / "theirs")
    own.callbacks = theirs.callbacks = (MoEMonitorCallback.Config(),)
    curves = train(own), train(theirs)
    differences = worst(*curves)
    assert differences.keys() == {"loss", "grad_norm", "aux_loss"}
    assert [line["moe_max_load"] for line in curves[0]] == [line["moe_max_load"] for line in curves[1]]
    assert max(differences.values()) <= TOLERANCE, differences
    assert curves[0][-1]["loss"] < curves[0][0]["loss"] - 0.5


@pytest.mark.parametrize("family", FAMILIES)
def test_follows_a_bare_loop_over_transformers(tmp_path: Path, folders: dict[str, str], family: str) -> None:
    """Two micro-batches a step, of unlike numbers of trained tokens, which count alike."""
    config = config_of(auto.pretrained_model_spec(folders[family]), tmp_path, rows=4)
    lines = train(config)
    differences = worst(bare_loop(config, folders[family], [line["lr"] for line in lines]), lines)
    assert max(differences.values()) <= TOLERANCE, differences


def bare_loop(config: TrainerConfig, folder: str, rates: list[float]) -> list[dict[str, Any]]:
    """The same run on transformers' own classes and torch's optimizer. Documents are told by their positions."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="sdpa", experts_implementation="eager"
    ).train()
    plain = [p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() == 1]
    decay = config.optimizer.weight_decay
    optimizer = torch.optim.AdamW(
        [{"params": plain[0], "weight_decay": decay}, {"params": plain[1], "weight_decay": 0.0}],
        betas=config.optimizer.betas,
        eps=config.optimizer.eps,
    )
    dims = ParallelDims(dp_replicate=1, dp_shard=1)
    batches = iter(phases.build_dataloader(config, dims, phases.build_tokenizer(config)))
    lines: list[dict[str, Any]] = []
    with widened(model) if hasattr(model, "model") else contextlib.nullcontext():
        for step, (lr, micro_batches) in enumerate(zip(rates, batches, strict=False), start=1):
            assert step > 1 or len({int((m["labels"] != -100).sum()) for m in micro_batches}) == len(micro_batches)
            batch = {
                name: torch.cat([m[name] for m in micro_batches]) for name in ("input_ids", "position_ids", "labels")
            }
            out = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False)
            loss = F.cross_entropy(out.logits.flatten(0, 1), batch["labels"].flatten())
            line = {"step": step, "loss": loss.item()}
            if getattr(out, "router_logits", None):
                by_row = zip(
                    *(layer.unflatten(0, (len(batch["labels"]), -1)) for layer in out.router_logits), strict=True
                )
                aux_loss = torch.stack([balance(row) for row in by_row]).mean()
                loss, line = loss + aux_loss, line | {"aux_loss": aux_loss.item()}
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.training.max_grad_norm)
            lines.append(line | {"grad_norm": norm.item()})
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            optimizer.zero_grad()
    return lines


TP, SPLIT = {"tp": 2, "dp_shard": 1}, {"sequence_parallel": True, "loss_parallel": True}
CASES: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "qwen3_moe, shard 2, accumulate 2": {"rows": 2, "dp_shard": 2},
        "qwen3_moe, shard 2, selective, swap": {"dp_shard": 2, "mode": "selective", "swap": True},
        "qwen3_moe, shard 2, compile": {"dp_shard": 2, "compile": True},
        "gpt2, shard 2, offload, full": {"dp_shard": 2, "cpu_offload": True, "mode": "full"},
        "qwen3, shard 2": {"dp_shard": 2},
        "llama, shard 2": {"dp_shard": 2},
        "llama, tp": TP,
        **{
            f"{family}, tp, sp, lp{', validate' if validate else ''}": TP
            | SPLIT
            | ({"placement": "validate"} if validate else {})
            for family in FAMILIES
            for validate in (False, True)
        },
        "qwen3, cp": {"dp_shard": 1, "cp": 2},
        "llama, cp allgather": {"dp_shard": 1, "cp": 2, "cp_method": "allgather"},
        "gpt2, cp ulysses": {"dp_shard": 1, "cp": 2, "cp_method": "ulysses"},
        "qwen3_moe, cp": {"dp_shard": 1, "cp": 2},
        "qwen3_moe, cp, ep": {"dp_shard": 1, "cp": 2, "ep": 2},
        "qwen3_moe, shard 2, ep, full": {"rows": 2, "dp_shard": 2, "ep": 2, "mode": "full"},
    },
    4: {
        "qwen3_moe, replicate 2 x shard 2": {"rows": 2, "dp_replicate": 2, "dp_shard": 2},
        "qwen3, shard 2 x tp": TP | {"rows": 2, "dp_shard": 2},
        "llama, shard 2 x tp, sp, lp": TP | SPLIT | {"rows": 2, "dp_shard": 2},
        "gpt2, cp x tp, sp, lp": TP | SPLIT | {"cp": 2},
        "gpt2, shard 2 x tp, full": TP | {"rows": 2, "dp_shard": 2, "mode": "full"},
        "qwen3_moe, shard 2 x tp, sp, lp, ep": TP | SPLIT | {"rows": 2, "dp_shard": 2, "ep": 2},
    },
}
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gpt2, tp, sp, lp -> shard 2": (TP | SPLIT, {"dp_shard": 2}),
    "qwen3_moe, shard 2, ep -> tp": ({"rows": 2, "dp_shard": 2, "ep": 2}, TP),
}
"""Runs that stop in the middle, and go on otherwise."""
ALL = [*(name for cases in CASES.values() for name in cases), *CHANGES]


def run_cases(root: str, world_size: int, folders: dict[str, str]) -> None:
    def config(name: str, settings: dict[str, Any]) -> TrainerConfig:
        spec = auto.pretrained_model_spec(folders[name.partition(",")[0]])
        return config_of(spec, Path(root) / name, **settings)

    for name, settings in CASES[world_size].items():
        train(config(name, settings), world_size, until=SHORT)
    for name, (first, second) in CHANGES.items() if world_size == 2 else ():
        train(config(name, first | {"saves": True}), world_size, until=STEPS // 2)
        train(config(name, second | {"saves": True}), world_size)
    if world_size == 2:
        torch.save(logits(folders["gpt2"], ParallelismConfig(**TP, **SPLIT)), Path(root) / f"logits_{rank()}.pt")


def logits(folder: str, parallelism: ParallelismConfig) -> torch.Tensor:
    """What a model that is built in one call says."""
    dims = ParallelDims.from_config(parallelism, launched_world_size())
    dims.build_mesh("cpu")
    setup = DistributedSetup(parallel_dims=dims, parallelism=parallelism)
    training = TrainingConfig(dtype="float64")
    model = auto.HyperAutoModelForCausalLM.from_pretrained(folder, distributed_setup=setup, training=training)
    with torch.no_grad():
        return model(torch.arange(64).view(2, 32)).logits


@pytest.fixture(scope="module")
def curves(tmp_path_factory: pytest.TempPathFactory, folders: dict[str, str]) -> dict[str, list[dict[str, Any]]]:
    """metrics.jsonl by case and, of one process, by family."""
    root = tmp_path_factory.mktemp("curves")
    for family, folder in folders.items():
        train(config_of(auto.pretrained_model_spec(folder), root / family, saves=True))
    for world_size in CASES:
        run_world(world_size, run_cases, str(root), world_size, folders, timeout=580)
    for name in CHANGES:
        compare_exports(root / name.partition(",")[0], root / name)
    whole_logits = logits(folders["gpt2"], ParallelismConfig(dp_shard=1))
    for spread in root.glob("logits_*.pt"):
        torch.testing.assert_close(torch.load(spread), whole_logits, rtol=0, atol=1e-12)
    return {name: metrics(root / name) for name in [*folders, *ALL]}


def compare_exports(one: Path, other: Path) -> None:
    """What both exported in their last step is the same model, which transformers reads."""
    (one_folder,) = [file.parent for file in one.rglob("model.safetensors")]
    other_folder = max(file.parent for file in other.rglob("model.safetensors"))
    read = transformers.AutoModelForCausalLM.from_pretrained
    expected = dict(read(one_folder).named_parameters())
    for name, parameter in read(other_folder).named_parameters():
        torch.testing.assert_close(parameter, expected[name], rtol=0, atol=TOLERANCE, msg=name)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ALL)
def test_follows_one_process(curves: dict[str, list[dict[str, Any]]], name: str) -> None:
    whole, curve = curves[name.partition(",")[0]], curves[name]
    assert len(whole) == STEPS and whole[-1]["loss"] < whole[0]["loss"] - 0.3
    assert len(curve) == (STEPS if name in CHANGES else SHORT)
    differences = worst(whole[: len(curve)], curve)
    assert max(differences.values()) <= TOLERANCE, differences


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("family", FAMILIES)
def test_validate_agrees_with_production(curves: dict[str, list[dict[str, Any]]], family: str) -> None:
    pair = curves[f"{family}, tp, sp, lp"], curves[f"{family}, tp, sp, lp, validate"]
    assert max(worst(*pair).values()) <= 1e-12


def test_trains_from_the_command_line_and_resumes(
    dump_folder: str, folders: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights are drawn; what was saved names the folder, and is exported under Hugging Face's names."""
    argv = ["--model_spec", f"auto:{folders['gpt2']}", "--dump_folder", dump_folder, "--training.seq_len", "64"]
    argv += ["--dataloader.path", small_corpus(), "--checkpoint.interval_steps", "1", "--checkpoint.export_hf", "last"]
    assert cli.main([*argv, "--training.steps", "1"]) == 0
    assert cli.main([*argv, "--training.steps", "2"]) == 0
    lines = metrics(dump_folder)
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[0]["loss"] == pytest.approx(math.log(4096), abs=0.1)  # a guess: the folder's weights are not read
    saved = json.loads((Path(dump_folder) / "config.json").read_text())["model"]
    assert saved == {"_target_": "hyper_parallel.models.auto.create_model_spec", "flavor": folders["gpt2"]}
    exported = {file.parent for file in Path(dump_folder).rglob("model.safetensors")}
    assert len(exported) == 2  # each of the two runs had a last step
    model = transformers.AutoModelForCausalLM.from_pretrained(exported.pop())
    assert type(model).__name__ == "GPT2LMHeadModel"


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        (
            ["--parallelism.tp", "3", "--parallelism.dp_shard", "1"],
            "parallelism.tp: 3 does not divide the model's num_a",
        ),
        (["--parallelism.pp", "2"], "model_spec.pipelining_fn: None: this family cannot be taken apart"),
        (
            ["--model.validate_placement"],
            "model.validate_placement: validate, but tp is 1: there is no plan to compare",
        ),
        (["--parallelism.ep", "2"], "parallelism.ep: 2, but no layer of the model has experts"),
        (["--training.seq_len", "65"], "training.seq_len: 65 is above the model's max_position_embeddings 64"),
        (
            ["--model_spec.changes", "{attn_pdrop: 0.1}"],
            "model_spec: module transformer.h.0.attn (GPT2Attention) drops",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused(
    folders: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    fault: str,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2" if "parallelism" in flags[0] else "1")
    sized = [] if "--training.seq_len" in flags else ["--training.seq_len", "64"]
    assert cli.main(["--model_spec", f"auto:{folders['gpt2']}", *sized, *flags]) == 2
    assert fault in capsys.readouterr().err


def test_what_a_run_would_move_is_explained(folders: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--training.seq_len", "64", "--world_size", "2"]
    assert explain.main(["--model_spec", f"auto:{folders['qwen3_moe']}", *flags]) == 0
    told = capsys.readouterr().out
    assert "model.layers.*.mlp.experts.gate_up_proj" in told
    assert re.search(r"model\.layers\.\*\s+1\s", told) and "the rest" in told


def test_the_plan_is_explained(folders: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--training.seq_len", "64", "--parallelism.tp", "2", "--parallelism.loss_parallel", "--world_size", "2"]
    assert explain.main(["--model_spec", f"auto:{folders['gpt2']}", *flags]) == 0
    told = re.sub(" +", " ", capsys.readouterr().out)
    assert "transformer.h.*.attn.c_attn.weight 2 32 x 3 x 32 32 x 3 x 16 dp_shard S(0), tp S(2)" in told
    assert "transformer.h.*.mlp output 0 tp P(sum) -> R all-reduce" in told
    assert "transformer.wte tp forward is vocabulary_parallel_embedding" in told


def test_a_folder_is_needed_and_weights_where_they_are_read(tmp_path: Path, folders: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"auto needs a folder with a Hugging Face config.json, and '' is none"):
        auto.create_model_spec()
    (tmp_path / "config.json").write_text((Path(folders["gpt2"]) / "config.json").read_text())
    with pytest.raises(ConfigError, match=r"no weights at .*model.safetensors; give a folder with weights, or create"):
        auto.pretrained_model_spec(str(tmp_path))
