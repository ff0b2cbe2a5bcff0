"""HyperAutoModelForCausalLM: a causal language model of transformers, ready to train, in one call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hyper_parallel.config.errors import ConfigError, Fault, raise_faults
from hyper_parallel.config.sections import (
    ActivationCheckpointConfig,
    CompileConfig,
    ParallelismConfig,
    TrainingConfig,
)
from hyper_parallel.distributed.construction import construct_on_meta, materialize
from hyper_parallel.distributed.distributed_setup import DistributedSetup
from hyper_parallel.distributed.hf_weights import HFWeightsError, load_hf_weights, weight_files
from hyper_parallel.distributed.parallel_dims import ParallelDims
from hyper_parallel.models.auto.causal_lm import AutoCausalLM
from hyper_parallel.models.auto.state_dict_adapter import AutoStateDictAdapter
from hyper_parallel.models.common.hf_config import read_json
from hyper_parallel.models.common.parallelize import parallelize_decoder
from hyper_parallel.protocols.model_spec import ModelSpec, described_by


class HyperAutoModelForCausalLM:
    """Builds; there are no instances. What is built is an `AutoCausalLM`."""

    @staticmethod
    @described_by(lambda **configured: _spec(**configured, reads_weights=True))
    def from_pretrained(
        pretrained_model_name_or_path: str | Path,
        *,
        distributed_setup: DistributedSetup | None = None,
        training: TrainingConfig | None = None,
        activation_checkpoint: ActivationCheckpointConfig | None = None,
        activation_swap: bool | None = None,
        compile_config: CompileConfig | None = None,
        peft_config: None = None,
        **changes: Any,
    ) -> AutoCausalLM:
        """The model of a folder with its weights: constructed on meta, sharded, materialised, read, in train mode.

        Every rank calls this, and reads what it holds of each tensor.

        Args:
            pretrained_model_name_or_path: a folder with config.json and safetensors.
            distributed_setup: None: this process alone.
            training: of which `dtype`, the types of mixed precision and `seed` count.
            activation_swap: in the place of `activation_checkpoint.swap`.
            peft_config: there is no adapter training yet, so None alone.
            changes: fields of config.json that get another value, such as attn_pdrop=0.0.

        Raises:
            ConfigError: no such folder, a model that is not understood, or a parallelism that it has no plan for.
            HFWeightsError: the weights do not fit the model, or cannot be read.
        """
        raise_faults(_refused(peft_config, changes))
        folder = _existing(pretrained_model_name_or_path)
        return _build(
            _planned(AutoCausalLM.Config(content=read_json(folder), changes=changes), distributed_setup),
            distributed_setup or DistributedSetup(),
            training or TrainingConfig(),
            _recompute(activation_checkpoint, activation_swap),
            compile_config or CompileConfig(),
            weights=folder,
        )

    @staticmethod
    @described_by(lambda **configured: _spec(**configured, reads_weights=False))
    def from_config(
        config: Any,
        *,
        distributed_setup: DistributedSetup | None = None,
        training: TrainingConfig | None = None,
        activation_checkpoint: ActivationCheckpointConfig | None = None,
        activation_swap: bool | None = None,
        compile_config: CompileConfig | None = None,
        peft_config: None = None,
        **changes: Any,
    ) -> AutoCausalLM:
        """The same with weights drawn from `training.seed`, alike on every topology.

        Args:
            config: a PretrainedConfig, or a folder with config.json.

        Raises:
            ConfigError: as in `from_pretrained`.
        """
        raise_faults(_refused(peft_config, changes))
        content = read_json(_existing(config, "config")) if isinstance(config, str | Path) else config.to_dict()
        return _build(
            _planned(AutoCausalLM.Config(content=content, changes=changes), distributed_setup),
            distributed_setup or DistributedSetup(),
            training or TrainingConfig(),
            _recompute(activation_checkpoint, activation_swap),
            compile_config or CompileConfig(),
            weights=None,
        )


@dataclass(frozen=True, slots=True)
class BuildPretrained:
    """The `build_model_fn` of a folder."""

    folder: str
    """What is read."""

    def __call__(
        self,
        model_config: AutoCausalLM.Config,
        parallel_dims: ParallelDims,
        *,
        training: TrainingConfig,
        parallelism: ParallelismConfig,
        activation_checkpoint: ActivationCheckpointConfig,
        compile: CompileConfig,
        dump_folder: str,
    ) -> AutoCausalLM:
        """The model on its ranks, with the weights of the folder. `dump_folder` is not used."""
        setup = DistributedSetup(parallel_dims=parallel_dims, parallelism=parallelism)
        return _build(model_config, setup, training, activation_checkpoint, compile, weights=Path(self.folder))


def _planned(config: AutoCausalLM.Config, setup: DistributedSetup | None) -> AutoCausalLM.Config:
    """`config` with the plan of the run, as `update_from_config` gives it to a trainer's."""
    if setup is not None:
        config.set_sharding_config(setup.parallelism)
    return config


