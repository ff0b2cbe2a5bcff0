"""What the documents show is what the code does."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
import yaml
from pyarrow import parquet

from hyper_parallel import explain
from hyper_parallel.assets import TOKENIZER_FOLDER
from hyper_parallel.components.data import TextDataLoader
from hyper_parallel.components.data.indexed import IndexedDataset
from hyper_parallel.components.tokenizer import HuggingFaceTokenizer
from hyper_parallel.config import manager, resolver
from hyper_parallel.config.errors import ConfigError
from hyper_parallel.config.plain_sections import fill_targets
from hyper_parallel.config.schema import field_slot, slot_table
from hyper_parallel.config.target import Target
from hyper_parallel.data_tools.__main__ import main as data_tools_main
from hyper_parallel.models.auto.auto_model import BuildPretrained
from hyper_parallel.protocols.model_spec import ModelSpec
from hyper_parallel.trainer.config import TrainerConfig
from tests.models.auto.folders import save, tiny_model
from tests.trainer.runs import metrics, tiny_config, train

ROOT = Path(__file__).resolve().parent.parent
COMPONENTS = (ROOT / "docs" / "components.md").read_text()
DATA = (ROOT / "docs" / "data.md").read_text()
EXTENDING = (ROOT / "docs" / "extending.md").read_text()
MEMORY = (ROOT / "docs" / "memory.md").read_text()
TRANSFORMERS = (ROOT / "docs" / "transformers.md").read_text()
YAML = (ROOT / "docs" / "yaml.md").read_text()


def snippets(text: str = COMPONENTS, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_the_table_of_slots_is_current() -> None:
    shown = re.search(r"<!-- slots: .*?-->\n(.*?)\n<!-- end of slots -->", COMPONENTS, re.DOTALL)
    assert shown is not None and shown[1] == slot_table(TrainerConfig).strip()


def test_a_plain_class_as_documented() -> None:
    names: dict[str, Any] = {}
    exec(snippets()[0], names)
    config = names["with_sgd"]()
    assert (config.optimizer.lr, config.optimizer.momentum) == (0.5, 0.9)
    assert list(config.cross_faults(1)) == []


def test_a_component_as_documented(tmp_path: Path) -> None:
    names: dict[str, Any] = {"__name__": __name__}
    exec(snippets()[1], names)
    config = tiny_config(tmp_path / "scaled", steps=1)
    config.loss = names["ScaledLoss"].Config(factor=2.0)
    plain = train(tiny_config(tmp_path / "plain", steps=1))
    assert train(config)[0]["loss"] == pytest.approx(2.0 * plain[0]["loss"], abs=1e-12)


def test_memory_as_documented() -> None:
    commands = [shlex.split(line)[3:] for line in snippets(MEMORY, "bash")[0].splitlines()]
    sections = [manager.load(TrainerConfig, command, world_size=1).activation_checkpoint for command in commands]
    assert [section.mode for section in sections] == ["full", "full", "selective", "selective", "memory_budget", "full"]
    assert [section.every_n_layers for section in sections] == [1, 2, 1, 1, 1, 1]
    assert [section.swap for section in sections] == [False] * 5 + [True]
    assert sections[3].save_ops == ("attention", "aten.topk.default")


def test_a_rehearsed_run_as_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    section = (ROOT / "docs" / "parallelism.md").read_text().partition("## What a run would do")[2]
    world, *command = shlex.split(snippets(section, "bash")[1].replace("\\\n", ""))
    config = manager.load(TrainerConfig, command[3:], world_size=int(world.removeprefix("WORLD_SIZE=")))
    assert (config.comm.mode, config.ranks(8), config.training.steps) == ("fake", 8, 3)


def test_models_of_transformers_as_documented(tmp_path: Path) -> None:
    theirs = tiny_model("gpt2", vocab_size=4096)
    folder = save(theirs, tmp_path / "model")
    rows = ["--training.seq_len", "64"]
    first, second = (
        [word.replace("FOLDER", folder) for word in shlex.split(line)[3:]]
        for line in snippets(TRANSFORMERS, "bash")[0].splitlines()
    )
    assert manager.load(TrainerConfig, [*first, *rows], world_size=1).checkpoint.load_from == folder
    assert manager.load(TrainerConfig, [*second, *rows], world_size=1).model_spec.model.changes == {"attn_pdrop": 0.0}

    spread, explained = (
        shlex.split(line.replace("FOLDER", folder))
        for line in snippets(TRANSFORMERS, "bash")[1].replace("\\\n", "").splitlines()
    )
    assert manager.load(TrainerConfig, [*spread[4:], *rows], world_size=4).parallelism.loss_parallel
    assert explain.main([*explained[3:], *rows]) == 0

    (tmp_path / "run.yaml").write_text(snippets(TRANSFORMERS, "yaml")[0].replace("FOLDER", folder))
    spec = manager.load(TrainerConfig, [str(tmp_path / "run.yaml"), *rows], world_size=1).model_spec
    assert spec.build_model_fn == BuildPretrained(folder)

    names: dict[str, Any] = {"folder": folder, "input_ids_BT": torch.arange(32).view(2, 16)}
    exec(snippets(TRANSFORMERS)[0], names)
    expected = theirs.float()(input_ids=names["input_ids_BT"]).logits
    torch.testing.assert_close(names["logits_BTV"], expected, rtol=0, atol=1e-4)


def test_parts_of_ones_own_as_documented(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All four ways, in one run: the page's modules, components and trainer, and a flag."""
    monkeypatch.chdir(tmp_path)
    modules, compute, parts, trainer, script = snippets(EXTENDING)
    overrides, boundary, computed, run = snippets(EXTENDING, "yaml")
    Path("my_project").mkdir()
    Path("my_project/compute.py").write_text(compute)
    Path("my_project/modules.py").write_text(modules)
    Path("my_project/parts.py").write_text(parts)
    monkeypatch.syspath_prepend(tmp_path)
    folder = save(tiny_model("qwen3_moe", vocab_size=4096), tmp_path / "model")
    rules = overrides + (boundary + computed).replace("plan_overrides:\n", "")
    Path("run.yaml").write_text((rules + run).replace("FOLDER", folder))
    monkeypatch.setattr(sys, "argv", ["script.py", "run.yaml", "--training.train_iters=3", "--optimizer.lr=2e-2"])
    names: dict[str, Any] = {"__name__": __name__}
    exec(trainer, names)
    exec(script, names)
    done = names["trainer"]
    assert {kinds[1] for kinds in done.model_parts[0].replaced_modules.values()} == {"MyNorm"}
    lines = metrics("outputs")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert [line["lr"] for line in lines] == pytest.approx([2e-2, 1.4e-2, 0.8e-2])
    assert lines[0]["loss"] == pytest.approx(0.5 * math.log(4096), abs=0.4)

    Path("spread.yaml").write_text(re.sub(r"loss_fn: .*\n", "", Path("run.yaml").read_text()))  # it takes whole rows
    assert explain.main(["spread.yaml", "--parallelism.cp", "2", "--parallelism.ep", "2", "--world_size", "2"]) == 0
    told = re.sub(" +", " ", capsys.readouterr().out)
    assert "model.layers.*.mlp.experts forward is my_project.compute.gathered_experts\n" in told
    assert "model.layers.*.self_attn.heads forward is hyper_parallel.models.common.context_parallel.inner_w" in told


