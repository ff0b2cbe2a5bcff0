"""HyperAutoModelForCausalLM: a causal language model of transformers, ready to train, in one call."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hyper_parallel.config.errors import ConfigError
from hyper_parallel.config.sections import (
    ActivationCheckpointConfig,
    CompileConfig,
    ParallelismConfig,
    TrainingConfig,
)
from hyper_parallel.distributed.construction import construct_on_meta, materialize
from hyper_parallel.distributed.distributed_setup import DistributedSetup
from hyper_parallel.distributed.hf_weights import load_hf_weights
from hyper_parallel.distributed.parallel_dims import ParallelDims
from hyper_parallel.models.auto.causal_lm import AutoCausalLM
from hyper_parallel.models.auto.state_dict_adapter import AutoStateDictAdapter
from hyper_parallel.models.common.hf_config import read_json
from hyper_parallel.models.common.parallelize import parallelize_decoder


class HyperAutoModelForCausalLM:
    """Builds; there are no instances. What is built is an `AutoCausalLM`."""

    @staticmethod
    def from_pretrained(
        pretrained_model_name_or_path: str | Path,
        *,
        distributed_setup: DistributedSetup | None = None,
        training: TrainingConfig | None = None,
        activation_checkpoint: ActivationCheckpointConfig | None = None,
        compile_config: CompileConfig | None = None,
        **changes: Any,
    ) -> AutoCausalLM:
        """The model of a folder with its weights: constructed on meta, sharded, materialised, read, in train mode.

        Every rank calls this, and reads what it holds of each tensor.

        Args:
            pretrained_model_name_or_path: a folder with config.json and safetensors.
            distributed_setup: None: this process alone.
            training: of which `dtype`, the types of mixed precision and `seed` count.
            changes: fields of config.json that get another value, such as attn_pdrop=0.0.

        Raises:
            ConfigError: no such folder, a model that is not understood, or a parallelism that it has no plan for.
            HFWeightsError: the weights do not fit the model, or cannot be read.
        """
        folder = Path(pretrained_model_name_or_path)
        if not folder.is_dir():
            fact = f"{folder} is no folder"
            raise ConfigError.one("pretrained_model_name_or_path", fact, f"download it: hf download {folder}")
        return _build(
            _planned(AutoCausalLM.Config(content=read_json(folder), changes=changes), distributed_setup),
            distributed_setup or DistributedSetup(),
            training or TrainingConfig(),
            activation_checkpoint or ActivationCheckpointConfig(),
            compile_config or CompileConfig(),
            weights=folder,
        )

    @staticmethod
    def from_config(
        config: Any,
        *,
        distributed_setup: DistributedSetup | None = None,
        training: TrainingConfig | None = None,
        activation_checkpoint: ActivationCheckpointConfig | None = None,
        compile_config: CompileConfig | None = None,
        **changes: Any,
    ) -> AutoCausalLM:
        """The same with weights drawn from `training.seed`, alike on every topology.

        Args:
            config: a PretrainedConfig.

        Raises:
            ConfigError: as in `from_pretrained`.
        """
        return _build(
            _planned(AutoCausalLM.Config(content=config.to_dict(), changes=changes), distributed_setup),
            distributed_setup or DistributedSetup(),
            training or TrainingConfig(),
            activation_checkpoint or ActivationCheckpointConfig(),
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
