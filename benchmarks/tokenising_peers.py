"""What `data_tools prepare` is compared with: python -m benchmarks.tokenising_peers PEER FILE TOKENIZER FOLDER

Each tokenises the field `text` of a file of JSON lines, on two processors.
"""

from __future__ import annotations

import json
import os
import sys
from itertools import islice
from pathlib import Path

BATCH = 64


def raw(file: Path, tokenizer_folder: Path, folder: Path) -> None:
    """The library tokenizers alone, on its own threads, in its faster way, without offsets; nothing is kept."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    with file.open(encoding="utf-8") as lines:
        while batch := [json.loads(line)["text"] for line in islice(lines, BATCH)]:
            for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
                encoding.ids  # noqa: B018 (the ids are made when they are asked for)


def datasets_map(file: Path, tokenizer_folder: Path, folder: Path) -> None:
    """`datasets.map` with transformers' tokenizer, as its documentation shows it, into its Arrow cache."""
    import datasets
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)

    def encode(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"input_ids": tokenizer(rows["text"], add_special_tokens=False)["input_ids"]}

    data = datasets.load_dataset("json", data_files=str(file), split="train", cache_dir=str(folder))
    data.map(encode, batched=True, batch_size=BATCH, num_proc=2, remove_columns=data.column_names)


if __name__ == "__main__":
    os.environ["RAYON_NUM_THREADS"] = "2"
    globals()[sys.argv[1]](*map(Path, sys.argv[2:]))
