"""From text to batches: sources -> documents -> packing (in the epoch's order) -> collate -> loader."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hyper_parallel.components.data.loader import BaseDataLoader, TextDataLoader

__all__ = ["BaseDataLoader", "TextDataLoader"]


def __getattr__(name: str) -> Any:
    # Only a loader needs torch: what prepares and reads data on disk starts without it.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hyper_parallel.components.data import loader

    return getattr(loader, name)
