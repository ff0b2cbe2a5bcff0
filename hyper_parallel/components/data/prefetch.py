"""Items prepared ahead by one background thread."""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

_JOIN_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class _End:
    """The last thing in the queue: why nothing follows."""

    error: BaseException


class BackgroundPrefetcher(Iterator[Any]):
    """The items of `items`, up to `depth` of them taken ahead of the consumer."""

    def __init__(self, items: Iterator[Any], depth: int) -> None:
        self._queue: queue.Queue[Any] = queue.Queue(depth)
        stop = threading.Event()
        # The thread knows nothing of this object, so a forgotten prefetcher is collected, and that stops the thread.
        thread = threading.Thread(target=_fill, args=(items, self._queue, stop), name="data-prefetch", daemon=True)
        self._close = weakref.finalize(self, _stop, thread, self._queue, stop)
        self._end: _End | None = None
        thread.start()

    def __next__(self) -> Any:
        """The next item. What `items` raised is raised here with its own traceback, in its place in the order."""
        if self._end is None:
            item = self._queue.get()
            if not isinstance(item, _End):
                return item
            self._end = item
        raise self._end.error

    def close(self) -> None:
        """Stops the thread and drops what it had prepared. Also happens by itself at garbage collection and exit."""
        self._end = self._end or _End(RuntimeError("the prefetcher is closed"))
        self._close()


def _fill(items: Iterator[Any], filled: queue.Queue[Any], stop: threading.Event) -> None:
    try:
        while not stop.is_set():
            filled.put(next(items))
    except BaseException as error:  # nothing is handled here: the consumer raises it, or would wait for ever
        filled.put(_End(error))


def _stop(thread: threading.Thread, filled: queue.Queue[Any], stop: threading.Event) -> None:
    stop.set()
    # An empty queue takes the one item or error that the thread may still put before it sees the event.
    while True:
        try:
            filled.get_nowait()
        except queue.Empty:
            break
    thread.join(_JOIN_SECONDS)
    if thread.is_alive():
        logger.warning("the data thread did not stop within %g s; it ends with the process", _JOIN_SECONDS)
