"""How a script ends whose configuration cannot be trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hyper_parallel.config.errors import ConfigError
from hyper_parallel.distributed.last_words import tell


class FrontDoorError(ConfigError, SystemExit):
    """Faults that are printed already. Uncaught, it ends the script with exit code 2, as the errors of argparse do."""

    code = 2


@contextmanager
def front_door() -> Iterator[None]:
    """Prints the faults of what is done within, one a line, and raises them as FrontDoorError."""
    try:
        yield
    except ConfigError as error:
        tell(error)
        raise FrontDoorError(error.faults) from None
