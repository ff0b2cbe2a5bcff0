"""A run of the parity matrix, and the single process that it is compared with."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

from hyper_parallel.components.checkpoint import CheckpointManager
from hyper_parallel.components.data import TextDataLoader
from hyper_parallel.components.loss import ChunkedCELoss, CrossEntropyLoss
from hyper_parallel.components.optimizer import AdamW
from hyper_parallel.config.errors import Fault
from hyper_parallel.config.sections import ActivationCheckpointConfig, CompileConfig, ParallelismConfig
from hyper_parallel.models import qwen3, qwen3_moe
from hyper_parallel.protocols.model_spec import ModelSpec
from hyper_parallel.trainer.config import TrainerConfig
from tests.trainer.runs import small_corpus, tiny_config

LEARNING_RATE = 5e-4
"""Calm enough for the tolerance: in one process, initial weights that are disturbed in their last place change gradient
norms by up to 5e-12 in 500 steps. At twice the rate some token goes to other experts, and curves part by 1e-3."""
ROWS, TOKENS = 8, 32
"""Of a step: documents of unequal length packed into rows, so that no two micro-batches train as many tokens."""

DENSE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
MOE = DENSE | {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "mlp_only_layers": (1,),
    "router_aux_loss_coef": 0.01,
}
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "moe tied": (qwen3_moe, MOE | {"tie_word_embeddings": True}),
    "moe": (qwen3_moe, MOE),
    "dense": (qwen3, DENSE),
    "dense tied": (qwen3, DENSE | {"tie_word_embeddings": True}),
}


@functools.cache
def spec_of(model: str, **more: Any) -> ModelSpec:
    """The ModelSpec of one of MODELS with `more` sizes, which nothing changes: a run takes a copy."""
    family, sizes = MODELS[model]
    return family.create_model_spec("debug", **sizes, **more)


def literals(section: type, name: str) -> tuple[Any, ...]:
    """The values that a field of a Config may have."""
    return get_type_hints(section)[name].__args__


@dataclass(frozen=True, kw_only=True, slots=True)
class Combination:
    """What a run is made of. Every field is a factor of the matrix; the defaults are the plain run of one process."""

    model: str = "moe tied"
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    cp_method: str = "ring"
    pp_schedule: str = "1f1b"
    sequence_parallel: bool = False
    loss_parallel: bool = False
    mode: str = "production"
    recompute: str = "none"
    swap: bool = False
    compile: bool = False
    packing: str = "concat"
    micro_batches: int = 1
    cpu_offload: bool = False
    loss: str = "whole"
    reshard_after_forward: bool | None = None

    @property
    def world_size(self) -> int:
        """Ranks of the run. `ep` adds none."""
        return self.dp_replicate * self.dp_shard * self.cp * self.tp * self.pp

    @property
    def name(self) -> str:
        """What is not as in the plain run, short, and fit for a folder."""
        words = [f"{name}={value}" for name, value in self.items().items() if name not in ("model", *DEGREES)]
        degrees = [f"{short}{getattr(self, name)}" for name, short in DEGREES.items() if getattr(self, name) > 1]
        return ", ".join([" x ".join(degrees) or "one process", self.model, *words])

    def items(self) -> dict[str, Any]:
        """The fields that are not as in the plain run."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}

    @property
    def reference(self) -> Combination:
        """The run of one process over the same model and data, with nothing switched on."""
        return Combination(model=self.model, packing=self.packing)

    def config(self, folder: str | Path, steps: int, **checkpoint: Any) -> TrainerConfig:
        """The run in float64."""
        rows = ROWS // (self.dp_replicate * self.dp_shard * self.micro_batches)
        batch = {"seq_len": TOKENS, "global_batch_size": ROWS, "micro_batch_size": rows}
        config = tiny_config(folder, steps=steps, model_spec=spec_of(self.model), **batch)
        config.parallelism = ParallelismConfig(**{name: getattr(self, name) for name in _PARALLELISM})
        memory = {"memory_budget": 0.5} if self.recompute == "memory_budget" else {}
        memory |= {"swap": True} if self.swap else {}
        config.activation_checkpoint = ActivationCheckpointConfig(mode=self.recompute, **memory)
        config.compile = CompileConfig(enable=self.compile, backend="aot_eager")
        config.dataloader = TextDataLoader.Config(path=small_corpus(), packing=self.packing)
        config.optimizer = AdamW.Config(lr=LEARNING_RATE)
        config.loss = CrossEntropyLoss.Config() if self.loss == "whole" else ChunkedCELoss.Config(chunk_tokens=48)
        config.checkpoint = CheckpointManager.Config(**{"enable": False} | checkpoint)
        return config

    def faults(self) -> list[Fault]:
        """Why a run refuses the combination, told by the run's own rules: REFUSED of the capability table is one."""
        if ROWS % (self.dp_replicate * self.dp_shard * self.micro_batches):
            rows = f"{ROWS} rows over {self.dp_replicate} x {self.dp_shard} ranks"
            return [Fault("micro_batches", f"{self.micro_batches} of {rows}", "give a divisor")]
        config = self.config("unused", 50)
        own = (fault for _, node in config.traverse() for fault in node.faults())
        return [*own, *config.cross_faults(self.world_size)]


DEGREES = {"dp_replicate": "rep", "dp_shard": "shard", "cp": "cp", "tp": "tp", "pp": "pp", "ep": "ep"}
"""Fields that say how ranks are arranged, and their short names."""
_PARALLELISM = [f.name for f in fields(Combination) if f.name in {g.name for g in fields(ParallelismConfig)}]


def layouts(sizes: tuple[int, ...]) -> tuple[dict[str, int], ...]:
    """All degrees up to 4 that multiply to one of `sizes`, few ranks first. `ep` adds none."""
    found = []
    for degrees in itertools.product((1, 2), (1, 2, 4), (1, 2, 4), (1, 2, 4), (1, 2, 4), (1, 2, 4)):
        layout = dict(zip(DEGREES, degrees, strict=True))
        if math.prod(degrees[:-1]) in sizes and layout["dp_shard"] * layout["cp"] % layout["ep"] == 0:
            found.append(layout)
    return tuple(sorted(found, key=lambda layout: math.prod(layout.values()) // layout["ep"]))