def _existing(folder: str | Path, given_by: str = "pretrained_model_name_or_path") -> Path:
    if not Path(folder).is_dir():
        raise ConfigError.one(given_by, f"{folder} is no folder", f"download it: hf download {folder}")
    return Path(folder)


def _recompute(section: ActivationCheckpointConfig | None, swap: bool | None) -> ActivationCheckpointConfig:
    section = section or ActivationCheckpointConfig()
    return section if swap is None else section.derive(swap=swap)


_ELSEWHERE = {
    "torch_dtype": "training.dtype, or the types of mixed precision,",
    "dtype": "training.dtype, or the types of mixed precision,",
    "attn_implementation": "plan_overrides with a replace_module",
    "trust_remote_code": "a family of transformers; code in a folder is not run, so nothing",
}
"""What other libraries take here, and what says it in this one."""


def _refused(peft_config: Any, changes: dict[str, Any]) -> Iterator[Fault]:
    if peft_config is not None:
        yield Fault("model_spec.peft_config", "adapters are not trained here", "leave it out")
    for name, home in _ELSEWHERE.items():
        if name in changes:
            yield Fault(f"model_spec.{name}", f"{changes[name]!r}, but {home} says that", "leave it out here")


def _spec(
    pretrained_model_name_or_path: str | None = None,
    config: Any = None,
    *,
    reads_weights: bool,
    peft_config: Any = None,
    **changes: Any,
) -> ModelSpec:
    """Which model the two functions would build; with the weights of its folder or without."""
    name = "pretrained_model_name_or_path" if reads_weights else "config"
    given = pretrained_model_name_or_path if reads_weights else config
    if given is None:
        raise TypeError("the folder is missing")
    raise_faults(_refused(peft_config, changes))
    is_folder = isinstance(given, str | Path)
    try:
        if is_folder and reads_weights:
            weight_files(_existing(given, f"model_spec.{name}"))
        content = read_json(_existing(given, f"model_spec.{name}")) if is_folder else given.to_dict()
    except (OSError, HFWeightsError) as error:
        raise ConfigError.one("model_spec", str(error), "give a folder with weights, or use from_config") from error
    config = AutoCausalLM.Config(content=content, changes=changes)
    config.hf_config()  # which refuses what transformers does not know
    return ModelSpec(
        name="auto",
        flavor=str(given) if is_folder else "",
        factory="",
        model=config,
        parallelize_fn=parallelize_decoder,
        state_dict_adapter=AutoStateDictAdapter,
    )


def _build(
    config: AutoCausalLM.Config,
    setup: DistributedSetup,
    training: TrainingConfig,
    activation_checkpoint: ActivationCheckpointConfig,
    compile_config: CompileConfig,
    *,
    weights: Path | None,
) -> AutoCausalLM:
    dims, parallelism = setup.parallel_dims, setup.parallelism
    if dims.pp > 1:
        raise ConfigError.one("distributed_setup.pp", f"{dims.pp}, but there are no stages of it", "set 1")
    model = construct_on_meta(config, getattr(torch, training.dtype))
    assert isinstance(model, AutoCausalLM)
    model.apply_overrides(setup.plan_overrides, parallelism, training)
    model.verify_module_protocol()
    parallelize_decoder(
        model,
        dims,
        training=training,
        parallelism=parallelism,
        activation_checkpoint=activation_checkpoint,
        compile=compile_config,
        dump_folder="",
    )
    materialize([model], cpu_offload=parallelism.cpu_offload, seed=training.seed)
    if weights is not None:
        load_hf_weights([model], AutoStateDictAdapter(config), weights)
    return model
