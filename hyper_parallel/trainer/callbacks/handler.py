"""CallbackHandler: tells every callback of each moment, in order."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import ExitStack

from hyper_parallel.config.errors import RunError
from hyper_parallel.distributed.process_group import first_to_tell, rank
from hyper_parallel.trainer.callbacks.base import Callback, TrainerState
from hyper_parallel.trainer.errors import CallbackError

logger = logging.getLogger(__name__)


class CallbackHandler:
    """The callbacks of a trainer, in the order in which they are told of every moment."""

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        self._callbacks = list(callbacks)

    def __iter__(self) -> Iterator[Callback]:
        return iter(self._callbacks)

    def add(self, callback: Callback, state: TrainerState) -> None:
        """Puts `callback` behind all others and tells it that the trainer is built.

        Raises:
            TypeError: it is no Callback.
        """
        if not isinstance(callback, Callback):
            raise TypeError(f"{callback!r} is no callback; give an object of a class that derives from Callback")
        self._callbacks.append(callback)
        self._tell(callback, "on_init_end", state)

    def dispatch(self, moment: str, state: TrainerState) -> None:
        """Calls the method `moment` of every callback.

        Raises:
            CallbackError: one of them raised; those behind it are not called.
            RunError: as one of them raised it.
        """
        for callback in self._callbacks:
            self._tell(callback, moment, state)

    def close(self, state: TrainerState) -> None:
        """Closes all callbacks, the last one first, whatever the others raise.

        Raises:
            CallbackError: one of them raised.
        """
        with ExitStack() as ending:
            for callback in self._callbacks:
                ending.callback(self._tell, callback, "close", state)

    @staticmethod
    def _tell(callback: Callback, moment: str, state: TrainerState) -> None:
        try:
            method = getattr(callback, moment)
            method() if moment == "close" else method(state)
        except RunError:
            raise
        # A callback is the user's code: whatever it raises must end the run with its name, sys.exit() included, which
        # would leave the other ranks waiting.
        except (Exception, SystemExit) as error:
            raise failed_callback(type(callback).__name__, moment, state, error) from error


def failed_callback(name: str, moment: str, state: TrainerState, error: BaseException) -> CallbackError:
    """What to raise for `error`, whose traceback is logged, by the first rank that fails alone."""
    if first_to_tell():
        logger.error("the traceback of what ends the run:", exc_info=error)
    return CallbackError(name, moment, state.global_step, rank(), error)
