"""The demo on two processes of a CPU, and its file for eight NPUs."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples.training_demo.prepare_model import model_config
from hyper_parallel.config import manager
from tests.trainer.runs import metrics

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "examples" / "training_demo"
RECIPE = ROOT / "hyper_parallel" / "models" / "qwen3_moe" / "recipes" / "train.yaml"


@pytest.mark.slow
def test_the_demo_trains_on_two_ranks(tmp_path: Path) -> None:
    text = (DEMO / "train_cpu.yaml").read_text().replace("outputs/training_demo", str(tmp_path))
    (tmp_path / "train.yaml").write_text(text)
    done = subprocess.run(
        ["bash", str(DEMO / "run.sh"), str(tmp_path / "train.yaml"), "--training.max_steps=3"],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert "FSDP over mesh (dp_shard=2): 2 layers by themselves, 1 root(s) with the rest" in done.stderr
    told = re.findall(r"step (\d)/3  loss (\S+)  grad_norm (\S+)  lr (\S+)  .* tokens/s", done.stderr)
    assert [line[0] for line in told] == ["1", "2", "3"]
    assert all(math.isfinite(float(number)) for line in told for number in line)
    lines = metrics(tmp_path / "run_cpu")
    assert lines[0]["loss"] == pytest.approx(math.log(4096), abs=0.1) and lines[2]["loss"] < lines[0]["loss"]


def test_the_files_for_eight_ranks_can_be_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once the model's folder is there: of its weights only that they are is looked at."""
    monkeypatch.chdir(tmp_path)
    folder = Path("outputs/training_demo/qwen3_30b_a3b")
    files = [str(DEMO / "train.yaml"), str(RECIPE)]
    assert manager.main(["--check", *files]) == 2
    told = capsys.readouterr().err
    assert told.count("model.pretrained_model_name_or_path: outputs/training_demo/qwen3_30b_a3b is no folder") == 2
    folder.mkdir(parents=True)
    config = model_config(folder)
    assert (config.hidden_size, config.num_hidden_layers, config.num_experts) == (2048, 48, 128)
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    (folder / "model.safetensors").touch()
    assert manager.main(["--check", *files]) == 0
    printed = capsys.readouterr().out
    assert printed.count("for 8 rank(s)") == 2 and "backend: hccl" in printed
