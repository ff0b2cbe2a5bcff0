"""The bytes of a pair ``PREFIX.bin``, ``PREFIX.idx``, as Megatron-LM defines them (little endian, no padding).

``PREFIX.bin`` is the token ids of all sequences, back to back. ``PREFIX.idx``, for S sequences and D - 1 documents:

====== =========== ==============================================================
offset type        field
====== =========== ==============================================================
0      9 bytes     magic
9      uint64      version
17     uint8       code of the tokens' dtype
18     uint64      S
26     uint64      D
34     int32[S]    tokens of each sequence
+4S    int64[S]    byte offset of each sequence in the .bin
+12S   int64[D]    sequences before each document's end; the first entry is 0
+8D    int8[S]     mode of each sequence; only in multimodal data, and no flag says so
====== =========== ==============================================================
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")

DTYPES: dict[int, np.dtype[Any]] = {
    code: np.dtype(name).newbyteorder("<")
    for code, name in enumerate(("u1", "i1", "i2", "i4", "i8", "f8", "f4", "u2"), start=1)
}
"""Code in the header to dtype of the tokens."""


class PairPaths(NamedTuple):
    """The two files of a prefix."""

    bin: Path
    idx: Path


def pair_paths(prefix: str | Path) -> PairPaths:
    """Where the files of `prefix` are."""
    return PairPaths(Path(f"{prefix}.bin"), Path(f"{prefix}.idx"))


def dtype_code(dtype: Any) -> int:
    """The code of `dtype`.

    Raises:
        ValueError: the format has no code for it.
    """
    wanted = np.dtype(dtype).newbyteorder("<")
    for code, known in DTYPES.items():
        if known == wanted:
            return code
    raise ValueError(f"{np.dtype(dtype)} cannot be written; choose one of {', '.join(map(str, DTYPES.values()))}")


def smallest_dtype(vocab_size: int) -> np.dtype[Any]:
    """The dtype that Megatron's tools write for this vocabulary: uint16 below 65500 entries, else int32."""
    return np.dtype("<u2" if vocab_size < 65500 else "<i4")
