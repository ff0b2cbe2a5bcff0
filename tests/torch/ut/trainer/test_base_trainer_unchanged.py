"""The losses and gradient norms of model/data/train files do not change: golden numbers of ten steps in float64.

`golden_losses.json` was written by running this file, on two x86 cores with torch 2.13. Run it again only where the
numbers are meant to change, and say why in the commit:

    python -m tests.torch.ut.trainer.test_base_trainer_unchanged

float64 is set on the converted tree, since the files themselves know no parameters but float32.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from hyper_parallel.trainer import HyperTrainerConfig, LLMTrainer, parse_args
from hyper_parallel.trainer.legacy import legacy_to_trainer_config
from tests.trainer.runs import metrics

FOLDER = Path(__file__).parents[4] / "recipes" / "yaml" / "legacy"
GOLDEN = Path(__file__).with_name("golden_losses.json")
KEYS = ("loss", "grad_norm", "aux_loss", "lr")
FILES = ("qwen3_moe_dummy.yaml", "qwen3_moe_text.yaml")


def run(file: str, dump_folder: str) -> dict[str, list[float]]:
    """Ten steps of a file that ships, by name of the number."""
    words = [
        "--train.checkpoint.save_steps=0",
        "--train.eval.eval_steps=0",
        f"--train.checkpoint.output_dir={dump_folder}",
    ]
    config = legacy_to_trainer_config(parse_args(HyperTrainerConfig, [str(FOLDER / file), *words]))
    config.training.dtype = "float64"
    LLMTrainer(config).train()
    lines = metrics(dump_folder)
    return {key: [line[key] for line in lines] for key in KEYS}


@pytest.mark.parametrize("file", FILES)
def test_losses_and_gradient_norms_are_the_golden_ones(file, tmp_path):
    golden = json.loads(GOLDEN.read_text())[file]
    assert {key: len(numbers) for key, numbers in golden.items()} == dict.fromkeys(KEYS, 10)
    found = run(file, str(tmp_path))
    for key in KEYS:
        assert found[key] == pytest.approx(golden[key], rel=1e-12, abs=0), key


def test_every_file_that_ships_has_golden_numbers():
    assert (
        sorted(FILES) == sorted(file.name for file in FOLDER.glob("*.yaml")) == sorted(json.loads(GOLDEN.read_text()))
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        numbers = {file: run(file, f"{scratch}/{file}") for file in FILES}
    GOLDEN.write_text(json.dumps(numbers, indent=2) + "\n")
