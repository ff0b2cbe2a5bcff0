"""The text and the tokenizer that travel with the package, for training offline; README.md has their origin."""

from pathlib import Path

_FOLDER = Path(__file__).parent

CORPUS_FILES = {
    "train": _FOLDER / "corpus" / "shakespeare.train.jsonl.gz",
    "validation": _FOLDER / "corpus" / "shakespeare.valid.jsonl.gz",
}
"""JSON lines with a field `text`, one scene or poem each, by split."""

TOKENIZER_FOLDER = _FOLDER / "tokenizer"
"""`tokenizer.json` and `tokenizer_config.json`."""
