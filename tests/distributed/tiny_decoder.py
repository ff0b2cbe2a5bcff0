"""The smallest decoder that has what sharding can get wrong: blocks, norms, an embedding tied to the head or not."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from hyper_parallel.protocols.initializer import Constant, Normal
from hyper_parallel.protocols.model import BaseModel, ModelOutput
from hyper_parallel.protocols.module import Module

HIDDEN, VOCAB = 6, 21  # neither divides by 4 ranks


class Linear(Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        inputs: int
        outputs: int

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.add_parameter("weight", config.outputs, config.inputs, role="matrix", init=Normal(0.2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


class Norm(Module):
    def __init__(self) -> None:
        super().__init__(Module.Config())
        self.add_parameter("weight", HIDDEN, role="norm", init=Constant(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (HIDDEN,), self.weight)


class Embedding(Module):
    def __init__(self) -> None:
        super().__init__(Module.Config())
        self.add_parameter("weight", VOCAB, HIDDEN, role="embedding", init=Normal(0.5))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight)


class Block(Module):
    def __init__(self, dropout: float) -> None:
        super().__init__(Module.Config())
        self.norm, self.dropout = Norm(), dropout
        self.up = Linear(Linear.Config(inputs=HIDDEN, outputs=9))
        self.down = Linear(Linear.Config(inputs=9, outputs=HIDDEN))

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return x_BTD + F.dropout(self.down(F.silu(self.up(self.norm(x_BTD)))), self.dropout, self.training)


class TinyDecoder(BaseModel):
    vocab_size = VOCAB
    max_seq_len = 64

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        layers: int = 3
        tied: bool = False
        dropout: float = 0.0

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.embed = Embedding()
        self.layers = nn.ModuleList(Block(config.dropout) for _ in range(config.layers))
        self.norm = Norm()
        self.lm_head = Linear(Linear.Config(inputs=HIDDEN, outputs=VOCAB))
        if config.tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, input_ids_BT, *, position_ids_BT=None, cu_seqlens=None, labels_BT=None, loss_fn=None):
        hidden_BTD = self.embed(input_ids_BT)
        for block in self.layers:
            hidden_BTD = block(hidden_BTD)
        hidden_BTD = self.norm(hidden_BTD)
        if loss_fn is None:
            return ModelOutput(logits=self.lm_head(hidden_BTD))
        return ModelOutput(loss_sum=loss_fn(hidden_BTD, self.lm_head, labels_BT))

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)

    def flops_per_token(self, seq_len: int) -> float:
        return 0.0


def sum_loss(hidden_BTD: torch.Tensor, lm_head: nn.Module, labels_BT: torch.Tensor) -> torch.Tensor:
    """Sum of the cross entropy over labels other than -100."""
    return F.cross_entropy(lm_head(hidden_BTD).flatten(0, 1), labels_BT.flatten(), ignore_index=-100, reduction="sum")
