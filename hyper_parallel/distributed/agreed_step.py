"""A step after which all ranks do what one of them found to be due."""

from __future__ import annotations

import itertools

import torch.distributed as dist


class AgreedStep:
    """Ranks that look at a clock, or are sent a signal, do so at different moments. What follows must happen on all of
    them after the same step.

    Ranks share a step's collectives, so none is in the step after the next while another has not ended this one. A step
    that is named before the collectives of the next one are begun is therefore known to all when that one has ended. No
    collective of its own, one question to the process group's store at each step. Ranks make these objects in the same
    order.
    """

    _made = itertools.count()

    def __init__(self) -> None:
        # The store may outlive a run, and what the last one asked for is nothing to the next.
        self._number, self._asked = next(self._made), 0
        self._agreed: int | None = None
        self._store = dist.distributed_c10d._get_default_store() if dist.is_initialized() else None

    def request(self, step: int) -> None:
        """To be called between the end of `step` and asking whether it is `due`: asks for this step (in a process by
        itself), or for the next one. The first request of any rank counts."""
        if self._store is None:
            self._agreed = step
        else:
            self._store.compare_set(self._key, "", str(step + 1))

    def due(self, step: int) -> bool:
        """Whether `step`, which has just ended, is the agreed one; if so, the next request is for another. Every rank
        asks once after every step."""
        if self._store is not None and self._agreed is None and self._store.check([self._key]):
            self._agreed = int(self._store.get(self._key))
        if self._agreed != step:
            return False
        self._agreed = None
        self._asked += 1
        return True

    @property
    def _key(self) -> str:
        return f"hyper_parallel/agreed/{self._number}/{self._asked}"
