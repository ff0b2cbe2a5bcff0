"""TextTrainer: against HyperTrainer, and with parts of the user's own. What it refuses is in test_constraints.py."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from hyper_parallel import explain
from hyper_parallel.components.checkpoint import CheckpointManager
from hyper_parallel.components.data import (
    MakeMicroBatchCollator,
    PlainTextDataTransform,
    build_dataloader,
    load_text_dataset,
)
from hyper_parallel.components.module_loss import ModelOutputLoss, ModuleLoss
from hyper_parallel.config.errors import ConfigError
from hyper_parallel.config.manager import parse_training_args
from hyper_parallel.config.resolver import resolve_root, to_yaml
from hyper_parallel.config.target import Target
from hyper_parallel.distributed.process_group import launched_world_size
from hyper_parallel.models import qwen3_moe
from hyper_parallel.models.auto import HyperAutoModelForCausalLM
from hyper_parallel.protocols.model import ModelOutput
from hyper_parallel.protocols.model_spec import ModelSpec
from hyper_parallel.protocols.plan_override import PlanOverride
from hyper_parallel.protocols.sharding import PlacementMismatchError
from hyper_parallel.trainer import HyperTrainer, TextTrainer, phases
from hyper_parallel.trainer.config import TrainerConfig
from hyper_parallel.trainer.forward_backward import Accumulation
from hyper_parallel.trainer.step import loss_scales, loss_shares
from tests.distributed_world import run_world
from tests.models.auto.folders import save, tiny_model
from tests.models.reference import widened
from tests.trainer import text_parts
from tests.trainer.runs import metrics, small_corpus, tiny_config, with_parallelism
from tests.trainer.runs import train as train_tiny
from tests.trainer.test_tensor_parallel import worst

TOLERANCE = 1e-9


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tiny_model("qwen3_moe", vocab_size=4096), tmp_path_factory.mktemp("model") / "qwen3_moe")


def text_config(dump_folder: Path, model: str | ModelSpec, *, steps: int | None, **training: Any) -> TrainerConfig:
    """A tiny run in float64 of rows of the small corpus; of a folder's model as a Target, as YAML files have it."""
    if isinstance(model, str):
        target = Target.of(HyperAutoModelForCausalLM.from_pretrained, pretrained_model_name_or_path=model)
        model = ModelSpec.of_target(target)
    config = tiny_config(dump_folder, steps=steps or 1, model_spec=model, **training)
    config.training.steps = steps
    config.data_transform = Target.of(PlainTextDataTransform)
    config.dataset = Target.of(load_text_dataset, path=small_corpus())
    config.collate_fn = Target.of(MakeMicroBatchCollator)
    config.dataloader = Target.of(build_dataloader)
    return config


def counting_config(dump_folder: Path, folder: str, **training: Any) -> TrainerConfig:
    """Rows whose first token is their number, so that a test sees which are trained."""
    config = text_config(dump_folder, folder, **({"seq_len": 16, "micro_batch_size": 1} | training))
    config.data_transform, config.dataset = None, Target.of(text_parts.CountingDataset, rows=8)
    return config


def train(config: TrainerConfig, trainer: type[Any] = TextTrainer) -> list[dict[str, Any]]:
    """With transformers' roundings to float32 done in float64, so that 1e-9 means something."""
    assert not list(config.cross_faults(launched_world_size()))
    with trainer(config) as run:
        if hasattr(getattr(run.model_parts[0], "model", None), "rotary_emb"):
            with widened(run.model_parts[0]):
                run.train()
        else:
            run.train()
    return metrics(config.dump_folder)


class Watched(TextTrainer):
    """Remembers which rows were trained, by their first tokens, and the stages in their order."""

    def __init__(self, config: TrainerConfig) -> None:
        self.rows: list[list[int]] = []
        self.stages: list[str] = []
        super().__init__(config)

    def __getattribute__(self, name: str) -> Any:
        if name.startswith(("_build", "_setup", "_compute", "_init_")):
            self.stages.append(name)
        return super().__getattribute__(name)

    def train_step(self, batches: Any) -> Any:
        item = next(batches)
        self.rows.append([int(row[0]) for batch in item for row in batch["input_ids"]])
        return super().train_step(iter([item]))


