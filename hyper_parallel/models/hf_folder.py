"""Weights of a Hugging Face folder, read into and written from a whole model in one process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import torch

from hyper_parallel.config.errors import ConfigError, did_you_mean
from hyper_parallel.models import FAMILIES
from hyper_parallel.models.common.decoder import Decoder
from hyper_parallel.models.common.family import Family
from hyper_parallel.models.common.hf_config import hf_config, read_hf_config, read_json
from hyper_parallel.models.common.state_dict_adapter import DecoderStateDictAdapter

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def load_hf(folder: str | Path, dtype: torch.dtype | None = None) -> Decoder:
    """See `hyper_parallel.models.load_hf`."""
    folder = Path(folder)
    config = read_hf_config(folder, family_of(folder))
    config.float64_rounding = "transformers"
    with torch.device("meta"):
        model = config.build()
    model.verify_module_protocol()
    model = model.to(dtype or torch.float32).to_empty(device="cpu")
    load_weights(model, folder)
    return model


def family_of(folder: Path) -> Family:
    """The family of the model in `folder`.

    Raises:
        ConfigError: config.json is missing, is not JSON, or is of a family that is not in `FAMILIES`.
    """
    name = read_json(folder).get("model_type")
    if name not in FAMILIES:
        raise ConfigError.one(
            str(folder / "config.json"), f"model_type {name!r} is not implemented", did_you_mean(str(name), FAMILIES)
        )
    return _family(name)


def _family(name: str) -> Family:
    return import_module(f"hyper_parallel.models.{name}").FAMILY


@torch.no_grad()
def load_weights(model: Decoder, folder: Path) -> None:
    """Copies the folder's tensors into the model's parameters, one at a time.

    Raises:
        ValueError: tensors are missing, unexpected or misshapen; nothing is copied then.
        FileNotFoundError: the folder holds no safetensors, or not all that its index lists.
    """
    from safetensors import safe_open

    adapter = DecoderStateDictAdapter(model.config)
    wanted: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        wanted.update(adapter.to_hf(name, parameter))
    files = [safe_open(file, framework="pt", device="cpu") for file in _weight_files(folder)]
    found = {name: (file, tuple(file.get_slice(name).get_shape())) for file in files for name in file.keys()}  # noqa: SIM118

    tied = "lm_head.weight" if model.config.tie_word_embeddings else None
    problems = [f"missing: {name} {tuple(wanted[name].shape)}" for name in wanted if name not in found]
    problems += [f"unexpected: {name} {found[name][1]}" for name in found if name not in wanted and name != tied]
    problems += [
        f"misshapen: {name} is {found[name][1]}, the model has {tuple(view.shape)}"
        for name, view in wanted.items()
        if name in found and found[name][1] != tuple(view.shape)
    ]
    if problems:
        raise ValueError(f"{folder} does not fit the model that its config.json describes:\n" + "\n".join(problems))
    if tied in found:
        _check_tied(found, folder)
    for name, view in wanted.items():
        view.copy_(found[name][0].get_tensor(name))


def save_hf(model: Decoder, folder: str | Path, *, max_shard_bytes: int = 5 * 10**9) -> None:
    """See `hyper_parallel.models.save_hf`."""
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    present = sorted(file.name for file in folder.glob("*.safetensors*"))
    if present:
        raise FileExistsError(f"{folder} already holds weights ({', '.join(present)}); save into another folder")
    shards = list(_shards(model, max_shard_bytes))
    count = len(shards)
    names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)] if count > 1 else [_SINGLE]
    total_bytes = 0
    weight_map: dict[str, str] = {}
    for file, shard in zip(names, shards, strict=True):
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in shard.items()}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        total_bytes += sum(tensor.nbytes for tensor in tensors.values())
        weight_map.update(dict.fromkeys(shard, file))
    if len(shards) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    family = next(family for family in map(_family, FAMILIES) if family.config is type(model.config))
    content = json.dumps(hf_config(model.config, family, dtype), indent=2)
    (folder / "config.json").write_text(content + "\n", encoding="utf-8")


def _weight_files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if index.is_file():
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = [folder / name for name in sorted(set(weight_map.values()))]
    else:
        files = [folder / _SINGLE]
    absent = [str(file) for file in files if not file.is_file()]
    if absent:
        raise FileNotFoundError(f"no weights at {', '.join(absent)}")
    return files


def _check_tied(found: dict, folder: Path) -> None:
    """A tied model has one table: a checkpoint that also stores the output matrix must store the same."""
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    if not torch.equal(found[embedding][0].get_tensor(embedding), found[head][0].get_tensor(head)):
        raise ValueError(
            f"{folder}: tie_word_embeddings is true, but {head} differs from {embedding}; "
            "set it to false in config.json"
        )


def _shards(model: Decoder, max_shard_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    """Views of the parameters under their checkpoint names, in groups of at most `max_shard_bytes`."""
    adapter = DecoderStateDictAdapter(model.config)
    shard: dict[str, torch.Tensor] = {}
    shard_bytes = 0
    for name, parameter in model.named_parameters():
        for hf_name, tensor in adapter.to_hf(name, parameter):
            if shard and shard_bytes + tensor.nbytes > max_shard_bytes:
                yield shard
                shard, shard_bytes = {}, 0
            shard[hf_name] = tensor
            shard_bytes += tensor.nbytes
    yield shard
