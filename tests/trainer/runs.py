"""Small runs of the real trainer, for tests: what to configure, and the numbers that come out."""

from __future__ import annotations

import functools
import gzip
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from hyper_parallel.assets import CORPUS_FILES
from hyper_parallel.components.checkpoint import CheckpointManager
from hyper_parallel.components.data import TextDataLoader
from hyper_parallel.components.lr_scheduler import LRSchedulersContainer
from hyper_parallel.components.metrics import JsonLines, MetricsProcessor
from hyper_parallel.components.optimizer import AdamW
from hyper_parallel.config.sections import ParallelismConfig, TrainingConfig
from hyper_parallel.models.qwen3_moe import create_model_spec
from hyper_parallel.protocols.model_spec import ModelSpec
from hyper_parallel.trainer.config import TrainerConfig

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "mlp_only_layers": (1,),
    "router_aux_loss_coef": 0.01,
}
"""Sizes of a Qwen3-MoE with every kind of layer, small enough for a step in milliseconds."""

DETERMINISTIC_KEYS = ("step", "loss", "grad_norm", "lr", "tokens", "aux_loss")
"""What two equal runs must agree on; the rest are times and memory."""


def tiny_config(
    dump_folder: str | Path, *, steps: int, model_spec: ModelSpec | None = None, **training: Any
) -> TrainerConfig:
    """A run of the tiny model, or of another one, in float64, without checkpoints."""
    return TrainerConfig(
        model_spec=model_spec or create_model_spec("debug", **TINY),
        dump_folder=str(dump_folder),
        training=TrainingConfig(
            **{"seq_len": 32, "global_batch_size": 8, "micro_batch_size": 2, "dtype": "float64", "gc_steps": 0}
            | {"steps": steps}
            | training
        ),
        dataloader=TextDataLoader.Config(path=small_corpus()),
        optimizer=AdamW.Config(lr=3e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=min(5, steps - 1)),
        checkpoint=CheckpointManager.Config(enable=False),
        metrics=MetricsProcessor.Config(sinks=(JsonLines.Config(),)),
    )


@functools.cache
def small_corpus() -> str:
    """A file of 195 documents of one to nine lines of the embedded corpus: several in most rows of 32 tokens."""
    path = Path(tempfile.gettempdir()) / "hyper_parallel_tests_short_documents.jsonl"
    with gzip.open(CORPUS_FILES["train"], "rt") as corpus:
        lines = iter([text for line in islice(corpus, 4) for text in json.loads(line)["text"].splitlines() if text])
    lengths = cycle([1, 4, 2, 9, 1, 6, 3])
    documents = iter(lambda: "\n".join(islice(lines, next(lengths))), "")
    text = "".join(json.dumps({"text": document}) + "\n" for document in documents)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
    return str(path)


def with_parallelism(config: TrainerConfig, **degrees: Any) -> TrainerConfig:
    """`config` with other degrees of parallelism."""
    config.parallelism = ParallelismConfig(**degrees)
    return config


def train(config: TrainerConfig) -> list[dict[str, Any]]:
    """Trains `config` and returns the lines of its metrics.jsonl."""
    with config.build() as trainer:
        trainer.train()
    return metrics(config.dump_folder)


def metrics(dump_folder: str | Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl in `dump_folder`."""
    return [json.loads(line) for line in (Path(dump_folder) / "metrics.jsonl").read_text().splitlines()]


def deterministic(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`lines` without times and memory."""
    return [{key: line[key] for key in DETERMINISTIC_KEYS if key in line} for line in lines]


class NoBatches(TextDataLoader):
    """Says so, and gives none."""

    @dataclass(kw_only=True, slots=True)
    class Config(TextDataLoader.Config):
        pass

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        print("no batch will come", file=sys.stderr, flush=True)
        while True:
            time.sleep(1)
        yield []


def waits_for_data() -> TrainerConfig:
    """A recipe: a step that does not end."""
    config = saved_every_second_step()
    config.dataloader = NoBatches.Config(path=small_corpus())
    return config


def saved_every_second_step() -> TrainerConfig:
    """A recipe: twenty steps of the tiny model with a checkpoint after every second one."""
    config = tiny_config("set --dump_folder", steps=20)
    config.checkpoint = CheckpointManager.Config(interval_steps=2, keep_latest_k=2)
    return config
