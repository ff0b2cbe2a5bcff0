"""The dataloader's settings through every front door."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from hyper_parallel.components.checkpoint import CheckpointManager
from hyper_parallel.components.data import TextDataLoader
from hyper_parallel.components.data.sources import CsvSource, JsonLinesSource
from hyper_parallel.components.data.transforms import ChatTransform
from hyper_parallel.config import manager, resolver
from hyper_parallel.config.errors import ConfigError
from hyper_parallel.config.target import Target
from hyper_parallel.trainer.config import TrainerConfig
from tests.components.data.numbers import write_documents
from tests.trainer.runs import deterministic, metrics, small_corpus, tiny_config, train

SOURCES = "hyper_parallel.components.data.sources"
MODEL = ["--model_spec", "qwen3_moe:debug"]


class Countdown:
    """A user's source: texts of one number each."""

    def __init__(self, start: int = 3) -> None:
        self.start = start
        self.given = 0

    def __iter__(self):
        while self.given < self.start:
            self.given += 1
            yield {"text": str(self.start - self.given)}

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.given = state["given"]


class Stopped(Exception):
    """Stands for a kill between two steps."""


def load(*flags: str) -> TrainerConfig:
    return manager.load(TrainerConfig, [*MODEL, *flags], world_size=1)


def refusal(*flags: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*flags)
    return str(caught.value)


def groups(**dataloader: Any) -> dict[str, Any]:
    return {
        "model": {"_target_": "hyper_parallel.models.qwen3_moe.create_model_spec", "flavor": "debug"},
        "dataloader": {"_target_": "hyper_parallel.components.data.TextDataLoader.Config", **dataloader},
    }


@pytest.fixture
def files(tmp_path):
    (tmp_path / "a.csv").write_text("text\n1 2\n")
    return write_documents(tmp_path / "a.jsonl", [[1, 2, 3]]), str(tmp_path / "a.csv")


def test_flags(files):
    jsonl, _ = files
    flags = {
        "path": jsonl,
        "packing": "best_fit",
        "packing_cost": "trained",
        "document_mask": "false",
        "on_error": "skip",
    }
    words = [word for name, value in flags.items() for word in (f"--dataloader.{name}", value)]
    config = load(*words, "--validator.enable=false")
    loader = config.dataloader
    assert (loader.path, loader.packing, loader.packing_cost) == (jsonl, "best_fit", "trained")
    assert (loader.document_mask, loader.on_error) == (False, "skip")
    assert "dataloader.source: expected one of text, txt, " in refusal("--dataloader.source", "json")
    assert "dataloader.path: gone.jsonl does not exist; give a file of text" in refusal(
        "--dataloader.path", "gone.jsonl"
    )


def test_sources_and_a_transform_of_a_file_and_back_again(files, tmp_path):
    jsonl, csv = files
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    tree = resolver.resolve_root(
        groups(
            sources=[
                {"_target_": f"{SOURCES}.JsonLinesSource.Config", "path": jsonl},
                {"_target_": f"{SOURCES}.CsvSource.Config", "path": csv},
                {"_target_": f"{__name__}.Countdown", "start": 5},
            ],
            weights=[0.5, 0.25, 0.25],
            transform={
                "_target_": "hyper_parallel.components.data.transforms.ChatTransform.Config",
                "template": str(tmp_path / "chat.jinja"),
            },
        )
    )
    loader = tree.dataloader
    assert loader.sources == (
        JsonLinesSource.Config(path=jsonl),
        CsvSource.Config(path=csv),
        Target.of(Countdown, start=5),
    )
    assert loader.weights == (0.5, 0.25, 0.25)
    assert loader.transform == ChatTransform.Config(template=str(tmp_path / "chat.jinja"))
    again = resolver.resolve_root(yaml.safe_load(resolver.to_yaml(tree)))
    assert again.dataloader == loader


def test_faults_of_nested_components_have_their_path(files):
    with pytest.raises(ConfigError) as caught:
        resolver.resolve_root(groups(sources=[{"_target_": f"{SOURCES}.JsonLinesSource.Config", "pfad": "x"}]))
    assert [fault.path for fault in caught.value.faults] == ["dataloader.sources.0.pfad", "dataloader.sources.0.path"]
    tree = resolver.resolve_root(
        groups(sources=[{"_target_": f"{SOURCES}.JsonLinesSource.Config", "path": "gone.jsonl"}])
    )
    assert [str(f) for f in manager.check(tree, 1)][:1] == [
        "dataloader.sources.0.path: gone.jsonl does not exist; give a file or folder of .jsonl, .jsonl.gz, .jsonl.zst"
    ]
    with pytest.raises(
        ConfigError, match=r"dataloader\.transform\._target_: .*makes a JsonLinesSource, not a Transform"
    ):
        resolver.resolve_root(groups(transform={"_target_": f"{SOURCES}.JsonLinesSource.Config", "path": "x"}))


def test_a_config_saved_before_there_were_sources_still_reads():
    saved = {
        "source": "text",
        "path": None,
        "split": "train",
        "text_field": "text",
        "documents": None,
        "packing": "concat",
        "shuffle": True,
        "num_workers": 0,
        "prefetch": 2,
    }
    loader = resolver.resolve_root(groups(**saved)).dataloader
    assert loader == TextDataLoader.Config()
    assert list(loader.faults()) == []


def test_a_run_on_a_source_of_ones_own_resumes_to_the_same_bits(tmp_path):
    """Streamed, best-fit packed, weighted: the trainer, the checkpoint and the loader together."""

    def config(folder: str) -> TrainerConfig:
        made = tiny_config(tmp_path / folder, steps=8)
        made.checkpoint = CheckpointManager.Config(interval_steps=2)
        made.dataloader = TextDataLoader.Config(
            sources=(JsonLinesSource.Config(path=small_corpus()), Target.of(Countdown, start=40)),
            weights=(0.9, 0.1),
            reading="stream",
            shuffle_window=16,
            packing="best_fit",
        )
        return made

    straight = train(config("straight"))
    with config("stopped").build() as trainer:
        take_step = trainer.train_step

        def train_step(batches: Any) -> Any:
            if trainer.state.step == 5:
                raise Stopped
            return take_step(batches)

        trainer.train_step = train_step
        with pytest.raises(Stopped):
            trainer.train()
    assert len(metrics(tmp_path / "stopped")) == 5
    assert deterministic(train(config("stopped"))) == deterministic(straight)
