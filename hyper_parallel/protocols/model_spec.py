"""ModelSpec: which model is trained, and the functions that only its family knows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from hyper_parallel.config.configurable import Buildable, ConfigNode, plain, setting, slot
from hyper_parallel.config.target import Target
from hyper_parallel.protocols.model import BaseModel
from hyper_parallel.protocols.state_dict_adapter import StateDictAdapter


@dataclass(kw_only=True, slots=True)
class ModelSpec(ConfigNode):
    """A model's Config and its functions. Functions that are None have nothing to add to what the trainer does."""

    name: str = setting(hidden=True)
    """Family, such as qwen3_moe."""
    flavor: str = setting(hidden=True)
    """Size within the family, or a folder that holds a Hugging Face config.json."""
    factory: str = setting(hidden=True)
    """Dotted path of the function that makes this spec from (flavor, **overrides)."""
    model: BaseModel.Config | None = setting(None, inline=True)
    """Sizes. None: `build_model_fn` alone knows them."""
    build_model_fn: Callable[..., Any] | None = None
    """`(model_config, parallel_dims, *, training, parallelism, activation_checkpoint, compile, dump_folder) -> model`:
    constructs, parallelises, materialises and loads in one call, in the place of the steps that do so. `model_config`
    is the run's copy of `model`."""
    parallelize_fn: Callable[..., Any] | None = None
    """`(model, parallel_dims, *, training, parallelism, activation_checkpoint, compile, dump_folder) -> model`."""
    pipelining_fn: Callable[..., Any] | None = None
    """`(model, parallel_dims, *, parallelism) -> parts`: the parts of the model for the pipeline stages of this rank,
    each made ready by `parallelize_fn` afterwards. None: the family has no pipeline."""
    post_optimizer_build_fn: Callable[..., Any] | None = None
    """`(optimizers, model_parts, parallel_dims)`, called once the optimizers stand."""
    state_dict_adapter: type[StateDictAdapter] | None = None
    """Built with the model's Config: maps parameters to the tensors of a Hugging Face checkpoint."""
    clip_grad_fn: Callable[..., Any] | None = None
    """In the place of the trainer's clip_grad_norm."""
    target: Buildable[BaseModel] | None = slot(
        None,
        runtime="distributed_setup training activation_checkpoint activation_swap compile_config peft_config",
        inline=True,
    )
    """A callable that a YAML file names, in the place of `build_model_fn`: it constructs, parallelises, materialises
    and loads."""

    @classmethod
    def of_target(cls, target: Target) -> ModelSpec:
        """The spec of a model of which nothing is known but what builds it."""
        return cls(name=target.target_path, flavor="", factory=target.target_path, target=target)

    @property
    def builds_whole(self) -> bool:
        """Whether a function of the spec does all that makes a model."""
        return self.build_model_fn is not None or self.target is not None

    def described(self) -> ModelSpec:
        """This spec with what the callable of its `target` says of the model, if it is `described_by` something.

        Raises:
            ConfigError: there can be no such model.
        """
        if not isinstance(self.target, Target):
            return self
        describe = getattr(type(self.target).callable, "describe", None)
        if describe is None:
            return self
        try:
            spec: ModelSpec = describe(**self.target.configured())
        except TypeError as error:  # an argument is missing, which the slot tells
            if self.target.missing(()):
                return self
            raise error
        return dataclasses.replace(spec, build_model_fn=None, target=self.target)

    def to_dict(self) -> dict[str, Any]:
        """`factory`, `flavor`, and the model's fields that differ from that flavor's: calling the factory with the
        rest as keywords makes an equal spec. Or the `target`."""
        if self.target is not None:
            return dict(plain(self.target))
        differing: dict[str, Any] = {}
        if self.model is not None:
            module, _, function = self.factory.rpartition(".")
            original = getattr(import_module(module), function)(self.flavor).model
            for f in dataclasses.fields(self.model):
                value = getattr(self.model, f.name)
                if value != getattr(original, f.name):
                    differing[f.name] = plain(value)
        return {"_target_": self.factory, "flavor": self.flavor, **differing}


def described_by(describe: Callable[..., ModelSpec]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates what builds a model: called with its configured arguments, `describe` says which, and builds nothing.

    So a run that names it as the `_target_` of its model is checked as any other.
    """

    def decorate(build: Callable[..., Any]) -> Callable[..., Any]:
        build.describe = describe  # type: ignore[attr-defined]
        return build

    return decorate
