"""Hugging Face's config.json, both ways. A field that would change the numbers is used or refused, never skipped."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyper_parallel.config.errors import ConfigError, Fault, raise_faults
from hyper_parallel.models.common.fields import checked_fields

if TYPE_CHECKING:
    from hyper_parallel.models.common.decoder import Decoder

_WITHOUT_EFFECT = {
    "_name_or_path",
    "architectures",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "id2label",
    "label2id",
    "max_window_layers",  # which layers would slide; sliding itself is refused below
    "model_type",
    # transformers adds the balance loss only where this is true. We add it wherever its coefficient is above 0, in
    # training as in validation: a folder that says nothing about it was still trained with it.
    "output_router_logits",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "problem_type",
    "return_dict",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
"""Fields that say nothing about the numbers of a forward pass."""

_ONLY: dict[str, tuple[Callable[[Any], bool], str]] = {
    "hidden_act": (lambda v: v == "silu", "only silu is implemented"),
    "attention_dropout": (lambda v: not v, "dropout is not implemented"),
    "use_sliding_window": (lambda v: not v, "sliding windows are not implemented"),
    "sliding_window": (lambda v: True, ""),  # a size without effect while use_sliding_window is off
    "layer_types": (lambda v: v is None or set(v) <= {"full_attention"}, "only full_attention is implemented"),
    "is_encoder_decoder": (lambda v: not v, "only decoders are implemented"),
    "tie_encoder_decoder": (lambda v: not v, "only decoders are implemented"),
    "quantization_config": (lambda v: not v, "quantised weights are not implemented"),
    "partial_rotary_factor": (lambda v: v in (None, 1, 1.0), "only a rotation of whole heads is implemented"),
}
"""Fields that we take with some values only."""

_OURS = ("float64_rounding", "sharding")
"""Fields of our Config that config.json does not have."""

_ALIASES = {"num_local_experts": "num_experts"}
"""Names that transformers writes for fields of another name."""


def read_hf_config(folder: Path, kind: type[Decoder.Config]) -> Decoder.Config:
    """The Config, of the family that `kind` is of, that `folder`'s config.json describes.

    Raises:
        ConfigError: config.json is missing or of another family, or has fields or values that are not implemented;
            all of them are named.
    """
    file = folder / "config.json"
    content = read_json(folder)
    if content.get("model_type") != kind.model_type:
        raise ConfigError.one(
            str(file),
            f"model_type is {content.get('model_type')!r}, not {kind.model_type}",
            f"give --model_spec {content.get('model_type')}:{folder} if that is a family here",
        )
    own = {f.name for f in dataclasses.fields(kind)} - set(_OURS)
    faults: list[Fault] = []
    values: dict[str, Any] = {}
    rope = {name: content.pop(name) for name in ("rope_theta", "rope_scaling", "rope_parameters") if name in content}
    for name, value in content.items():
        field = _ALIASES.get(name, name)
        if name in _WITHOUT_EFFECT:
            continue
        if name in _ONLY:
            allowed, reason = _ONLY[name]
            if not allowed(value):
                faults.append(Fault(f"{file}.{name}", f"{value!r}: {reason}", "load another model"))
        elif field not in own:
            faults.append(
                Fault(
                    f"{file}.{name}", f"{value!r}: {kind.model_type} has no such field", "remove it if it has no effect"
                )
            )
        elif field in values and values[field] != value:
            faults.append(Fault(f"{file}.{name}", f"{value!r} differs from {field} {values[field]!r}", "keep one"))
        else:
            values[field] = value
    if values.get("mlp_only_layers", ()) is None:
        del values["mlp_only_layers"]
    values["rope_parameters"] = dict(_rope_values(rope))
    raise_faults(faults)
    config = kind(**checked_fields(kind, values, str(file)))
    raise_faults(
        Fault(".".join(filter(None, (str(file), path, fault.path))), fault.fact, fault.remedy)
        for path, node in config.traverse()
        for fault in node.faults()
    )
    return config


def hf_config(config: Decoder.Config, dtype: str) -> dict[str, Any]:
    """The content of config.json for a model of `config` whose weights are saved in `dtype`."""
    content = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    for name in _OURS:
        del content[name]
    content["num_key_value_heads"], content["head_dim"] = config.kv_heads, config.head_size
    rope = content.pop("rope_parameters")
    content["rope_parameters"] = {
        f.name: getattr(rope, f.name)
        for f in dataclasses.fields(rope)
        if f.name == "rope_theta" or getattr(rope, f.name) != f.default or f.name == "rope_type"
    }
    return {
        "architectures": [config.architecture],
        "model_type": config.model_type,
        "dtype": dtype,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        **content,
    }


def _rope_values(rope: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Fields of RopeParameters from transformers 5's `rope_parameters` or from `rope_theta` beside `rope_scaling`."""
    if rope.get("rope_theta") is not None:
        yield "rope_theta", rope["rope_theta"]
    nested = rope.get("rope_scaling") or rope.get("rope_parameters") or {}
    for name, value in nested.items():
        if value is not None:
            yield ("rope_type" if name == "type" else name), value


def read_json(folder: Path) -> dict[str, Any]:
    """The content of the folder's config.json.

    Raises:
        ConfigError: it is missing, or is not JSON.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise ConfigError.one(str(file), "there is no such file", "give a folder that holds a Hugging Face model")
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ConfigError.one(str(file), f"is not JSON ({error})", "download it again") from error