def test_follows_our_own_model_in_hyper_trainer(tmp_path: Path, folder: str) -> None:
    """Same weights, rows and optimizer: another model's code, another trainer, another order of set-up."""
    own = text_config(tmp_path / "own", qwen3_moe.create_model_spec(folder), steps=20)
    own.checkpoint = CheckpointManager.Config(enable=False, load_from=folder)
    curves = train(own, HyperTrainer), train(text_config(tmp_path / "text", folder, steps=20))
    differences = worst(*curves)
    assert differences.keys() == {"loss", "grad_norm", "aux_loss"}
    assert max(differences.values()) <= TOLERANCE, differences
    assert curves[0][-1]["loss"] < curves[0][0]["loss"] - 0.5


def test_builds_in_thirteen_stages(tmp_path: Path, folder: str) -> None:
    config = counting_config(tmp_path, folder, steps=1)
    with Watched(config) as trainer:
        pass
    assert trainer.stages == [
        "_setup",
        "_build_model",
        "_build_loss",
        "_build_model_assets",
        "_build_data_transform",
        "_build_dataset",
        "_build_collate_fn",
        "_build_dataloader",
        "_compute_train_steps",
        "_build_optimizer",
        "_build_lr_scheduler",
        "_build_training_context",
        "_init_callbacks",
    ]


def test_each_part_is_given_what_the_guide_lists(tmp_path: Path, folder: str) -> None:
    """A part that takes any argument gets all that there are."""
    config = counting_config(tmp_path, folder, steps=3, global_batch_size=4)
    config.model_spec = ModelSpec.of_target(Target.of(text_parts.given_model, folder=folder))
    config.data_transform = Target.of(text_parts.given_transform)
    config.dataset = Target.of(text_parts.given_dataset)
    config.dataloader = Target.of(text_parts.given_loader)
    config.optimizer = Target.of(text_parts.given_optimizer)
    config.lr_scheduler = Target.of(text_parts.given_scheduler)
    config.loss = Target.of(text_parts.GivenLoss)
    text_parts.GIVEN.clear()
    with TextTrainer(config) as trainer:
        given = text_parts.GIVEN
    dims, sections = trainer.parallel_dims, trainer.config
    assert given["model"].pop("distributed_setup").parallel_dims is dims
    assert given["model"] == {
        "training": sections.training,
        "activation_checkpoint": sections.activation_checkpoint,
        "activation_swap": False,
        "compile_config": sections.compile,
        "peft_config": None,
    }
    assert given["data_transform"] == {
        "tokenizer": trainer.tokenizer,
        "model_config": sections.model_spec and sections.model_spec.model,
        "training_config": sections.training,
    }
    assert given["dataset"] == {
        "transform": trainer.data_transform,
        "tokenizer": trainer.tokenizer,
        "mesh_context": dims,
        "training_config": sections.training,
    }
    assert given["dataloader"].pop("batch_sampler").rows == 8
    assert given["dataloader"] == {
        "dataset": trainer.dataset,
        "collate_fn": trainer.collate_fn,
        "batch_size": 4,
        "dp_world_size": 1,
        "max_seq_len": 16,
        "seed": sections.training.seed,
    } | phases.loader_arguments(sections, dims, trainer.tokenizer)
    assert given["optimizer"]["model"] is trainer.model_parts[0]
    assert given["optimizer"].keys() == {"model", "model_parts", "params"}
    assert given["lr_scheduler"] == {
        "optimizer": trainer.optimizers.optimizers[0],
        "train_iters": 3,
        "optimizers": trainer.optimizers,
        "training_steps": 3,
    }
    assert given["loss"] == {}


