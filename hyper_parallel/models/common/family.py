"""A family of models: its published sizes, and a ModelSpec from a flavor's name or a Hugging Face folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from hyper_parallel.config.errors import ConfigError, Fault, did_you_mean, raise_faults
from hyper_parallel.config.values import coerce
from hyper_parallel.models.common.decoder import Decoder
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
        for name, value in self.checked(overrides, "model_spec").items():
            setattr(config, name, value)
        raise_faults(
            Fault(".".join(filter(None, ("model_spec", path, fault.path))), fault.fact, fault.remedy)
            for path, node in config.traverse()
            for fault in node.faults()
        )
        from hyper_parallel.models.common.parallelize import parallelize_decoder

        return ModelSpec(
            name=self.name,
            flavor=flavor,
            factory=f"hyper_parallel.models.{self.name}.create_model_spec",
            model=config,
            parallelize_fn=parallelize_decoder,
            state_dict_adapter=DecoderStateDictAdapter,
        )

    def checked(self, values: Mapping[str, Any], path: str) -> dict[str, Any]:
        """`values` of fields of the Config, each as its annotation wants it.

        Raises:
            ConfigError: unknown fields, values of another type. Paths start with `path`.
        """
        hints = get_type_hints(self.config)
        known = {f.name for f in dataclasses.fields(self.config)}
        raise_faults(
            Fault(f"{path}.{name}", f"{self.name} has no such field", did_you_mean(name, known))
            for name in values
            if name not in known
        )
        return {name: coerce(value, hints[name], f"{path}.{name}") for name, value in values.items()}

    def _flavor_config(self, flavor: str) -> Decoder.Config:
        if flavor in self.flavors:
            return self.config(**self.checked(self.flavors[flavor], "model_spec"))
        if Path(flavor).is_dir():
            from hyper_parallel.models.common.hf_config import read_hf_config

            return read_hf_config(Path(flavor), self)
        raise ConfigError.one(
            "model_spec",
            f"{self.name} has no flavor {flavor!r}, and no such folder exists; its flavors are "
            f"{', '.join(self.flavors)}",
            did_you_mean(flavor, self.flavors),
        )
