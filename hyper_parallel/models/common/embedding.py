"""Embedding of tokens, and its reuse as the output matrix."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from hyper_parallel.protocols.initializer import Normal
from hyper_parallel.protocols.module import Module


class Embedding(Module):
    """A vector per token id."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Sizes of the table."""

        vocab_size: int
        """Rows of the table."""
        hidden_size: int
        """Size of each vector."""
        init_std: float = 0.02
        """Standard deviation of the first values."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.config: Embedding.Config = config
        self.add_parameter(
            "weight", config.vocab_size, config.hidden_size, role="embedding", init=Normal(config.init_std)
        )

    def forward(self, input_ids_BT: torch.Tensor) -> torch.Tensor:
        return F.embedding(input_ids_BT, self.weight)


class WholeVocabulary(Module):
    """Where the logits of all rows of the vocabulary are together: a module, so that a plan may bring them there."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Size of the vocabulary."""

        vocab_size: int
        """Rows of the output matrix."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.config: WholeVocabulary.Config = config

    def forward(self, logits_BTV: torch.Tensor) -> torch.Tensor:
        return logits_BTV


class TiedHead:
    """An embedding seen as the output matrix. It owns nothing, so a tied weight exists, and is counted, once."""

    def __init__(self, embedding: Embedding) -> None:
        self.embedding = embedding

    @property
    def weight(self) -> torch.Tensor:
        """[V, D], the embedding's own parameter."""
        return self.embedding.weight

    def __call__(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden_BTD, self.weight)