class ValueModel(nn.Module):
    """Hidden states are the ids times one weight, so that a token's loss can be its id."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, input_ids_BT: torch.Tensor, labels_BT: torch.Tensor, loss_fn: Any) -> ModelOutput:
        return ModelOutput(loss_sum=loss_fn(self.weight * input_ids_BT[..., None], None, labels_BT))


class MeanOfValues(nn.Module):
    """The mean of the hidden states where something is trained, and no NaN where nothing is."""

    def forward(self, *, model_output: Any, labels: torch.Tensor) -> torch.Tensor:
        values = model_output.hidden_states_BTD[:, :-1, 0][labels[:, 1:] != -100]
        return values.sum() / max(1, values.numel())


def accumulated(aggregation: Any, batches: list[tuple[list[int], int]]) -> tuple[float, float]:
    """(loss of the step, gradient) of rows of (values, how many of them are trained)."""
    model, loss = ValueModel(), ModuleLoss(MeanOfValues(), vocab_size=8)
    items = [
        {"input_ids_BT": torch.tensor([values]), "labels_BT": torch.tensor([[1] * n + [-100] * (len(values) - n)])}
        for values, n in batches
    ]
    scales, _ = loss_scales([item["labels_BT"] for item in items], aggregation, None, torch.device("cpu"))
    step = Accumulation([model], loss, lambda item: item, len(items))  # type: ignore[list-item]
    total = sum(loss_shares(o, s, 1)[0] for o, s in zip(step(items, scales), scales, strict=True))
    assert model.weight.grad is not None
    return float(total), float(model.weight.grad)


def test_tokens_are_weighted_alike_whatever_the_micro_batch() -> None:
    batches = [([1, 2, 3, 9], 3), ([4, 9, 9, 9], 1)]
    assert accumulated("token_weighted", batches) == (2.5, 2.5)
    assert accumulated("rank_average", batches) == (3.0, 3.0)
    masked = [*batches, ([7, 7, 7, 7], 0)]
    assert accumulated("token_weighted", masked) == (2.5, 2.5)
    assert accumulated("rank_average", masked) == (3.0, 3.0)
    assert accumulated("token_weighted", [([1, 2, 3, 4, 9], 4)]) == (2.5, 2.5)  # one batch


def test_follows_a_loop_of_transformers(tmp_path: Path) -> None:
    """Which shifts the labels by itself. The learning rate is that of torch's own scheduler."""
    theirs = tiny_model("gpt2", vocab_size=4096)
    config = counting_config(tmp_path / "run", save(theirs, tmp_path / "gpt2"), steps=20, global_batch_size=2)
    config.optimizer = Target.of(text_parts.SGDOptimizer, lr=0.1)
    config.training.max_grad_norm = None
    config.lr_scheduler = Target.of(text_parts.a_tenth_less_each_step)
    with Watched(config) as trainer:
        trainer.train()
    lines = metrics(config.dump_folder)
    assert [line["lr"] for line in lines] == pytest.approx([0.1 * 0.9**step for step in range(20)], abs=1e-15)

    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for line, numbers in zip(lines, trainer.rows, strict=True):
        ids = torch.stack([torch.arange(n, n + 16) for n in numbers])
        logits = theirs(input_ids=ids).logits[:, :-1].flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, ids[:, 1:].flatten())  # transformers' own rounds to float32
        loss.backward()
        assert line["loss"] == pytest.approx(loss.item(), abs=TOLERANCE)
        norm = torch.stack([p.grad.norm() for p in theirs.parameters()]).norm()
        assert line["grad_norm"] == pytest.approx(norm.item(), abs=TOLERANCE)
        optimizer.param_groups[0]["lr"] = line["lr"]
        optimizer.step()
        optimizer.zero_grad()
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.5


@pytest.mark.parametrize(
    ("loss", "factor"),
    [
        (Target.of(ModelOutputLoss), 1.0),
        (Target.of(text_parts.ScaledModelOutputLoss, scale=0.5), 0.5),
        (Target.of(text_parts.ShiftingLoss), 1.0),
    ],
    ids=["default", "scaled", "shifting"],
)
def test_losses_of_ones_own(tmp_path: Path, folder: str, loss: Target, factor: float) -> None:
    plain = text_config(tmp_path / "plain", folder, steps=2)
    other = text_config(tmp_path / "other", folder, steps=2)
    other.loss = loss
    expected, got = train(plain), train(other)
    assert got[0]["loss"] == pytest.approx(factor * expected[0]["loss"], abs=TOLERANCE)
    if factor == 1.0:
        assert max(worst(expected, got).values()) <= TOLERANCE


