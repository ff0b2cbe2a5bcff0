from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.components.data.indexed.pairs import write_pair
from tests.data_tools.tool import number_tokenizer, run_tool


def test_what_a_pair_holds_is_counted(tmp_path):
    prefix = write_pair(tmp_path / "data", [[1, 2, 3], [], [999]], np.uint16)
    result = run_tool("validate", prefix, "--tokenizer", number_tokenizer(tmp_path / "tokenizer"))
    assert result.returncode == 0
    assert result.stdout == f"{prefix}: 3 documents (1 empty), 2 sequences, 4 tokens of uint16, largest id 999\n"


def test_ids_beyond_the_vocabulary_are_named(tmp_path):
    prefix = write_pair(tmp_path / "data", [[1, 2, 3], [], [7, 999]], np.uint16)
    result = run_tool("validate", prefix, "--vocab-size", "999")
    assert result.returncode == 2
    assert result.stderr == (
        f"{prefix}.bin: holds the token id 999 in document 2, outside of a vocabulary of 999; prepare the data with "
        "the tokenizer of the model\n"
    )
    negative = write_pair(tmp_path / "negative", [[1], [2, -3]])
    assert "holds the token id -3 in document 1, outside of a vocabulary of any size" in run_tool(
        "validate", negative
    ).stderr  # fmt: skip


def test_a_damaged_pair_is_refused(tmp_path):
    prefix = write_pair(tmp_path / "data", [[1, 2, 3]])
    Path(f"{prefix}.bin").write_bytes(bytes(8))
    result = run_tool("validate", prefix)
    assert result.returncode == 2
    assert result.stderr == (
        f"{prefix}.bin: has 8 bytes, but {prefix}.idx says 12 bytes of int32; prepare the data anew, or copy both "
        "files again\n"
    )
