"""A family of models: its published sizes, and a ModelSpec from a flavor's name or a Hugging Face folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyper_parallel.config.errors import ConfigError, Fault, did_you_mean, raise_faults
from hyper_parallel.models.common.decoder import Decoder
from hyper_parallel.models.common.rope import RopeParameters
from hyper_parallel.models.common.state_dict_adapter import DecoderStateDictAdapter
from hyper_parallel.protocols.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Family:
    """What one package below `models` knows."""

    name: str
    """The package's name, which is Hugging Face's model_type."""
    architecture: str
    """The class that transformers loads a checkpoint with."""
    config: type[Decoder.Config]
    """Config of the model."""
    flavors: Mapping[str, Mapping[str, Any]]
    """Per flavor the fields that differ from the Config's defaults."""

    def model_spec(self, flavor: str, overrides: Mapping[str, Any]) -> ModelSpec:
        """The spec of `flavor`, a key of `flavors` or a folder with config.json, with `overrides` to its fields.

        Raises:
            ConfigError: an unknown flavor or field, a folder that describes another model, or impossible sizes.
        """
        config = self._flavor_config(flavor)
        known = {f.name for f in dataclasses.fields(config)}
        unknown = [Fault(f"model_spec.{n}", f"{self.name} has no such field", did_you_mean(n, known)) for n in overrides if n not in known]
        raise_faults(unknown)
        for name, value in overrides.items():
            setattr(config, name, _coerce(name, value))
        faults = [
            Fault(f"model_spec.{path}.{fault.path}" if path else f"model_spec.{fault.path}", fault.fact, fault.remedy)
            for path, node in config.traverse()
            for fault in node.faults()
        ]
        raise_faults(faults)
        from hyper_parallel.models.common.parallelize import parallelize_decoder

        return ModelSpec(
            name=self.name,
            flavor=flavor,
            factory=f"hyper_parallel.models.{self.name}.create_model_spec",
            model=config,
            parallelize_fn=parallelize_decoder,
            state_dict_adapter=DecoderStateDictAdapter,
        )

    def _flavor_config(self, flavor: str) -> Decoder.Config:
        if flavor in self.flavors:
            return self.config(**{n: _coerce(n, v) for n, v in self.flavors[flavor].items()})
        if Path(flavor).is_dir():
            from hyper_parallel.models.hf_config import read_hf_config

            return read_hf_config(Path(flavor), self)
        raise ConfigError.one(
            "model_spec",
            f"{self.name} has no flavor {flavor!r}, and no such folder exists; its flavors are "
            f"{', '.join(self.flavors)}",
            did_you_mean(flavor, self.flavors),
        )


def _coerce(name: str, value: Any) -> Any:
    """The value of a field as its Config holds it, from what YAML and JSON can say."""
    if name == "rope_parameters" and isinstance(value, Mapping):
        known = {f.name for f in dataclasses.fields(RopeParameters)}
        raise_faults(
            Fault(f"model_spec.rope_parameters.{n}", "there is no such field", did_you_mean(n, known))
            for n in value
            if n not in known
        )
        return RopeParameters(**value)
    return tuple(value) if isinstance(value, list) else value
