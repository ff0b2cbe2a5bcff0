"""What is wrong with the settings of a dataloader by themselves."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hyper_parallel.components.data.sources.choose import choose_source
from hyper_parallel.config.errors import ConfigError, Fault
from hyper_parallel.config.sections import at_least

if TYPE_CHECKING:
    from hyper_parallel.components.data.loader import TextDataLoader


def loader_faults(config: TextDataLoader.Config) -> Iterator[Fault]:
    """Faults with paths relative to the dataloader. Settings that would have no effect are faults too."""
    yield from at_least(config, 0, "num_workers", "prefetch")
    yield from at_least(config, 1, "documents", "shuffle_window")
    if config.num_workers > 0 and config.prefetch == 0:
        yield Fault("prefetch", f"0 leaves {config.num_workers} workers nothing to do", "give 1 or more")
    yield from _sources_faults(config)
    yield from _field_faults(config)
    if config.reading == "ahead" and config.shuffle_window is not None:
        fact = f"{config.shuffle_window} is given, but reading is ahead, which shuffles all documents"
        yield Fault("shuffle_window", fact, "remove it, or set reading stream")
    if config.packing == "megatron":
        yield from _megatron_faults(config)
    if config.packing != "best_fit" and config.packing_cost != "total":
        yield Fault("packing_cost", f"{config.packing_cost} is given, but packing is {config.packing}", "set best_fit")


def _sources_faults(config: TextDataLoader.Config) -> Iterator[Fault]:
    if config.sources:
        for name in ("path", "subset"):
            if (value := getattr(config, name)) is not None:
                yield Fault(name, f"{value} is given, and sources too", "remove one of the two")
        if config.source != "text":
            yield Fault("source", f"{config.source} is given, and sources too", "remove one of the two")
        if config.weights and len(config.weights) != len(config.sources):
            yield Fault("weights", f"{len(config.weights)} for {len(config.sources)} sources", "give each one")
        if not all(0 < weight < math.inf for weight in config.weights):
            yield Fault("weights", f"{list(config.weights)} are not all above 0", "leave out sources without weight")
        if config.reading == "stream" and config.stopping != "repeat":
            fact = f"{config.stopping} is given, but streamed data has no known end"
            yield Fault("stopping", fact, "set repeat, or reading ahead")
        return
    if config.weights:
        yield Fault("weights", f"{list(config.weights)} are given, but no sources", "give sources, or remove them")
    if config.source == "synthetic":
        if config.path is not None:
            yield Fault("path", f"{config.path} is given, but source is synthetic", "remove one of the two")
        if config.reading == "stream":
            yield Fault("reading", "stream is given, but synthetic data is drawn at once", "set ahead")
        if config.transform is not None:
            yield Fault("transform", "is given, but synthetic data is token ids already", "remove it")
    elif config.path is None:
        if config.subset is not None:
            yield Fault("subset", f"{config.subset} is given, but no path", "give the name of the data set")
        if config.source != "text":
            yield Fault("path", f"not given, but source is {config.source}", "give a path")
    else:
        try:
            choice = choose_source(
                config.path,
                kind=None if config.source == "text" else config.source,
                subset=config.subset,
                split=config.split,
            )
            yield from choice.faults()
        except ConfigError as error:
            for fault in error.faults:
                yield Fault(fault.path.removeprefix("dataloader."), fault.fact, fault.remedy)


def _field_faults(config: TextDataLoader.Config) -> Iterator[Fault]:
    if config.text_field == "text":
        return
    if config.transform is not None:
        fact = f"{config.text_field!r} is given, but the transform has its own field"
        yield Fault("text_field", fact, "remove it")
    elif not config.sources and (config.path is None or config.path.endswith(".txt")):
        synthetic = config.source == "synthetic"
        source = config.path or ("synthetic data" if synthetic else "the corpus in the package")
        yield Fault("text_field", f"{config.text_field!r} is given, but {source} has no such fields", "remove it")


def _megatron_faults(config: TextDataLoader.Config) -> Iterator[Fault]:
    for name, only in (("reading", "ahead"), ("shuffle", True), ("documents", None), ("transform", None)):
        if (value := getattr(config, name)) != only:
            yield Fault(name, f"{value} is given, but packing is megatron", f"set {only}, or choose another packing")
    if config.stopping != "repeat":
        yield Fault("stopping", f"{config.stopping} is given, but packing is megatron", "set repeat")
    if config.weigh_by != "tokens":
        yield Fault("weigh_by", f"{config.weigh_by} is given, but packing is megatron", "set tokens")