def test_a_chunked_loss_never_has_all_logits(tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from hyper_parallel.components.chunked_causal_lm_loss import ChunkedCausalLMLoss
    from hyper_parallel.components.loss import ChunkedCELoss

    plain = text_config(tmp_path / "plain", folder, steps=3)
    chunked = text_config(tmp_path / "chunked", folder, steps=3)
    chunked.loss = Target.of(ChunkedCausalLMLoss, chunk_size=24)
    sizes: list[int] = []
    tokens = ChunkedCELoss.chunk_tokens

    def seen(self: Any, device: torch.device) -> int:
        sizes.append(tokens(self, device))
        return sizes[-1]

    expected = train(plain)
    with TextTrainer(chunked) as trainer:
        head = trainer.model_parts[0].get_submodule("lm_head")
        head.register_forward_hook(lambda *_: pytest.fail("the head was called for logits"))
        monkeypatch.setattr(ChunkedCELoss, "chunk_tokens", seen)
        with widened(trainer.model_parts[0]):
            trainer.train()
    assert max(worst(expected, metrics(chunked.dump_folder)).values()) <= TOLERANCE
    assert set(sizes) == {24}  # of the 64 tokens of a micro-batch
    with pytest.raises(ConfigError, match=r"loss.chunk_size: 0 is below 1; .*\nloss.ignore_index: 0 is not -100"):
        ChunkedCausalLMLoss(chunk_size=0, ignore_index=0)


FACTORY = "hyper_parallel.models.qwen3_moe.adapter.replacements.replace_rms_norm"
OVERRIDES = """
plan_overrides:
  - match: ["model.layers.*.input_layernorm", "model.layers.*.post_attention_layernorm", "model.norm"]
    module_type: transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeRMSNorm
    exact_type: true
    replace_module: {_target_: hyper_parallel.models.qwen3_moe.adapter.replacements.replace_rms_norm}
  - match: "model.layers.*.self_attn"
    module_type: transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeAttention
    replace_module: {_target_: hyper_parallel.models.qwen3_moe.adapter.replacements.replace_attention}
  - match: "model.layers.*.mlp.experts"
    module_type: transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeExperts
    replace_module: {_target_: hyper_parallel.models.qwen3_moe.adapter.replacements.replace_experts}
  - match: "model.layers.*.self_attn.o_proj"
    when: cp
    module_type: torch.nn.Linear
    replace_module: {_target_: hyper_parallel.models.qwen3_moe.adapter.replacements.replace_rms_norm}
  - {match: "model.layers.*.self_attn", when: cp, inner_target: heads, inner_wrapper: sdpa_qkv, region_dispatch: true}
  - {match: "model.norm", when: low_precision, params: auto, in_src: {}, out_dst: none}
"""


def test_replaced_modules_train_alike(
    tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text((YAML + OVERRIDES).replace("FOLDER", folder))
    parsed = parse_training_args(["run.yaml"])
    assert resolve_root(yaml.safe_load(to_yaml(parsed))) == parsed
    own, other = (text_config(tmp_path / name, folder, steps=5) for name in ("own", "other"))
    other.plan_overrides = parsed.plan_overrides
    with TextTrainer(other) as trainer:
        names = trainer.model_parts[0].replaced_modules
        with widened(trainer.model_parts[0]):
            trainer.train()
    assert len(names) == 7 + 3 + 2  # of three layers one is without experts
    assert names["model.layers.2.mlp.experts"] == ("Qwen3MoeExperts", "GroupedExperts")
    differences = worst(train(own), metrics(other.dump_folder))
    assert max(differences.values()) <= TOLERANCE, differences

    assert explain.main(["run.yaml", "--world_size", "1"]) == 0
    told = capsys.readouterr().out
    assert re.search(r"model\.layers\.\*\.mlp\.experts +2 +Qwen3MoeExperts +GroupedExperts\n", told)
    assert re.search(r"model\.layers\.\*\.self_attn +3 +Qwen3MoeAttention +GroupedQueryAttention\n", told)


def test_rules_that_change_nothing_are_refused(
    tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (YAML + OVERRIDES).replace("FOLDER", folder)
    told = refusal(capsys, text.replace(FACTORY, "tests.trainer.text_parts.undecorated"))
    assert "plan_overrides.0.replace_module: tests.trainer.text_parts.undecorated is not decorated with @mod" in told
    told = refusal(capsys, text.replace("exact_type", "exct_type"))
    assert "plan_overrides.0.exct_type: PlanOverride has no field 'exct_type'" in told
    Path("run.yaml").write_text(text.replace('"model.layers.*.self_attn"', '"model.layer.*.self_attn"'))
    with pytest.raises(
        ConfigError, match=r"plan_overrides.1.match: \[HP-REPLACE-001\] .*; near: model.layers.\*.self_attn"
    ):
        TextTrainer(parse_training_args(["run.yaml"]))


def test_an_epoch_has_each_row_once_and_another_order(tmp_path: Path, folder: str) -> None:
    """Stopped exactly at the edge of an epoch and resumed, a run takes the rows of the straight one."""
    config = counting_config(tmp_path / "straight", folder, steps=None, epochs=2, global_batch_size=2)
    config.lr_scheduler.warmup_steps = 0
    with Watched(config) as straight:
        straight.train()
    assert straight.training_steps == 8
    epochs = [[row for step in part for row in step] for part in (straight.rows[:4], straight.rows[4:])]
    assert [sorted(epoch) for epoch in epochs] == [list(range(8))] * 2 and epochs[0] != epochs[1]

    first = copy.deepcopy(config).derive(dump_folder=str(tmp_path / "resumed"))
    first.checkpoint = CheckpointManager.Config(interval_steps=4)
    rows = []
    for steps in (4, 8):
        with Watched(first.derive()) as trainer:
            trainer.training_steps = steps
            trainer.train()
        rows += trainer.rows
    assert rows == straight.rows
    whole, resumed = metrics(config.dump_folder), metrics(first.dump_folder)
    assert [line["loss"] for line in whole] == [line["loss"] for line in resumed]


def run_cases(root: str, folder: str, rules: tuple[PlanOverride, ...]) -> dict[str, Any]:
    """On each of two ranks: the rows that it trained in each step, by case, and what a wrong plan is told."""
    told: dict[str, Any] = {}
    for name, dataset in (("sampled", text_parts.CountingDataset), ("streamed", text_parts.CountingStream)):
        config = counting_config(Path(root) / name, folder, steps=4, global_batch_size=4)
        config.dataset = Target.of(dataset, rows=8)
        if name == "streamed":
            config.dataloader = Target.of(build_dataloader, shuffle=False)
        told[name] = trained_rows(config)
    config = counting_config(Path(root) / "unlike", folder, steps=None, epochs=1, global_batch_size=2)
    config.lr_scheduler.warmup_steps = 0
    config.dataset, config.dataloader = Target.of(text_parts.unlike_ranks), Target.of(text_parts.as_it_is)
    told["unlike"] = trained_rows(config)

    config = with_parallelism(text_config(Path(root) / "replaced", folder, steps=5), tp=2)
    config.plan_overrides = rules
    train(config)

    same = PlanOverride(match="layers.1.mlp.up_proj", params={"weight": "shard(0)"}, out_src=("shard(2)",))
    for mode in ("production", "validate"):
        config = with_parallelism(tiny_config(Path(root) / mode, steps=3), tp=2, mode=mode)
        config.plan_overrides = (same,)
        train_tiny(config)
    config = with_parallelism(tiny_config(Path(root) / "wrong", steps=3), tp=2, mode="validate")
    config.plan_overrides = (PlanOverride(match="layers.*.self_attn.o_proj", out_src=("replicate",)),)
    with pytest.raises(PlacementMismatchError) as caught:
        train_tiny(config)
    told["wrong"] = str(caught.value)
    return told


def trained_rows(config: TrainerConfig) -> list[list[int]]:
    with Watched(config) as trainer, widened(trainer.model_parts[0]):
        trainer.train()
    return trainer.rows


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory, folder: str) -> tuple[Path, list[dict[str, Any]]]:
    root = tmp_path_factory.mktemp("two_ranks")
    (root / "run.yaml").write_text((YAML + OVERRIDES).replace("FOLDER", folder))
    rules = parse_training_args([str(root / "run.yaml")]).plan_overrides
    return root, run_world(2, run_cases, str(root), folder, rules, timeout=200)


@pytest.mark.slow
def test_ranks_share_out_the_rows(tmp_path: Path, folder: str, two_ranks: Any) -> None:
    alone = counting_config(tmp_path / "alone", folder, steps=4, global_batch_size=4)
    rows = trained_rows(alone)
    root, (first, second) = two_ranks
    both = [sorted(a + b) for a, b in zip(first["sampled"], second["sampled"], strict=True)]
    assert both == [sorted(step) for step in rows]
    differences = worst(metrics(alone.dump_folder), metrics(root / "sampled"))
    assert max(differences.values()) <= TOLERANCE, differences
    assert first["streamed"] == [[0, 2], [4, 6], [0, 2], [4, 6]]
    assert second["streamed"] == [[1, 3], [5, 7], [1, 3], [5, 7]]
    assert len(first["unlike"]) == len(second["unlike"]) == 4  # of 5 and 4 items


@pytest.mark.slow
def test_replaced_modules_train_alike_over_two_ranks(tmp_path: Path, folder: str, two_ranks: Any) -> None:
    """Tensor parallel, by the plan of the modules that they replace."""
    differences = worst(train(text_config(tmp_path, folder, steps=5)), metrics(two_ranks[0] / "replaced"))
    assert max(differences.values()) <= TOLERANCE, differences


@pytest.mark.slow
def test_validate_compares_what_an_override_declares(tmp_path: Path, two_ranks: Any) -> None:
    alone = train_tiny(tiny_config(tmp_path / "alone", steps=3))
    root, (told, _) = two_ranks
    for mode in ("production", "validate"):
        differences = worst(alone, metrics(root / mode))
        assert max(differences.values()) <= TOLERANCE, differences
    assert "plan of module 'layers.0.self_attn.o_proj': output 0 is declared Replicate()" in told["wrong"]
    assert "but it is Partial(sum)" in told["wrong"]


MODEL = """model:
  _target_: hyper_parallel.models.auto.HyperAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: FOLDER
"""
YAML = (
    MODEL
    + """\
training: {max_steps: 3, seq_len: 16, global_batch_size: 4, micro_batch_size: 2, backend: gloo, init_device: meta}
fsdp_config: {dp_shard_size: 1}
dataset: {_target_: tests.trainer.text_parts.CountingDataset, rows: 8}
collate_fn: {_target_: tests.trainer.text_parts.LastTokenCollator}
dataloader: {_target_: hyper_parallel.components.data.build_dataloader, shuffle: false, drop_last: true}
loss_fn: {_target_: tests.trainer.text_parts.ScaledModelOutputLoss, scale: 0.5}
optimizer: {_target_: tests.trainer.text_parts.SGDOptimizer, lr: 1.0e-3}
lr_scheduler: {_target_: tests.trainer.text_parts.a_tenth_less_each_step}
checkpoint: {enabled: false}
"""
)


def test_parts_of_ones_own_from_a_yaml_file(tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(YAML.replace("FOLDER", "elsewhere"))
    flags = ["--training.train_iters=2", f"--model.pretrained_model_name_or_path={folder}", "--optimizer.lr=2e-3"]
    config = parse_training_args(["run.yaml", *flags])
    assert config.comm.backend == "gloo"
    trainer = config.build()
    assert type(trainer) is TextTrainer
    trainer.train()
    assert isinstance(trainer.optimizers.optimizers[0], torch.optim.SGD)
    lines = metrics("outputs")
    assert [line["lr"] for line in lines] == pytest.approx([2e-3, 1.8e-3])
    assert lines[0]["loss"] == pytest.approx(0.5 * torch.log(torch.tensor(4096.0)).item(), abs=0.5)


def refusal(capsys: pytest.CaptureFixture[str], text: str) -> str:
    Path("run.yaml").write_text(text)
    with pytest.raises(SystemExit) as caught:
        parse_training_args(["run.yaml"])
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_a_dataset_is_needed(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^dataset: is missing: a TextTrainer reads one; give one, such as hyper_par"
    ):
        TextTrainer(tiny_config(tmp_path, steps=1))