def test_runtime_arguments_are_those_documented() -> None:
    """All that a page says the trainer supplies is in the slot of that name."""
    components = EXTENDING.partition("## Bring your own components")[2]
    table = re.findall(r"^\| `(\w+)` \| (.*?) \|", components, re.MULTILINE)
    assert len(table) == 9
    fields = {f.name: f for f in dataclasses.fields(TrainerConfig)} | {
        "loss_fn": next(f for f in dataclasses.fields(TrainerConfig) if f.name == "loss"),
        "model": next(f for f in dataclasses.fields(ModelSpec) if f.name == "target"),
    }
    for name, told in table:
        assert set(re.findall(r"`(\w+)`", told)) <= set(field_slot(fields[name]).runtime), name


def test_yaml_as_documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what is documented as the class or the mistake of each."""
    monkeypatch.chdir(tmp_path)
    strict, plain = snippets(YAML, "yaml")
    names: dict[str, Any] = {"text": strict}
    exec(snippets(YAML)[0], names)
    assert (names["tree"].model_spec.model.num_hidden_layers, names["tree"].optimizer.lr) == (2, 1e-3)

    Path("run.yaml").write_text(plain)
    tree = manager.load(TrainerConfig, ["run.yaml"], world_size=1)
    assert (tree.training.steps, tree.activation_checkpoint.mode, tree.checkpoint.enable) == (20, "full", False)

    Path("run.yaml").write_text(
        "model: {_target_: hyper_parallel.models.qwen3_moe.create_model_spec}\n"
        "training:\n  max_steps: 10x\n"
        "optimizer:\n  _target_: hyper_parallel.components.optimizer.AdamW.Config\n\n  lrr: 1\n"
        "loss:\n  _target_: my_projct.Loss\n"
    )
    with pytest.raises(ConfigError) as caught:
        manager.load(TrainerConfig, ["run.yaml"], world_size=1)
    assert str(caught.value) == snippets(YAML, "text")[0].strip()


def test_groups_whose_target_may_be_left_out_are_those_documented() -> None:
    named = re.search(r"its `_target_` may be left out: (.*?)\. The groups", YAML, re.DOTALL)
    assert named is not None
    empty = fill_targets({f.name: {} for f in dataclasses.fields(TrainerConfig)}, TrainerConfig)
    filled = {name for name, group in empty.content.items() if group}
    assert set(re.findall(r"`(\w+)`", named[1])) == filled


@pytest.fixture
def data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files that docs/data.md speaks of; the working directory is theirs."""
    monkeypatch.chdir(tmp_path)
    texts = [f"Scene {i}. " + "Enter a messenger, running. " * 40 for i in range(12)]
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    for name in ("my_text.jsonl", "books.jsonl"):
        (tmp_path / name).write_text("".join(lines))
    (tmp_path / "web").mkdir()
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "web" / "0.parquet")
    chat = [{"role": "user", "content": "Who's there?"}, {"role": "assistant", "content": "Nay, answer me."}]
    (tmp_path / "chats.jsonl").write_text((json.dumps({"messages": chat}) + "\n") * 90)
    (tmp_path / "chat.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token if m.role == 'assistant' else '' }}"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    return tmp_path


def first_item(config: TrainerConfig, tokenizer: HuggingFaceTokenizer) -> list[dict[str, Any]]:
    loader = config.dataloader.build(
        tokenizer=tokenizer, seq_len=64, micro_batch_size=1, global_batch_size=2, dp_rank=0, dp_size=1, seed=1
    )
    item = next(loader)
    loader.close()
    return item


def test_chats_as_documented(data_folder: Path) -> None:
    names: dict[str, Any] = {}
    exec(snippets(DATA)[0], names)
    tokenizer = HuggingFaceTokenizer.Config().build()
    batch, _ = first_item(names["fine_tune"]("chats.jsonl", "chat.jinja"), tokenizer)
    trained = tokenizer.decode(batch["labels"][batch["labels"] >= 0].tolist())
    assert trained and trained == "Nay, answer me.<|endoftext|>" * trained.count("Nay")


def test_sources_as_documented(data_folder: Path) -> None:
    groups = yaml.safe_load(snippets(DATA, "yaml")[0])
    model = {"_target_": "hyper_parallel.models.qwen3_moe.create_model_spec", "flavor": "debug"}
    tree = resolver.resolve_root({**groups, "model": model})
    assert list(tree.dataloader.faults()) == []
    assert len(first_item(tree, HuggingFaceTokenizer.Config().build())) == 2


def test_a_source_of_ones_own_as_documented(data_folder: Path) -> None:
    names: dict[str, Any] = {"__name__": __name__}
    exec(snippets(DATA)[1], names)
    (data_folder / "two.jsonl").write_text('{"text": "Exit."}\n{"text": "Enter the king."}\n')
    tokenizer = HuggingFaceTokenizer.Config().build()
    config = tiny_config(data_folder, steps=1)
    config.dataloader = TextDataLoader.Config(
        sources=(Target.of(names["Lines"], path="two.jsonl"),), packing="pad", shuffle=False
    )
    rows = [tokenizer.decode(batch["input_ids"][0].tolist()) for batch in first_item(config, tokenizer)]
    assert [row.partition(".")[0] for row in rows] == ["Enter the king", "Exit"]


def test_commands_about_data_as_documented(data_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands = [shlex.split(line) for line in re.findall(r"^    (python -m .*)$", DATA, re.MULTILINE)]
    train_command, *tools = commands
    loaded = manager.load(TrainerConfig, [*train_command[3:], "--validator.enable=false"], world_size=1)
    assert loaded.dataloader.path == "my_text.jsonl"
    (data_folder / "run.yaml").write_text((ROOT / "recipes" / "yaml" / "qwen3_moe_debug.yaml").read_text())
    for command in tools:
        assert command[2] == "hyper_parallel.data_tools"
        words = [str(TOKENIZER_FOLDER) if word == "FOLDER" else word for word in command[3:]]
        assert data_tools_main(words) == 0, capsys.readouterr().err
    assert IndexedDataset("web-ids").tokens[-1] == 0  # EOS of the embedded tokenizer
    assert (data_folder / "lengths.png").exists()


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))])
def test_links_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text())
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []
