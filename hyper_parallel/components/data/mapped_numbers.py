"""Arrays that lie in a file, for this process and its workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt


class MappedNumbers(np.ndarray):
    """Numbers of a file. A worker process is told how to map it too, so nothing is copied; of a part it gets a copy."""

    _again: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]] | None = None

    @classmethod
    def of(
        cls, numbers: npt.NDArray[Any], again: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
    ) -> MappedNumbers:
        """`numbers`, which another process gets by calling the function that `again` returns with its arguments."""
        mapped = numbers.view(cls)
        mapped._again = again
        return mapped

    def __reduce__(self) -> Any:
        return super().__reduce__() if self._again is None else self._again()
