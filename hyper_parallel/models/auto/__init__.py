"""Any causal language model of transformers whose layers are understood, trained like one of our own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyper_parallel.config.errors import ConfigError

if TYPE_CHECKING:
    from hyper_parallel.models.auto.auto_model import HyperAutoModelForCausalLM
    from hyper_parallel.protocols.model_spec import ModelSpec

FLAVORS: dict[str, dict[str, Any]] = {}
"""None: a flavor is a folder that holds a Hugging Face config.json."""


def create_model_spec(flavor: str = "", **overrides: Any) -> ModelSpec:
    """The spec of the model that the folder `flavor` describes. Its weights are drawn, or read by checkpoint.load_from.

    Raises:
        ConfigError: no such folder, an unknown field, or a model that is not understood.
    """
    from hyper_parallel.models.auto.model_spec import auto_model_spec

    _refuse_no_folder(flavor)
    return auto_model_spec(flavor, overrides)


def pretrained_model_spec(flavor: str = "", **overrides: Any) -> ModelSpec:
    """As `create_model_spec`, but the model is built with the weights that lie in the folder, in one call.

    Raises:
        ConfigError: as there, or weights are missing.
    """
    from hyper_parallel.models.auto.model_spec import pretrained_auto_model_spec

    _refuse_no_folder(flavor)
    return pretrained_auto_model_spec(flavor, overrides)


def _refuse_no_folder(flavor: str) -> None:
    if not Path(flavor).is_dir() or not flavor:
        fact = f"auto needs a folder with a Hugging Face config.json, and {flavor!r} is none"
        raise ConfigError.one("model_spec", fact, "give auto:FOLDER")


def __getattr__(name: str) -> Any:
    """`HyperAutoModelForCausalLM`, imported when it is asked for: it loads torch."""
    if name == "HyperAutoModelForCausalLM":
        from hyper_parallel.models.auto.auto_model import HyperAutoModelForCausalLM

        return HyperAutoModelForCausalLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["FLAVORS", "HyperAutoModelForCausalLM", "create_model_spec", "pretrained_model_spec"]
