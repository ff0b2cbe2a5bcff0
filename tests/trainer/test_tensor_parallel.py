"""One loss curve under tensor parallelism: in float64 every case follows the single process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hyper_parallel.components.checkpoint import CheckpointManager
from hyper_parallel.components.data import TextDataLoader
from hyper_parallel.components.loss import ChunkedCELoss, CrossEntropyLoss
from hyper_parallel.components.validator import Validator
from hyper_parallel.config.sections import ActivationCheckpointConfig, CompileConfig
from hyper_parallel.config.target import Target
from hyper_parallel.models import load_hf, qwen3, qwen3_moe
from hyper_parallel.models.common.decoder_sharding import FEATURE, SEQUENCE, split, whole
from hyper_parallel.protocols.sharding import PlacementMismatchError, ShardingPlan
from hyper_parallel.trainer import phases
from hyper_parallel.trainer.config import TrainerConfig
from tests.distributed_world import run_world
from tests.trainer.runs import TINY, metrics, small_corpus, tiny_config, with_parallelism

STEPS = 8
TOLERANCE = 1e-9
DENSE = {
    name: value for name, value in TINY.items() if "expert" not in name and "mlp" not in name and "moe" not in name
}
DENSE.pop("router_aux_loss_coef")


@dataclass(frozen=True)
class Case:
    """A run, and what the single process that it is compared with does in the same way."""

    parallelism: dict[str, Any] = field(default_factory=dict)
    rows: int = 8
    """In a micro-batch."""
    dense: bool = False
    sizes: dict[str, Any] = field(default_factory=dict)
    packing: str = "concat"
    whole_logits: bool = False
    recompute: bool = False
    compile: bool = False

    def config(self, folder: str | Path, steps: int) -> TrainerConfig:
        config = with_parallelism(tiny_config(folder, steps=steps, micro_batch_size=self.rows), **self.parallelism)
        family, sizes = (qwen3, DENSE) if self.dense else (qwen3_moe, TINY)
        config.model_spec = family.create_model_spec("debug", **sizes | self.sizes)
        config.dataloader = TextDataLoader.Config(path=small_corpus(), packing=self.packing)
        config.loss = CrossEntropyLoss.Config() if self.whole_logits else ChunkedCELoss.Config(chunk_tokens=48)
        config.activation_checkpoint = ActivationCheckpointConfig(mode="full" if self.recompute else "none")
        config.compile = CompileConfig(enable=self.compile, backend="aot_eager")
        return config

    @property
    def reference(self) -> Case:
        return Case(dense=self.dense, sizes=self.sizes, packing=self.packing)


SP, LP, VALIDATE = {"sequence_parallel": True}, {"loss_parallel": True}, {"mode": "validate"}
TIED, BIASED, WIDE = {"tie_word_embeddings": True}, {"attention_bias": True}, {"num_key_value_heads": 4}
TP = {"tp": 2, "dp_shard": 1}

CASES: dict[int, dict[str, Case]] = {
    1: {
        "recompute, compile, accumulate 2": Case(rows=4, sizes=TIED, recompute=True, compile=True),
    },
    2: {
        "moe": Case(TP, sizes=WIDE),
        "moe, validate": Case(TP | VALIDATE, sizes=WIDE),
        "moe, sp, lp, tied, recompute, accumulate 2": Case(TP | SP | LP, 4, sizes=TIED, recompute=True),
        "moe, sp, lp, tied, validate, recompute, accumulate 2": Case(
            TP | SP | LP | VALIDATE, 4, sizes=TIED, recompute=True
        ),
        "moe, lp, pad": Case(TP | LP, packing="pad"),
        "dense, sp, tied": Case(TP | SP, dense=True, sizes=TIED),
        "dense, sp, lp, whole logits, biases": Case(TP | SP | LP, dense=True, sizes=BIASED, whole_logits=True),
        "dense, sp, lp, biases, validate": Case(TP | SP | LP | VALIDATE, dense=True, sizes=BIASED),
        "dense, compile, recompute, lp, sp": Case(
            TP | SP | LP, 4, dense=True, sizes=TIED, recompute=True, compile=True
        ),
    },
    4: {
        "moe, shard 2, sp, lp": Case({"tp": 2, "dp_shard": 2} | SP | LP, 4, sizes=WIDE),
        "moe, shard 2, offload, compile, recompute, sp, lp, accumulate 2": Case(
            {"tp": 2, "dp_shard": 2, "cpu_offload": True} | SP | LP,
            2,
            sizes=TIED,
            recompute=True,
            compile=True,
        ),
        "dense, replicate 2, validate, offload, recompute, sp, lp, accumulate 2": Case(
            {"tp": 2, "dp_replicate": 2, "dp_shard": 1, "cpu_offload": True} | SP | LP | VALIDATE,
            2,
            dense=True,
            recompute=True,
        ),
        "dense, shard 2, validate, pad": Case({"tp": 2, "dp_shard": 2} | VALIDATE, 4, dense=True, packing="pad"),
        "moe, tp 4, sp, lp": Case({"tp": 4, "dp_shard": 1} | SP | LP, sizes=WIDE),
        "replicate 2 x shard 2, recompute": Case({"dp_replicate": 2, "dp_shard": 2}, 2, recompute=True),
    },
}
ALL = [(world_size, name) for world_size, cases in CASES.items() for name in cases]


def train(config: TrainerConfig) -> dict[str, torch.Tensor]:
    """Trains, and returns the whole weights."""
    assert not list(config.cross_faults(dist.get_world_size() if dist.is_initialized() else 1))
    with config.build() as trainer:
        trainer.train()
        return {
            name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
            for name, p in trainer.model_parts[0].named_parameters()
        }


def run_cases(folder: str, world_size: int) -> None:
    for name, case in CASES[world_size].items():
        train(case.config(Path(folder) / name, STEPS))


@pytest.fixture(scope="module")
def curves(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, list[dict[str, Any]]]]:
    """metrics.jsonl by case, for a world size; each world is started once."""
    folder, done = tmp_path_factory.mktemp("tensor_parallel"), {}

    def curves_of(world_size: int) -> dict[str, list[dict[str, Any]]]:
        if world_size not in done:
            run_world(world_size, run_cases, str(folder), world_size, timeout=580)
            done[world_size] = {name: metrics(folder / name) for name in CASES[world_size]}
        return done[world_size]

    return curves_of


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], list[dict[str, Any]]]:
    folder, done = tmp_path_factory.mktemp("references"), {}

    def reference_of(case: Case) -> list[dict[str, Any]]:
        key = repr(case.reference)
        if key not in done:
            train(case.reference.config(folder / str(len(done)), STEPS))
            done[key] = metrics(folder / str(len(done)))
        return done[key]

    return reference_of


def worst(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> dict[str, float]:
    assert [line["step"] for line in first] == [line["step"] for line in second]
    keys = [key for key in ("loss", "grad_norm", "aux_loss", "validation_loss") if any(key in line for line in first)]
    return {
        key: max(abs(a[key] - b[key]) for a, b in zip(first, second, strict=True) if key in a or key in b)
        for key in keys
    }


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("world_size", "name"), ALL)
def test_follows_the_single_process(curves: Any, references: Any, world_size: int, name: str) -> None:
    reference, curve = references(CASES[world_size][name]), curves(world_size)[name]
    for key, difference in worst(reference, curve).items():
        assert difference <= TOLERANCE, f"{key} differs by {difference}"
    assert [line["tokens"] for line in curve] == [256] * STEPS
    assert ("aux_loss" in curve[0]) == (not CASES[world_size][name].dense)
    assert curve[-1]["loss"] < curve[0]["loss"] - 0.03  # the curves fall: they are not equal because nothing moves


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_validate_agrees_with_production(curves: Any) -> None:
    checked = 0
    for name, case in CASES[2].items():
        if case.parallelism.get("mode") == "validate":
            production = next(
                other
                for other, plain in CASES[2].items()
                if plain.parallelism == {k: v for k, v in case.parallelism.items() if k != "mode"}
                and (plain.dense, plain.sizes, plain.rows) == (case.dense, case.sizes, case.rows)
            )
            pair = curves(2)[name], curves(2)[production]
            assert max(worst(*pair).values()) <= 1e-12, name
            checked += 1
    assert checked == 3


def saving(case: Case, folder: Path) -> TrainerConfig:
    config = case.config(folder, STEPS)
    config.checkpoint = CheckpointManager.Config(interval_steps=STEPS // 2)
    held_out = TextDataLoader.Config(path=small_corpus(), shuffle=False)
    config.validator = Validator.Config(enable=True, interval_steps=2, steps=1, dataloader=held_out)
    return config


SPLIT, SHARDED = Case(TP | SP | LP), Case({"dp_shard": 2}, 4)
CHANGES = {"tp 2 -> shard 2": (SPLIT, SHARDED), "shard 2 -> tp 2": (SHARDED, SPLIT)}


def stop_and_resume(folder: str, changes: dict[str, tuple[Case, Case]]) -> None:
    for name, (first, second) in changes.items():
        with saving(first, Path(folder) / name).build() as trainer:
            trainer.training_steps = STEPS // 2
            trainer.train()
        train(saving(second, Path(folder) / name))


def test_resumes_under_another_parallelism(tmp_path: Path) -> None:
    train(saving(Case(), tmp_path / "straight"))
    run_world(2, stop_and_resume, str(tmp_path), CHANGES, timeout=240)
    straight = metrics(tmp_path / "straight")
    assert sum("validation_loss" in line for line in straight) == 4
    for name in CHANGES:
        for key, difference in worst(straight, metrics(tmp_path / name)).items():
            assert difference <= TOLERANCE, f"{name}: {key} differs by {difference}"


def export_and_load(folder: str) -> dict[str, torch.Tensor]:
    with SPLIT.config(Path(folder) / "run", 1).build() as trainer:
        trainer.checkpointer.export_hf(str(Path(folder) / "exported"))
    config = SPLIT.config(Path(folder) / "other", 1)
    config.training.seed = 7  # weights that are loaded do not depend on it
    config.checkpoint = CheckpointManager.Config(load_from=str(Path(folder) / "exported"))
    with config.build() as trainer:
        trainer.checkpointer.load()
        return {name: p.full_tensor().detach() for name, p in trainer.model_parts[0].named_parameters()}


def test_weights_go_out_and_come_back(tmp_path: Path) -> None:
    """Bit by bit those that one process draws from the same seed."""
    with Case().config(tmp_path / "single", 1).build() as trainer:
        drawn = {name: p.detach().clone() for name, p in trainer.model_parts[0].named_parameters()}
    loaded, _ = run_world(2, export_and_load, str(tmp_path), timeout=200)
    exported = dict(load_hf(tmp_path / "exported", torch.float64).named_parameters())
    assert drawn.keys() == loaded.keys() == exported.keys()
    assert [name for name, p in drawn.items() if not torch.equal(p, exported[name])] == []
    assert [name for name, p in drawn.items() if not torch.equal(p, loaded[name])] == []


def forward(case: Case, change: Callable[[ShardingPlan], None], folder: str) -> str | torch.Tensor:
    """The logits of a model with a changed plan; or which module and axis do not agree, and the message."""
    config = case.config(folder, 1)
    dims = phases.set_up_process(config)
    model_config = phases.prepare_model_config(config)
    change(model_config.sharding)
    model = phases.construct_model(config, model_config)
    parts = phases.parallelize(config, model, dims)
    phases.materialize(config, parts)
    try:
        return parts[0](torch.arange(64).view(2, 32)).logits.detach()
    except PlacementMismatchError as error:
        return f"{error.module} {error.axis}: {error}"


def refused(folder: str) -> str:
    """Why a plan with holes is refused."""
    config = SPLIT.config(folder, 1)
    model_config = phases.prepare_model_config(config)
    plan = model_config.sharding
    plan["layers.*.nothing"] = plan.pop("norm")
    plan["loss_output"] = replace(plan["loss_output"], in_src={"hidden": whole()})
    model = phases.construct_model(config, model_config)
    with pytest.raises(TypeError) as error:
        model.parallelize(phases.set_up_process(config), "production")
    return str(error.value)


def plant(module: str, **changes: Any) -> Callable[[ShardingPlan], None]:
    def change(plan: ShardingPlan) -> None:
        plan[module] = replace(plan[module], **changes)

    return change


def forwards(folder: str) -> list[str | torch.Tensor]:
    checked = Case(TP | SP | LP | VALIDATE)
    return [
        forward(Case(TP | SP | LP), lambda plan: None, folder),
        forward(checked, lambda plan: None, folder),
        forward(Case(TP | VALIDATE), plant("layers.*.self_attn", out_dst=(split(SEQUENCE),)), folder),
        forward(checked, plant("layers.*.self_attn", out_dst=(whole(),)), folder),
        forward(checked, plant("embed_tokens", out_dst=(whole(),)), folder),
        forward(checked, plant("layers.*.self_attn.o_proj", out_src=(split(FEATURE),)), folder),
        forward(checked, plant("norm", out_dst=(split(FEATURE),)), folder),
        refused(folder),
    ]


def test_a_wrong_plan_is_found_and_a_right_one_gives_whole_logits(tmp_path: Path) -> None:
    production, validated, *errors, refusal = run_world(2, forwards, str(tmp_path), timeout=200)[1]
    with Case().config(tmp_path, 1).build() as trainer:
        logits = trainer.model_parts[0](torch.arange(64).view(2, 32)).logits.detach()
    for split_logits in (production, validated):
        torch.testing.assert_close(split_logits, logits, rtol=0, atol=1e-13)
    assert errors[0] == (
        "layers.0.self_attn tp: plan of module 'layers.0.self_attn': what its output meets is declared Shard(dim=1) "
        "on mesh axis 'tp', but it is Replicate(); correct this module's entry in the sharding plan, or the out_dst of "
        "the module before it"
    )
    assert errors[2].startswith(
        "layers.0.input_layernorm tp: plan of module 'layers.0.input_layernorm': argument x is declared Shard(dim=1) "
        "on mesh axis 'tp', but it is Replicate(); correct"
    )
    assert [error.partition(": plan")[0] for error in errors[1:]] == [
        "layers.0.self_attn tp",
        "layers.0.input_layernorm tp",
        "layers.0.self_attn.o_proj tp",
        "logits_output tp",
    ]
    assert refusal == (
        "sharding plan: parameter norm.weight is in no plan; loss_output.forward has no argument 'hidden'; "
        "'layers.*.nothing' names no module"
    )


@pytest.mark.parametrize(
    ("sizes", "parallelism", "seq_len", "facts"),
    [
        (
            {"num_attention_heads": 6, "num_key_value_heads": 3, "moe_intermediate_size": 18, "intermediate_size": 50},
            {"tp": 4},
            32,
            ["heads 6", "value_heads 3", "moe_intermediate_size 18", "intermediate_size 50"],
        ),
        ({}, {"tp": 2, "sequence_parallel": True}, 33, ["33 is not a multiple of parallelism.tp 2"]),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_their_values(
    tmp_path: Path, sizes: dict[str, int], parallelism: dict[str, Any], seq_len: int, facts: list[str]
) -> None:
    config = Case(parallelism, sizes=sizes).config(tmp_path, 1)
    config.training.seq_len = seq_len
    faults = list(config.cross_faults(config.parallelism.tp))
    assert len(faults) == len(facts)
    for fact in facts:
        assert any(fault.fact.endswith(fact) or fault.fact.startswith(fact) for fault in faults), fact


def test_what_needs_ranks_is_refused_without_them(tmp_path: Path) -> None:
    config = Case({"sequence_parallel": True, "loss_parallel": True, "mode": "validate"}).config(tmp_path, 1)
    assert sorted(fault.path for fault in config.parallelism.faults()) == ["loss_parallel", "mode", "sequence_parallel"]


def test_a_family_without_a_plan_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Case(TP).config(tmp_path, 1)
    monkeypatch.setattr(type(config.model_spec.model), "set_sharding_config", lambda model, parallelism: None)
    assert "parallelism.tp: 2, but qwen3_moe has no tensor-parallel plan" in str(next(config.cross_faults(2)))


def whole_logits_only(vocab_size: int) -> Any:
    """A loss that does not know of parts of the vocabulary."""
    raise AssertionError("refused before it is built")


def test_a_loss_that_wants_whole_logits_is_refused(tmp_path: Path) -> None:
    config = Case(TP | LP).config(tmp_path, 1)
    config.loss = Target.of(whole_logits_only)
    (fault,) = config.cross_faults(2)
    assert (fault.path, fault.fact) == (
        "parallelism.loss_parallel",
        "True, but whole_logits_only knows whole logits only (it has no spreads_vocabulary = True)",
    )


def test_a_world_that_does_not_divide_names_every_factor(tmp_path: Path) -> None:
    config = Case({"tp": 2, "dp_replicate": 2}).config(tmp_path, 1)
    (fault,) = config.cross_faults(6)
    assert fault.fact == "dp_replicate 2 x tp 2 = 4 does not divide the world size 6"
