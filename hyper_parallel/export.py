"""A checkpoint as a folder that transformers loads, without the run that saved it.

    python -m hyper_parallel.export --checkpoint outputs/checkpoint/step-500 --to my_model --dtype bfloat16

One process, which holds one parameter at a time. Exit codes: 0 exported; 1 it could not be read or written; 2 a wrong
argument (`path: fact; remedy`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hyper_parallel.config.errors import ConfigError
from hyper_parallel.platform.environment import prepare_environment

if TYPE_CHECKING:
    from hyper_parallel.trainer.config import TrainerConfig

DTYPES = ("float32", "bfloat16", "float16", "float64")


def main(argv: Sequence[str] | None = None) -> int:
    """Exports what `argv` (default: this process's command line) names; returns the exit code."""
    parser = argparse.ArgumentParser(prog="hyper_parallel.export", description="Write a checkpoint for transformers.")
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, metavar="FOLDER", help="a step-N, or a run, for its newest step")
    add("--to", type=Path, required=True, metavar="FOLDER", help="a new or empty folder")
    add("--dtype", choices=DTYPES, help="type to write the weights in (default: as they are)")
    add("--config", type=Path, metavar="FILE", help="the run's config.yaml (default: the copy in the checkpoint)")
    arguments = parser.parse_args(argv)
    prepare_environment()
    from hyper_parallel.distributed.last_words import run_tool

    def run() -> int:
        size_bytes = export(arguments.checkpoint, arguments.to, dtype=arguments.dtype, config_file=arguments.config)
        print(f"exported {arguments.to}, {size_bytes} bytes")
        return 0

    return run_tool(run)


def export(checkpoint: Path, to: Path, *, dtype: str | None = None, config_file: Path | None = None) -> int:
    """Writes the weights and the tokenizer of a checkpoint to a new folder; returns the bytes of all tensors.

    Args:
        checkpoint: a step, or a run, of which the newest one is taken.
        dtype: name of a torch type; None: as the weights are.
        config_file: the run's config.yaml; None: what the checkpoint holds of it.

    Raises:
        ConfigError: there is no complete checkpoint, or its configuration is missing or names no model that
            transformers has.
        RunError: a file is damaged, of another model, or cannot be written.
    """
    import torch

    from hyper_parallel.components.checkpoint import CheckpointError, storage
    from hyper_parallel.components.checkpoint.model_state import refuse_another_model, shape_of
    from hyper_parallel.components.checkpoint.reading import open_step, read, saved_entries
    from hyper_parallel.components.checkpoint.step_locks import being_read
    from hyper_parallel.components.checkpoint.verification import damage
    from hyper_parallel.distributed.hf_weights import write_hf_folder
    from hyper_parallel.trainer import phases

    place = storage.complete_checkpoint("--checkpoint", checkpoint)
    config = _config(place, config_file).described()
    spec = config.model_spec
    if spec is None or spec.state_dict_adapter is None:
        fact = f"{'no model' if spec is None else spec.name} has no state_dict_adapter to name its weights with"
        raise ConfigError.one("--checkpoint", fact, "give its ModelSpec one")
    model_config = phases.prepare_model_config(config)
    assert model_config is not None, "an adapter comes with a model Config, which the config was checked for"
    model = phases.construct_model(config, model_config)
    parameters = dict(model.named_parameters())
    with being_read(place):
        if (reason := damage(place)) is not None:
            raise CheckpointError(f"{place} is damaged: {reason}; give another step")
        reader = open_step(place)
        entries = {name: entry for name, entry in saved_entries(reader).items() if name.startswith("model.")}
        remedy = "give the config.yaml of the run that saved it with --config"
        refuse_another_model(f"{place} is of another model", entries, {"model": parameters}, shape_of, remedy)

        def whole(name: str) -> torch.Tensor:
            entry = entries[f"model.{name}"]
            state = {f"model.{name}": torch.empty(entry.size, dtype=entry.properties.dtype)}
            read(reader, state)
            return state[f"model.{name}"].to(likes[name].dtype)

        likes = {
            name: torch.empty_like(
                parameter, dtype=getattr(torch, dtype) if dtype else entries[f"model.{name}"].properties.dtype
            )
            for name, parameter in parameters.items()
        }
        tokenizer = phases.build_tokenizer(config)
        return write_hf_folder(likes, whole, spec.state_dict_adapter(model_config), to, add_files=tokenizer.save)


def _config(place: Path, config_file: Path | None) -> TrainerConfig:
    """
    Raises:
        ConfigError: there is none, or it does not resolve.
    """
    import yaml

    from hyper_parallel.components.checkpoint import storage
    from hyper_parallel.config import yaml_file
    from hyper_parallel.config.resolver import resolve_root

    if config_file is not None:
        return resolve_root(yaml_file.read(str(config_file)).content)
    text = storage.read_marker(place)["config"]
    if text is None:
        fact = f"{place} has no copy of the run's config.yaml"
        raise ConfigError.one("--config", fact, "give the file of the run that saved it")
    return resolve_root(yaml.safe_load(text))


if __name__ == "__main__":
    sys.exit(main())
