from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hyper_parallel import export
from hyper_parallel.components.checkpoint.storage import seal_of
from hyper_parallel.config import manager
from tests.components.checkpoint.test_manager import flip_a_byte
from tests.trainer.runs import TINY, tiny_config


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of the tiny model, with the live model's own export beside the checkpoint."""
    folder = tmp_path_factory.mktemp("run")
    config = tiny_config(folder, steps=2)
    config.checkpoint.enable, config.checkpoint.export_hf = True, "last"
    manager.save(config)
    with config.build() as trainer:
        trainer.train()
    return folder


def test_it_is_what_the_live_model_exports(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export.main(["--checkpoint", str(run), "--to", str(tmp_path / "out")]) == 0
    live, own = run / "checkpoint/step-2-hf", tmp_path / "out"
    assert sorted(path.name for path in own.iterdir()) == sorted(path.name for path in live.iterdir())
    for path in live.iterdir():
        assert (own / path.name).read_bytes() == path.read_bytes(), path.name
    size_bytes = sum(tensor.nbytes for tensor in load_file(own / "model.safetensors").values())
    assert capsys.readouterr().out == f"exported {own}, {size_bytes} bytes\n"


def test_in_another_type_transformers_computes_the_same(run: Path, tmp_path: Path) -> None:
    from transformers import Qwen3MoeForCausalLM

    folder = str(tmp_path / "out")
    assert export.main(["--checkpoint", str(run / "checkpoint/step-2"), "--to", folder, "--dtype", "bfloat16"]) == 0
    model = Qwen3MoeForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    assert model.config.num_hidden_layers == TINY["num_hidden_layers"]
    exact = load_file(run / "checkpoint/step-2-hf/model.safetensors")
    for name, tensor in load_file(tmp_path / "out" / "model.safetensors").items():
        assert torch.equal(tensor, exact[name].to(torch.bfloat16)), name


def sealed(marker: dict[str, Any]) -> dict[str, Any]:
    return marker | {"seal": seal_of(marker)}


def refused(capsys: pytest.CaptureFixture[str], *words: object, code: int) -> str:
    assert export.main([str(word) for word in words]) == code
    return capsys.readouterr().err


def test_refusals(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step, out = tmp_path / "run/checkpoint/step-2", tmp_path / "out"
    shutil.copytree(run / "checkpoint/step-2", step)
    assert refused(capsys, "--checkpoint", tmp_path, "--to", out, code=2) == (
        f"--checkpoint: {tmp_path} holds no complete checkpoint; give a step-N, or a dump folder\n"
    )
    other = tmp_path / "config.yaml"
    text = (run / "config.yaml").read_text()
    other.write_text(text.replace("hidden_size: 32", "hidden_size: 64"))
    message = refused(capsys, "--checkpoint", step, "--to", out, "--config", other, code=1)
    assert message.startswith(f"error: {step} is of another model: model.embed_tokens.weight is [")
    marker = json.loads((step / "complete.json").read_text())
    (step / "complete.json").write_text(json.dumps(sealed(marker | {"config": None})))
    assert refused(capsys, "--checkpoint", step, "--to", out, code=2) == (
        f"--config: {step} has no copy of the run's config.yaml; give the file of the run that saved it\n"
    )
    out.mkdir()
    (out / "notes.txt").touch()
    message = refused(capsys, "--checkpoint", run, "--to", out, code=1)
    assert f"{out} is not empty; save into another folder" in message
    shutil.rmtree(out)
    flip_a_byte(step / "__0_0.distcp")
    message = refused(capsys, "--checkpoint", step, "--to", out, "--config", run / "config.yaml", code=1)
    assert message.startswith(f"error: {step} is damaged: __0_0.distcp is not what was written")
    assert not out.exists()
