"""Environment variables that accelerators read when torch loads them, or when the first collective starts."""

from __future__ import annotations

import ctypes
import importlib.util
import os


def prepare_environment(*, deterministic: bool = False, timeout_seconds: int | None = None) -> dict[str, str]:
    """Sets what the user has not set, and returns what this call set.

    Front doors call it with no argument before torch is imported, and once more with the configured values before
    the first collective. It imports no framework and may be called any number of times.
    """
    requested = os.environ.get("HYPER_PARALLEL_DEVICE", "auto")
    has_torch_npu = importlib.util.find_spec("torch_npu") is not None
    use_npu = has_torch_npu and requested in ("auto", "npu") and _cann_is_loadable()

    wanted: dict[str, str] = {}
    if has_torch_npu and not use_npu:
        # torch imports torch_npu by itself, and `import torch` fails where torch_npu finds no CANN.
        wanted["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    ranks_on_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if ranks_on_node > 1:
        # Otherwise every rank starts as many threads as the node has cores.
        wanted["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // ranks_on_node))

    if use_npu:
        wanted["PYTORCH_NPU_ALLOC_CONF"] = "expandable_segments:True"
        # HCCL waits 120 s by default for the slowest rank of the job to connect: too short for a cold start.
        wanted["HCCL_CONNECT_TIMEOUT"] = "1200"
        if timeout_seconds is not None:
            # The device must give up before the host does, or the host reports the time-out without a cause.
            wanted["HCCL_EXEC_TIMEOUT"] = str(max(1, timeout_seconds * 9 // 10))
        if deterministic:
            wanted |= {"HCCL_DETERMINISTIC": "true", "CLOSE_MATMUL_K_SHIFT": "1"}
    elif requested in ("auto", "cuda"):
        if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name of the same variable
            wanted["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        if deterministic:
            wanted["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"

    new = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(new)
    return new


def _cann_is_loadable() -> bool:
    """Whether the loader finds CANN's collective library, the first one that torch_npu needs."""
    try:
        ctypes.CDLL("libhccl.so")
    except OSError:
        return False
    return True
