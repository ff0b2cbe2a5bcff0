"""Model families, and one-process loading and saving of Hugging Face folders."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from hyper_parallel.models.common.decoder import Decoder

FAMILIES = ("qwen3", "qwen3_moe", "auto")
"""Packages below this one that `--model_spec` may name; auto has the models of transformers."""


def load_hf(folder: str | Path, dtype: torch.dtype | None = None) -> Decoder:
    """The model of a Hugging Face folder (config.json, safetensors), whole, in this process, on CPU.

    `dtype` is that of the parameters; None: float32. A float64 model rounds norms and router probabilities to float32,
    where transformers does (`Decoder.Config.float64_rounding`).

    Raises:
        ConfigError: config.json is missing, of a family that is not in `FAMILIES`, or says what is not implemented.
        ValueError: weights are missing, unexpected or misshapen; all of them are named.
        FileNotFoundError: no weights are there.
    """
    from hyper_parallel.models.hf_folder import load_hf

    return load_hf(folder, dtype)


def save_hf(model: Decoder, folder: str | Path, *, max_shard_bytes: int = 5 * 10**9) -> None:
    """Writes the whole model in this process as a Hugging Face folder that transformers loads.

    Files hold at most `max_shard_bytes` of tensors each, one larger tensor excepted; more than one file come with an
    index.
    """
    from hyper_parallel.models.hf_folder import save_hf

    save_hf(model, folder, max_shard_bytes=max_shard_bytes)
