"""Hugging Face folders, read into and written from a whole model in one process."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import torch

from hyper_parallel.config.errors import ConfigError, did_you_mean
from hyper_parallel.distributed.hf_weights import load_hf_weights, refuse_occupied, save_hf_weights, weight_files
from hyper_parallel.models import FAMILIES
from hyper_parallel.models.common.decoder import Decoder
from hyper_parallel.models.common.family import Family
from hyper_parallel.models.common.hf_config import read_hf_config, read_json
from hyper_parallel.models.common.state_dict_adapter import DecoderStateDictAdapter


def load_hf(folder: str | Path, dtype: torch.dtype | None = None) -> Decoder:
    """See `hyper_parallel.models.load_hf`."""
    folder = Path(folder)
    config = read_hf_config(folder, family_of(folder).config)
    config.float64_rounding = "transformers"
    weight_files(folder)  # before memory is taken
    with torch.device("meta"):
        model = config.build()
    model.verify_module_protocol()
    model = model.to(dtype or torch.float32).to_empty(device="cpu")
    load_hf_weights([model], DecoderStateDictAdapter(config), folder)
    return model


def family_of(folder: Path) -> Family:
    """The family of the model in `folder`.

    Raises:
        ConfigError: config.json is missing, is not JSON, or is of a family that is not ours.
    """
    name = read_json(folder).get("model_type")
    own = [family for family in FAMILIES if family != "auto"]
    if name not in own:
        raise ConfigError.one(
            str(folder / "config.json"), f"model_type {name!r} is not implemented", did_you_mean(str(name), own)
        )
    return import_module(f"hyper_parallel.models.{name}").FAMILY


def save_hf(model: Decoder, folder: str | Path, *, max_shard_bytes: int = 5 * 10**9) -> None:
    """See `hyper_parallel.models.save_hf`."""
    refuse_occupied(Path(folder))
    save_hf_weights([model], DecoderStateDictAdapter(model.config), folder, max_shard_bytes=max_shard_bytes)
