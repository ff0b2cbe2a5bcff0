"""A family of models: its published sizes, and a ModelSpec from a flavor's name or a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyper_parallel.config.errors import ConfigError, Fault, did_you_mean, raise_faults
from hyper_parallel.models.common.decoder import Decoder
from hyper_parallel.models.common.fields import checked_fields
from hyper_parallel.models.common.hf_config import read_hf_config
from hyper_parallel.models.common.state_dict_adapter import DecoderStateDictAdapter
from hyper_parallel.protocols.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Family:
    """What one package below `models` knows."""

    config: type[Decoder.Config]
    """Config of the model."""
    flavors: Mapping[str, Mapping[str, Any]]
    """Per flavor the fields that differ from the Config's defaults."""

    @property
    def name(self) -> str:
        """The package's name, which is Hugging Face's model_type."""
        return self.config.model_type

    def model_spec(self, flavor: str, overrides: Mapping[str, Any]) -> ModelSpec:
        """The spec of `flavor`, a key of `flavors` or a folder with config.json, with `overrides` to its fields.

        Raises:
            ConfigError: an unknown flavor or field, a folder that describes another model, or impossible sizes.
        """
        config = self._flavor_config(flavor)
        for name, value in checked_fields(self.config, overrides, "model_spec").items():
            setattr(config, name, value)
        raise_faults(
            Fault(".".join(filter(None, ("model_spec", path, fault.path))), fault.fact, fault.remedy)
            for path, node in config.traverse()
            for fault in node.faults()
        )
        from hyper_parallel.models.common.parallelize import parallelize_decoder
        from hyper_parallel.models.common.pipeline import pipeline_decoder

        return ModelSpec(
            name=self.name,
            flavor=flavor,
            factory=f"hyper_parallel.models.{self.name}.create_model_spec",
            model=config,
            parallelize_fn=parallelize_decoder,
            pipelining_fn=pipeline_decoder,
            state_dict_adapter=DecoderStateDictAdapter,
        )

    def _flavor_config(self, flavor: str) -> Decoder.Config:
        if flavor in self.flavors:
            return self.config(**checked_fields(self.config, self.flavors[flavor], "model_spec"))
        if Path(flavor).is_dir():
            return read_hf_config(Path(flavor), self.config)
        raise ConfigError.one(
            "model_spec",
            f"{self.name} has no flavor {flavor!r}, and no such folder exists; its flavors are "
            f"{', '.join(self.flavors)}",
            did_you_mean(flavor, self.flavors),
        )
