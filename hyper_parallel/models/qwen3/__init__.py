"""Qwen3: sizes as published in the config.json of each model on the hub."""

from __future__ import annotations

from typing import Any

from hyper_parallel.models.common.family import Family
from hyper_parallel.models.qwen3.model import Qwen3Model
from hyper_parallel.protocols.model_spec import ModelSpec


def _published(hidden: int, intermediate: int, layers: int, heads: int, *, tied: bool) -> dict[str, Any]:
    return {
        "vocab_size": 151936,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_parameters": {"rope_theta": 1e6},
        "tie_word_embeddings": tied,
    }


FLAVORS: dict[str, dict[str, Any]] = {
    "debug": {
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 4096,
    },
    "0.6b": _published(1024, 3072, 28, 16, tied=True),
    "1.7b": _published(2048, 6144, 28, 16, tied=True),
    "4b": _published(2560, 9728, 36, 32, tied=True),
    "8b": _published(4096, 12288, 36, 32, tied=False),
    "14b": _published(5120, 17408, 40, 40, tied=False),
    "32b": _published(5120, 25600, 64, 64, tied=False),
}
"""Per flavor the fields that differ from the defaults of `Qwen3Model.Config`."""

FAMILY = Family(Qwen3Model.Config, FLAVORS)


def create_model_spec(flavor: str = "debug", **overrides: Any) -> ModelSpec:
    """The spec of a flavor of Qwen3, or of a folder that holds a Hugging Face config.json.

    Raises:
        ConfigError: unknown flavor or field, a folder of another model, impossible sizes.
    """
    return FAMILY.model_spec(flavor, overrides)
