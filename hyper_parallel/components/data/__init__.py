"""From text to batches: sources -> documents -> packing (in the epoch's order) -> collate -> loader."""

from hyper_parallel.components.data.loader import BaseDataLoader, TextDataLoader

__all__ = ["BaseDataLoader", "TextDataLoader"]
