"""Any causal language model of transformers whose layers are understood, trained like one of our own."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from hyper_parallel.config.errors import ConfigError
from hyper_parallel.distributed.hf_weights import HFWeightsError, weight_files
from hyper_parallel.models.auto.auto_model import BuildPretrained, HyperAutoModelForCausalLM
from hyper_parallel.models.auto.causal_lm import AutoCausalLM
from hyper_parallel.models.auto.state_dict_adapter import AutoStateDictAdapter
from hyper_parallel.models.common.fields import checked_fields
from hyper_parallel.models.common.hf_config import read_json
from hyper_parallel.models.common.parallelize import parallelize_decoder
from hyper_parallel.protocols.model_spec import ModelSpec

__all__ = ["FLAVORS", "HyperAutoModelForCausalLM", "create_model_spec", "pretrained_model_spec"]

FLAVORS: dict[str, dict[str, Any]] = {}
"""None: a flavor is a folder that holds a Hugging Face config.json."""


def create_model_spec(flavor: str = "", **overrides: Any) -> ModelSpec:
    """The spec of the model that the folder `flavor` describes. Its weights are drawn, or read by checkpoint.load_from.

    Raises:
        ConfigError: no such folder, an unknown field, or a model that transformers does not know.
    """
    if not flavor or not Path(flavor).is_dir():
        fact = f"auto needs a folder with a Hugging Face config.json, and {flavor!r} is none"
        raise ConfigError.one("model_spec", fact, "give auto:FOLDER")
    config = AutoCausalLM.Config(content=read_json(Path(flavor)))
    for name, value in checked_fields(AutoCausalLM.Config, overrides, "model_spec").items():
        setattr(config, name, value)
    config.hf_config()  # which refuses what transformers does not know
    return ModelSpec(
        name="auto",
        flavor=flavor,
        factory="hyper_parallel.models.auto.create_model_spec",
        model=config,
        parallelize_fn=parallelize_decoder,
        state_dict_adapter=AutoStateDictAdapter,
    )


def pretrained_model_spec(flavor: str = "", **overrides: Any) -> ModelSpec:
    """As `create_model_spec`, but the model is built with the weights that lie in the folder, in one call.

    Raises:
        ConfigError: as there, or weights are missing.
    """
    spec = create_model_spec(flavor, **overrides)
    try:
        weight_files(Path(flavor))
    except (OSError, HFWeightsError) as error:
        raise ConfigError.one("model_spec", str(error), "give a folder with weights, or create_model_spec") from error
    return dataclasses.replace(
        spec,
        factory="hyper_parallel.models.auto.pretrained_model_spec",
        build_model_fn=BuildPretrained(flavor),
    )
