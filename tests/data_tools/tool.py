"""The command line, and a tokenizer whose ids are known: the text "5 0 6" has the ids [5, 0, 6]."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

from hyper_parallel.components.data.indexed import IndexedDataset

EOS = 1000


def run_tool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hyper_parallel.data_tools", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def number_tokenizer(folder: Path, **config) -> Path:
    folder.mkdir()
    vocabulary = {str(number): number for number in range(EOS)} | {"<eos>": EOS}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"} | config)
    )
    return folder


def text_of(ids: Iterable[int]) -> str:
    return " ".join(map(str, ids))


def write_lines(path: Path, documents: Sequence[Iterable[int]]) -> Path:
    path.write_text("".join(json.dumps({"text": text_of(ids)}) + "\n" for ids in documents))
    return path


def documents_of(prefix: Path) -> list[list[int]]:
    return [document.tolist() for document in IndexedDataset(prefix)]


def pair_of(prefix: Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()
