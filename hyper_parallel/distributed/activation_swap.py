"""Swap: what a block saves for its backward pass waits in host memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

SPAN = "activation swap: to host"
"""What a profile shows each copy to host memory as."""


def swapping(block: nn.Module) -> Callable[..., Any]:
    """The forward of `block`, with the floating-point tensors that it saves in host memory until they are needed.

    torch.autograd.graph.save_on_cpu moves every saved tensor by itself, weights too, and loses the strides that a
    compiled graph relies on. Here weights and what all blocks share (rotary tables) stay, and memory that several saved
    tensors look at moves once. Copies are queued behind the computation on its stream, to and from pinned memory.
    """
    forward = block.forward

    def swapped(*args: Any, **kwargs: Any) -> Any:
        shared = {_memory(leaf) for leaf in tree_leaves((args, kwargs)) if _is_shared(leaf)}
        # Keys hold no memory, and as long as they are there no other memory takes their place.
        copies: dict[tuple[StorageWeakRef, int], _HostCopy] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor | _Swapped:
            memory = _memory(tensor)
            if memory in shared or not tensor.is_floating_point():
                return tensor
            key = (memory, tensor._version)
            if key not in copies:
                # Asked anew each time: modules within the block may gather weights of their own.
                if any(memory == _memory(state) for state in _states(block)):
                    return tensor
                copies[key] = _HostCopy(tensor.untyped_storage())
            return _Swapped(copies[key], tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride())

        with saved_tensors_hooks(pack, _unpack):
            return forward(*args, **kwargs)

    return swapped


class _HostCopy:
    """The bytes of a storage in host memory."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._device = storage.device
        self._back: weakref.ref[torch.Tensor] | None = None
        with torch.profiler.record_function(SPAN):
            source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            self._host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type != "cpu")
            self._host.copy_(source, non_blocking=True)

    def on_device(self) -> torch.Tensor:
        """The bytes where they came from: brought once for all that look at them at the same time."""
        tensor = None if self._back is None else self._back()
        if tensor is None:
            tensor = self._host.to(self._device, non_blocking=True)
            self._back = weakref.ref(tensor)
        return tensor


class _Swapped(NamedTuple):
    """A saved tensor: a view of bytes in host memory."""

    copy: _HostCopy
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


def _unpack(packed: torch.Tensor | _Swapped) -> torch.Tensor:
    if isinstance(packed, torch.Tensor):
        return packed
    bytes_ = packed.copy.on_device()
    return bytes_.view(packed.dtype).as_strided(packed.size, packed.stride, packed.offset)


def _memory(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


@torch.no_grad()
def _states(block: nn.Module) -> list[torch.Tensor]:
    """Parameters and buffers of `block` as they are now on this rank."""
    states = (*block.parameters(), *block.buffers())
    return [state.to_local() if hasattr(state, "to_local") else state for state in states]


def _is_shared(argument: Any) -> bool:
    """Whether `argument` is a tensor that all blocks are given, and not what the one before has made."""
    return isinstance(argument, torch.Tensor) and not argument.requires_grad
