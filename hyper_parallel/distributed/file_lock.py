"""Locks on files, which the system takes back when their holder ends, however it ends."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

logger = logging.getLogger(__name__)

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP}


def lock(take: Callable[[IO[Any], int], None], file: IO[Any], operation: int) -> bool:
    """Takes a lock; False: another process has it, and `operation` is not to wait. A file system without locks gives a
    warning, and what they are for goes on.

    Args:
        take: fcntl.lockf (of this process) or fcntl.flock (of what has the file open, children included).

    Raises:
        OSError: the file cannot be locked.
    """
    try:
        take(file, operation)
    except (BlockingIOError, PermissionError):  # POSIX has either
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        place = Path(file.name).parent
        logger.warning("%s cannot be locked (%s): see that no other process writes or removes it", place, error)
    return True
