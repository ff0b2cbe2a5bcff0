"""Processes that prepare data, in the way of `torch.utils.data.DataLoader`."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from hyper_parallel.config.errors import ConfigError


def worker_options(num_workers: int, prefetch: int) -> dict[str, Any]:
    """Arguments of a DataLoader for so many processes, each of which prepares `prefetch` items ahead; 0: none."""
    # Without a generator of its own it would draw from torch's global one, and so change what is trained.
    alone = {"num_workers": num_workers, "generator": torch.Generator()}
    if not num_workers:
        return alone
    # Not forked from this process: that copies locks which its other threads hold, for ever, and the device's driver.
    # The server that they are forked from has one thread, and imports what they need once for all of them.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", "hyper_parallel.components.data.loader"])
    return alone | {
        "prefetch_factor": prefetch,
        "multiprocessing_context": context,
        "worker_init_fn": _follow_the_trainer,
    }


def iterate(loader: DataLoader[Any]) -> Iterator[Any]:
    """The items of `loader`, whose processes start now.

    Raises:
        ConfigError: the data set cannot be sent to them.
    """
    try:
        return iter(loader)
    except (pickle.PicklingError, AttributeError, TypeError) as error:  # what pickle raises, by kind of object
        if not loader.num_workers:
            raise
        raise ConfigError.one(
            "dataloader.num_workers",
            f"{loader.num_workers} processes, but the data cannot be sent to them ({error})",
            "give 0, or sources and transforms that can be pickled",
        ) from error


def _follow_the_trainer(worker: int) -> None:
    # Ctrl-C reaches every process of a terminal, and the trainer may still want data for the step it finishes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # torch's own watch is on the server, which stays for as long as a worker does.
    threading.Thread(target=_end_with_the_trainer, name="trainer-watch", daemon=True).start()


def _end_with_the_trainer() -> None:
    trainer = multiprocessing.parent_process()
    assert trainer is not None, "a worker was started by somebody"
    trainer.join()
    os._exit(1)
