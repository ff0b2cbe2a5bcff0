"""The training that contenders do, and what they are given for it: text, the same text as rows, and first weights."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SEED = 42


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """qwen3_moe:debug on rows of Shakespeare; every contender has the same first weights and the same rows."""

    folder: str
    """Where the inputs lie, and where contenders may write."""
    dtype: str
    """Of parameters, gradients, optimizer state and activations: float32 or bfloat16."""
    rows: int
    """Rows of one step, which is one forward and backward pass."""
    row_tokens: int
    document_tokens: int | None = None
    """Mean length of documents, about: several stand in a row. None: the text is one document."""
    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    warmup_steps: int = 2
    """Of the learning rate, which then falls along a cosine."""

    @property
    def text(self) -> Path:
        """The text as our dataloader takes it."""
        return Path(self.folder) / ("text.txt" if self.document_tokens is None else "text.jsonl")

    @property
    def weights(self) -> Path:
        """A Hugging Face folder with config.json and the first weights."""
        return Path(self.folder) / "weights"

    @property
    def batches(self) -> Path:
        """The batches of all steps in order: a list as torch.save writes it."""
        return Path(self.folder) / "batches.pt"


def prepare(training: Training, steps: int) -> float:
    """Writes the inputs of `steps` steps; returns the mean number of documents in a row."""
    import torch

    from hyper_parallel.models import save_hf
    from hyper_parallel.models.qwen3_moe import create_model_spec

    Path(training.folder).mkdir(parents=True)
    _write_text(training, steps)
    model_config = create_model_spec("debug").model
    assert model_config is not None
    model = model_config.build()
    model.init_weights(SEED)
    save_hf(model, training.weights)

    batches = make_batches(training, steps)
    torch.save(batches, training.batches)
    return sum(len(batch["cu_seqlens"]) - 1 for batch in batches) / (steps * training.rows)


def make_batches(training: Training, steps: int) -> list[dict[str, Any]]:
    """The batches of `steps` steps in order, as our dataloader makes them of the text."""
    from hyper_parallel.components.data import TextDataLoader
    from hyper_parallel.components.tokenizer import HuggingFaceTokenizer

    loader = TextDataLoader.Config(path=str(training.text)).build(
        tokenizer=HuggingFaceTokenizer.Config().build(hf_assets_path=None),
        seq_len=training.row_tokens,
        micro_batch_size=training.rows,
        global_batch_size=training.rows,
        dp_rank=0,
        dp_size=1,
        seed=SEED,
    )
    batches = [next(loader)[0] for _ in range(steps)]
    loader.close()
    return batches


def _write_text(training: Training, steps: int) -> None:
    from hyper_parallel.assets import CORPUS_FILES

    with gzip.open(CORPUS_FILES["train"], "rt", encoding="utf-8") as corpus:
        text = "\n\n".join(json.loads(line)["text"] for line in corpus)
    # No more than is trained, and a margin: what a trainer takes to read a corpus is not the question here.
    text = text[: round(1.5 * steps * training.rows * training.row_tokens * CHARACTERS_PER_TOKEN)]
    if training.document_tokens is None:
        training.text.write_text(text, encoding="utf-8")
        return
    with training.text.open("w", encoding="utf-8") as file:
        for document in _documents(text, training.document_tokens):
            file.write(json.dumps({"text": document}) + "\n")


def _documents(text: str, mean_tokens: int) -> Iterator[str]:
    """Consecutive parts of `text`; lengths are even from an eighth of the mean to fifteen eighths."""
    lengths = random.Random(SEED)
    mean = mean_tokens * CHARACTERS_PER_TOKEN
    begin = 0
    while begin < len(text):
        end = begin + round(mean * lengths.uniform(1 / 8, 15 / 8))
        yield text[begin:end]
        begin = end


CHARACTERS_PER_TOKEN = 3.4
"""Of the embedded tokenizer on the embedded corpus, about."""
