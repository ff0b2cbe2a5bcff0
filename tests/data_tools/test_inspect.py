from __future__ import annotations

from tests.components.data.indexed.pairs import write_pair
from tests.data_tools.tool import number_tokenizer, run_tool


def test_the_first_documents_are_printed(tmp_path):
    prefix = write_pair(tmp_path / "data", [[1, 2, 3], [], [7], [8]])
    result = run_tool("inspect", prefix, "--tokens", "2", "--tokenizer", number_tokenizer(tmp_path / "tokenizer"))
    assert result.returncode == 0
    assert result.stdout.splitlines() == [
        f"{prefix}: 4 documents, 3 sequences, 5 tokens of int32",
        "document 0: 3 tokens: 1 2 and 1 more",
        "  '1 2'",
        "document 1: 0 tokens: ",
        "  ''",
        "document 2: 1 tokens: 7",
        "  '7'",
    ]


def test_chosen_documents_are_printed(tmp_path):
    prefix = write_pair(tmp_path / "data", [[1, 2, 3], [7], [8]])
    result = run_tool("inspect", prefix, "--documents", "2", "0")
    assert result.stdout.splitlines()[1:] == ["document 2: 1 tokens: 8", "document 0: 3 tokens: 1 2 3"]
    result = run_tool("inspect", prefix, "--documents", "3")
    assert result.returncode == 2
    assert result.stderr == f"--documents: 3 is no document of {prefix}; give numbers below 3\n"
