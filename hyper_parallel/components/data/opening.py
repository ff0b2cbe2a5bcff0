"""The sources and the transform that the settings of a dataloader name."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hyper_parallel.assets import CORPUS_FILES
from hyper_parallel.components.data.sources import (
    IndexedSource,
    JsonLinesSource,
    Source,
    TorchFileSource,
    choose_source,
)
from hyper_parallel.components.data.transforms import PlainTextTransform, TokenIdsTransform, Transform
from hyper_parallel.components.tokenizer import BaseTokenizer
from hyper_parallel.config.configurable import Buildable
from hyper_parallel.config.errors import ConfigError, Fault

if TYPE_CHECKING:
    from hyper_parallel.components.data.loader import TextDataLoader

logger = logging.getLogger(__name__)


def open_sources(config: TextDataLoader.Config) -> Iterator[tuple[str, Source]]:
    """(name for log lines, source) of each source of a dataloader, opened when it is asked for.

    Raises:
        ConfigError: a source cannot be opened, or is none.
    """
    if config.sources:
        choices = list(config.sources)
    elif config.path is None:
        file = CORPUS_FILES[config.split]
        logger.info("%s data: no path given, using the embedded Shakespeare corpus %s", config.split, file.name)
        choices = [JsonLinesSource.Config(path=str(file))]
    else:
        kind = None if config.source == "text" else config.source
        choices = [
            choose_source(
                config.path,
                kind=kind,  # type: ignore[arg-type]
                subset=config.subset,
                split=config.split,
                streaming=config.reading == "stream",
            )
        ]
    for i, choice in enumerate(choices):
        with at_source(config, i):
            source = choice.build(on_error=config.on_error)
            if not isinstance(source, Source):
                lacks = [name for name in ("__iter__", "state_dict", "load_state_dict") if not hasattr(source, name)]
                fact = f"{type(source).__qualname__} has no {', '.join(lacks)}"
                raise ConfigError.one("dataloader.path", fact, "write them, as hyper_parallel...sources.Source says")
        yield _name(choice, source), source


def transform_of(config: TextDataLoader.Config, source: Source, tokenizer: BaseTokenizer, seq_len: int) -> Transform:
    """The transform of a dataloader, by default what fits the source.

    Raises:
        ConfigError: what is configured makes no Transform.
    """
    choice = config.transform
    if choice is None:
        of_ids = isinstance(source, IndexedSource | TorchFileSource)
        choice = TokenIdsTransform.Config() if of_ids else PlainTextTransform.Config(field=config.text_field)
    transform = choice.build(tokenizer=tokenizer, seq_len=seq_len)
    if not isinstance(transform, Transform):
        fact = f"{type(transform).__qualname__} is no Transform"
        raise ConfigError.one("dataloader.transform", fact, "derive it from data.transforms.Transform")
    return transform


@contextmanager
def at_source(config: TextDataLoader.Config, i: int) -> Iterator[None]:
    """Faults of a path are told at the source that has it."""
    try:
        yield
    except ConfigError as error:
        if not config.sources:
            raise
        raise ConfigError(
            Fault(
                f"dataloader.sources.{i}" if fault.path == "dataloader.path" else fault.path, fault.fact, fault.remedy
            )
            for fault in error.faults
        ) from error


def _name(choice: Buildable[Source], source: Source) -> str:
    path = getattr(choice, "path", None)
    return path if isinstance(path, str) else type(source).__qualname__
