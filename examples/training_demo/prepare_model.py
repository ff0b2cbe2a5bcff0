"""Writes a folder as transformers would: Qwen3-MoE with random weights.

    python -m examples.training_demo.prepare_model examples/training_demo/train.yaml

The folder is the one that the file trains; its last part says which shape it gets. One that is there already stays.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml
from transformers import AutoConfig

from hyper_parallel.config.configurable import plain
from hyper_parallel.config.sections import TrainingConfig
from hyper_parallel.distributed.hf_weights import save_hf_weights
from hyper_parallel.models import qwen3_moe
from hyper_parallel.models.auto import HyperAutoModelForCausalLM
from hyper_parallel.models.auto.state_dict_adapter import AutoStateDictAdapter
from hyper_parallel.models.common.hf_config import hf_config

TINY = {"hidden_size": 64, "num_hidden_layers": 2, "head_dim": 16, "num_experts": 8, "moe_intermediate_size": 32}
SHAPES = {
    "qwen3_30b_a3b": lambda: qwen3_moe.create_model_spec("30b_a3b"),
    "qwen3_moe_tiny": lambda: qwen3_moe.create_model_spec("debug", **TINY),
}
"""By the last part of a folder's name."""


def model_config(folder: Path) -> Any:
    """transformers' config of the shape that `folder` is named after.

    Raises:
        KeyError: it is named after none.
    """
    content = plain(hf_config(SHAPES[folder.name]().model, "bfloat16"))  # lists where ours has tuples
    return AutoConfig.for_model(**content)


def main(file: str) -> None:
    """Writes the folder of the model of `file`."""
    folder = Path(yaml.safe_load(Path(file).read_text())["model"]["pretrained_model_name_or_path"])
    if folder.exists():
        print(f"{folder} is there already")
        return
    model = HyperAutoModelForCausalLM.from_config(model_config(folder), training=TrainingConfig(dtype="bfloat16"))
    save_hf_weights([model], AutoStateDictAdapter(model.config), folder)
    print(f"{folder}: {sum(p.numel() for p in model.parameters()):,} random parameters")


if __name__ == "__main__":
    main(sys.argv[1])
