"""ModelSpecs of transformers models."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hyper_parallel.config.errors import ConfigError
from hyper_parallel.distributed.hf_weights import HFWeightsError, weight_files
from hyper_parallel.models.auto.auto_model import BuildPretrained
from hyper_parallel.models.auto.causal_lm import AutoCausalLM
from hyper_parallel.models.auto.state_dict_adapter import AutoStateDictAdapter
from hyper_parallel.models.common.fields import checked_fields
from hyper_parallel.models.common.hf_config import read_json
from hyper_parallel.models.common.parallelize import parallelize_decoder
from hyper_parallel.protocols.model_spec import ModelSpec


def auto_model_spec(flavor: str, overrides: Mapping[str, Any]) -> ModelSpec:
    """See `hyper_parallel.models.auto.create_model_spec`."""
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


def pretrained_auto_model_spec(flavor: str, overrides: Mapping[str, Any]) -> ModelSpec:
    """See `hyper_parallel.models.auto.pretrained_model_spec`."""
    try:
        weight_files(Path(flavor))
    except (OSError, HFWeightsError) as error:
        raise ConfigError.one("model_spec", str(error), "give a folder with weights, or create_model_spec") from error
    return dataclasses.replace(
        auto_model_spec(flavor, overrides),
        factory="hyper_parallel.models.auto.pretrained_model_spec",
        build_model_fn=BuildPretrained(flavor),
    )
