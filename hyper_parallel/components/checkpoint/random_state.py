"""The random generators of a process."""

from __future__ import annotations

import pickle
import random

import numpy as np

from hyper_parallel.platform import get_platform


def random_state() -> bytes:
    """The state of every generator: the platform's, Python's and numpy's."""
    return pickle.dumps((get_platform().rng_state(), random.getstate(), np.random.get_state()))


def set_random_state(state: bytes) -> None:
    """Takes up what `random_state` gave."""
    platform_state, python_state, numpy_state = pickle.loads(state)
    get_platform().set_rng_state(platform_state)
    random.setstate(python_state)
    np.random.set_state(numpy_state)
