"""Safetensors files written a tensor at a time: the library itself writes a file only from all its tensors at once.

The format: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

DTYPE_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
"""What safetensors calls the types that weights have."""


class TensorSpec(NamedTuple):
    """What a header says of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class SafetensorsWriter:
    """Writes `files` (name -> tensor name -> spec) into `folder`. Tensors must come in this order."""

    def __init__(self, folder: Path, files: Mapping[str, Mapping[str, TensorSpec]]) -> None:
        self._folder = folder
        self._files = files
        self._expected = iter([(file, name) for file, specs in files.items() for name in specs])
        self._stream: BinaryIO | None = None

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Appends `tensor`, which may be on any device."""
        file, expected = next(self._expected)
        spec = self._files[file][expected]
        assert (name, tuple(tensor.shape), tensor.dtype) == (expected, *spec), (
            f"{name} comes in the place of {expected}"
        )
        if name == next(iter(self._files[file])):
            self.close()
            self._stream = (self._folder / file).open("wb")
            self._stream.write(_header(self._files[file]))
        assert self._stream is not None
        self._stream.write(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())

    def close(self) -> None:
        """Ends the file that is being written."""
        if self._stream is not None:
            self._stream.close()


def _header(specs: Mapping[str, TensorSpec]) -> bytes:
    content: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers refuses files without it
    end = 0
    for name, spec in specs.items():
        start, end = end, end + spec.size_bytes
        content[name] = {"dtype": DTYPE_NAMES[spec.dtype], "shape": spec.shape, "data_offsets": [start, end]}
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data starts at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text
