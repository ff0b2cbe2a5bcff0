"""Trains the embedded tokenizer on the training split of the embedded corpus; the same bytes every time.

python -m hyper_parallel.assets.build_tokenizer [FOLDER]
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

from hyper_parallel.assets import CORPUS_FILES, TOKENIZER_FOLDER

VOCAB_SIZE = 4096
EOS_TOKEN = "<|endoftext|>"
PAD_TOKEN = "<|pad|>"


def build_tokenizer(folder: Path) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json` of a byte-level BPE tokenizer into `folder`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    with gzip.open(CORPUS_FILES["train"], "rt", encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines]

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # All 256 bytes are in the alphabet, so every text can be encoded and no unknown token is needed.
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[EOS_TOKEN, PAD_TOKEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS_TOKEN,
        "pad_token": PAD_TOKEN,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    build_tokenizer(Path(sys.argv[1]) if len(sys.argv) > 1 else TOKENIZER_FOLDER)
