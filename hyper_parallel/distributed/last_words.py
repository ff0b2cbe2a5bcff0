"""How a run that fails ends: the first rank that fails says why, once, and every rank ends in bounded time."""

from __future__ import annotations

import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import torch.distributed as dist

from hyper_parallel.config import manager
from hyper_parallel.config.errors import ConfigError, RunError
from hyper_parallel.config.manager import LAST_WORD_SECONDS
from hyper_parallel.distributed.process_group import first_to_tell


class PeerLostError(RunError):
    """A collective failed, and not by this rank's doing."""

    def __init__(self, moment: str, cause: BaseException) -> None:
        text = re.match(r"(?:\[\S*gloo/\S*\] )?(.*?)(?:\. |\n|$)", str(cause)).group(1)  # type: ignore[union-attr]
        self.hangs = "timed out" in text.lower()
        """Whether the other rank has kept this one waiting, rather than ended."""
        if self.hangs:
            fact = "a collective waited longer than comm.timeout_seconds: another rank hangs, or takes longer"
            remedy = "look where it is (py-spy dump), or raise comm.timeout_seconds"
        else:
            fact = "another rank has ended without a word, killed or out of memory"
            remedy = "see what the launcher says of it; the run goes on from its last checkpoint when started again"
        super().__init__(f"{moment}: {fact} ({text}); {remedy}")

    @classmethod
    def of(cls, error: BaseException, moment: str) -> Self | None:
        """The error that tells of a lost peer in the place of `error`; None if that is something else.

        `moment`: when it happened, such as a step.
        """
        link: BaseException | None = error
        while link is not None:
            # Libraries of accelerators raise DistError; gloo a plain error that begins with its own file.
            if isinstance(link, dist.DistError) or "/gloo/" in str(link).partition("] ")[0]:
                return cls(moment, link)
            link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
        return None


@contextmanager
def lost_peers_at(moment: Callable[[], str]) -> Iterator[None]:
    """Raises PeerLostError, with the `moment` as it is then, for what a collective raises within."""
    try:
        yield
    except Exception as error:  # whatever has one of them for a cause
        if not isinstance(error, RunError) and (lost := PeerLostError.of(error, moment())):
            raise lost from error
        raise


def tell(error: BaseException) -> None:
    """Says on stderr why the run ends, if this is the first rank that fails; any other gives that one time to do so.

    Launchers end all ranks as soon as one has ended. Errors whose message is all that a user needs are shown without a
    traceback.
    """
    if isinstance(error, ConfigError) and not dist.is_initialized():
        manager.refuse(error)  # every rank has found the same
        return
    if not first_to_tell():
        time.sleep(LAST_WORD_SECONDS)
        return
    if not isinstance(error, (ConfigError, RunError)):
        error = PeerLostError.of(error, "while the run was set up") or error
    if isinstance(error, ConfigError):
        manager.report(error)
    elif isinstance(error, RunError):
        print(f"error: {error}", file=sys.stderr)
    else:
        traceback.print_exception(error)
    sys.stderr.flush()
    if isinstance(error, PeerLostError) and not error.hangs:
        time.sleep(LAST_WORD_SECONDS)  # a launcher takes the first to end for the cause


def leave(code: int) -> None:
    """Ends this process with `code`. A failed rank goes without cleaning up: the others may wait in a collective for
    good, and gloo aborts an interpreter that ends with its group open."""
    if code == 0:
        sys.exit(0)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_tool(action: Callable[[], int]) -> int:
    """What `action` returns, or the exit code of what it raises, which is told: how the tools for people end."""
    try:
        return action()
    except BrokenPipeError:  # `... | head`: the reader has seen enough
        os._exit(0)
    except (ConfigError, RunError) as error:
        failure: Exception = error
    except OSError as error:  # it names the file
        failure = RunError(str(error))
    tell(failure)
    return exit_code(failure)


def exit_code(error: BaseException) -> int:
    """2: a configuration that cannot train; 1: any other error."""
    return 2 if isinstance(error, ConfigError) else 1


def end_with(error_type: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """What `sys.excepthook` is while this process shares a run with others."""
    tell(error)
    leave(exit_code(error))
