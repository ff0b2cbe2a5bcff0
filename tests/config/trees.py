"""A small root with slots, sections and recipes, for tests of the command line and the manager."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from hyper_parallel.config.configurable import Buildable, ConfigNode, Configurable, setting, slot
from hyper_parallel.config.errors import ConfigError, Fault
from hyper_parallel.config.sections import TrainingConfig
from hyper_parallel.config.target import Target
from tests.config.targets import ScaledLoss, needs_rate


class Optimizer(Configurable):
    """Updates the weights."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        lr: float = 0.001
        """Learning rate."""
        betas: tuple[float, float] = (0.9, 0.95)
        """Decay of two means."""
        names: list[str] = field(default_factory=list)
        """Names of things."""
        swap: Literal["on", "off"] = "on"
        """Swap or not."""

    def __init__(self, config: Config, *, params: Any) -> None:
        self.config = config


class Sink(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        folder: str = "sink"
        """Where."""

    def __init__(self, config: Config) -> None:
        self.config = config


@dataclass(kw_only=True, slots=True)
class Metrics(ConfigNode):
    sinks: tuple[Buildable[Sink], ...] = field(default_factory=lambda: (Sink.Config(), Sink.Config(folder="b")))


@dataclass(kw_only=True, slots=True)
class Switches(ConfigNode):
    enable: bool = False
    """Turn it on."""


@dataclass(kw_only=True, slots=True)
class Sizes(ConfigNode):
    width: int = 8
    """Width of it."""


@dataclass(kw_only=True, slots=True)
class Spec(ConfigNode):
    factory: str = setting("tests.config.trees.make_spec", hidden=True)
    sizes: Sizes = setting(default_factory=Sizes, inline=True)

    def to_dict(self) -> dict[str, Any]:
        return {"_target_": self.factory, "width": self.sizes.width}


class Trainer(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        model_spec: Spec | None = setting(None, aliases=("model",))
        """The model."""
        hf_assets_path: str | None = None
        """Folder of the tokenizer."""
        dump_folder: str = "outputs"
        """Where all goes."""
        optimizer: Buildable[Optimizer] = slot(Optimizer.Config, runtime="params")
        """Updates."""
        loss: Buildable[Any] = slot(lambda: Target.of(ScaledLoss), runtime="model", aliases=("loss_fn",))
        """Loss."""
        metrics: Metrics = field(default_factory=Metrics)
        training: TrainingConfig = field(default_factory=lambda: TrainingConfig(steps=10))
        compile: Switches = setting(default_factory=Switches, aliases=("jit",))

        def cross_faults(self, world_size: int) -> Iterator[Fault]:
            if self.training.global_batch_size % world_size:
                yield Fault("training.global_batch_size", f"not a multiple of {world_size}", "change it")

    def __init__(self, config: Config) -> None:
        self.config = config


SHARED = Trainer.Config(model_spec=Spec(), dump_folder="shared")


def good() -> Trainer.Config:
    return Trainer.Config(model_spec=Spec(sizes=Sizes(width=4)), dump_folder="good")


def shared() -> Trainer.Config:
    return SHARED


def listed_betas() -> Trainer.Config:
    return Trainer.Config(optimizer=Optimizer.Config(lr=1, betas=[0.5, 0.6]))  # type: ignore[arg-type]


def mistyped() -> Trainer.Config:
    config = Trainer.Config()
    config.training.seq_len = "10x"  # type: ignore[assignment]
    config.compile = None  # type: ignore[assignment]
    config.optimizer = 3  # type: ignore[assignment]
    return config


def incomplete() -> Trainer.Config:
    return Trainer.Config(loss=Target.of(needs_rate), optimizer=Target.of(needs_rate))


def wrong_return() -> int:
    return 3


def raises() -> Trainer.Config:
    raise ValueError("no\nluck")


def exits() -> Trainer.Config:
    raise SystemExit(3)


def refuses() -> Trainer.Config:
    raise ConfigError.one("a.b", "is wrong", "mend it")


def needs_argument(size: int) -> Trainer.Config:
    return Trainer.Config()
