"""Losses: sums over trained tokens. What they are divided by belongs to the step, which alone knows all its tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from hyper_parallel.config.configurable import Configurable
from hyper_parallel.config.errors import Fault
from hyper_parallel.config.sections import at_least
from hyper_parallel.distributed.reductions import all_reduce_sum, gathered, summed
from hyper_parallel.protocols.redistribute import largest_part

IGNORE_INDEX = -100
"""Label of a token that is not trained."""

CPU_CHUNK_TOKENS = 256
"""The fastest chunk on CPUs for vocabularies of 4,096 to 32,768: smaller ones read the weight too often."""


class LMHead(Protocol):
    """The output projection: hidden states to logits, linear and without bias."""

    weight: Tensor
    """[V, D]."""

    def __call__(self, hidden_BTD: Tensor) -> Tensor: ...


class BaseLoss(Configurable, ABC):
    """``loss(hidden_BTD, lm_head, labels_BT)`` is the sum of the loss over all tokens whose label is not -100.

    It takes hidden states and the head, not logits, so that an implementation may do without the whole of the logits.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Base of every loss's Config."""

    ignore_index = IGNORE_INDEX
    spreads_vocabulary: ClassVar[bool] = False
    """Whether it also computes from a part of the vocabulary on each rank, see `spread_over`."""

    def __init__(self, config: Configurable.Config, *, vocab_size: int) -> None:
        self.config = config
        self.vocab_size = vocab_size
        self.vocab_group: dist.ProcessGroup | None = None
        self.own_rows = range(vocab_size)
        """The rows of the vocabulary that heads have on this rank."""

    def spread_over(self, vocab_group: dist.ProcessGroup | None) -> None:
        """From now on a head has this rank's rows of the vocabulary alone, `own_rows`, in the order of the ranks of the
        group. The last ranks have fewer where it does not divide.

        The loss is then the same on all of them, and each has its summand of the hidden states' gradient.
        """
        self.vocab_group = vocab_group
        if vocab_group is not None:
            part = largest_part(self.vocab_size, dist.get_world_size(vocab_group))
            first = dist.get_rank(vocab_group) * part
            self.own_rows = range(first, min(first + part, self.vocab_size))

    def model_inputs(self, batch: dict[str, Any]) -> dict[str, Any]:
        """All arguments of the model's forward: those of `batch`, and what has this loss computed inside."""
        return {**batch, "loss_fn": self}

    def evaluating(self) -> AbstractContextManager[None]:
        """What is computed within is measured, not trained."""
        return nullcontext()

    @abstractmethod
    def __call__(self, hidden_BTD: Tensor, lm_head: LMHead, labels_BT: Tensor) -> Tensor:
        """Sum over the valid tokens.

        Args:
            hidden_BTD: what the head takes, [B, T, D].
            lm_head: the output projection, with `weight` [V, D]; after `spread_over` this rank's rows of it.
            labels_BT: int64 [B, T], aligned with the logits (already shifted), -100 where there is nothing to learn.

        Returns:
            A scalar, at least float32: 0 with zero gradients where no label is valid.
        """


class CrossEntropyLoss(BaseLoss):
    """Cross entropy of the whole logits at once, in float32 or wider."""

    spreads_vocabulary = True

    def __call__(self, hidden_BTD: Tensor, lm_head: LMHead, labels_BT: Tensor) -> Tensor:
        logits_NV = _wide(lm_head(hidden_BTD).flatten(0, 1))
        if self.vocab_group is None:
            return F.cross_entropy(logits_NV, labels_BT.flatten(), reduction="sum", ignore_index=self.ignore_index)
        labels_N = labels_BT.flatten()
        is_valid_N = labels_N != IGNORE_INDEX
        place_N1, is_own_N1 = _own_places(labels_N, self.own_rows)
        target_N = summed(logits_NV.gather(1, place_N1).where(is_own_N1, 0).squeeze(1), self.vocab_group)
        normaliser_N = gathered(logits_NV.logsumexp(1)[None], self.vocab_group).logsumexp(0)
        return (normaliser_N - target_N).where(is_valid_N, 0).sum()


class CausalLMLoss(CrossEntropyLoss):
    """Cross entropy of the next token. Labels come shifted already, so this is CrossEntropyLoss by its other name."""

    @dataclass(kw_only=True, slots=True)
    class Config(CrossEntropyLoss.Config):
        """What is not trained."""

        ignore_index: Literal[-100] = IGNORE_INDEX
        """Label of a token that is not trained. The data path writes -100, so it can be no other."""


class ChunkedCELoss(BaseLoss):
    """Cross entropy a chunk of tokens at a time: the logits of one chunk are all that ever exist.

    The gradients of hidden states and weight are computed with the loss, chunk by chunk, in the forward pass. They are
    those of CrossEntropyLoss; the weight's is summed over chunks in float32 or wider.
    """

    spreads_vocabulary = True

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        """How large a chunk is."""

        chunk_tokens: int | None = None
        """Tokens in a chunk. None: as many as keep its logits in `chunk_bytes`, and on a CPU no more than its caches
        hold."""
        chunk_bytes: int = 256 * 2**20
        """Size of a chunk's float32 logits when `chunk_tokens` is not given; peak memory is about three times that."""

        def faults(self) -> Iterator[Fault]:
            yield from at_least(self, 1, "chunk_tokens", "chunk_bytes")

    def __init__(self, config: Config, *, vocab_size: int) -> None:
        super().__init__(config, vocab_size=vocab_size)
        self._given_tokens = config.chunk_tokens
        self._tokens_in_bytes = max(1, config.chunk_bytes // (4 * vocab_size))

    def chunk_tokens(self, device: torch.device) -> int:
        """Tokens in a chunk on `device`."""
        most = min(self._tokens_in_bytes, CPU_CHUNK_TOKENS) if device.type == "cpu" else self._tokens_in_bytes
        return self._given_tokens or most

    def __call__(self, hidden_BTD: Tensor, lm_head: LMHead, labels_BT: Tensor) -> Tensor:
        """As BaseLoss. The head's `weight` is used, not its forward.

        Raises:
            ValueError: the head has a bias, which would be left out.
        """
        if getattr(lm_head, "bias", None) is not None:
            raise ValueError(
                "ChunkedCELoss multiplies by lm_head.weight alone; use CrossEntropyLoss for a head with bias"
            )
        return _ChunkedCrossEntropy.apply(
            hidden_BTD.flatten(0, 1),
            lm_head.weight,
            labels_BT.flatten(),
            self.chunk_tokens(hidden_BTD.device),
            torch.is_grad_enabled(),
            self.own_rows,
            self.vocab_group,
        )


class AutoCELoss(BaseLoss):
    """Cross entropy by the implementation that fits the vocabulary; the number is the same."""

    spreads_vocabulary = True

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        """Where chunks begin to pay."""

        chunk_from_vocab: int = 4096
        """ChunkedCELoss from this many vocabulary entries on, CrossEntropyLoss below."""

        def faults(self) -> Iterator[Fault]:
            yield from at_least(self, 1, "chunk_from_vocab")

    def __init__(self, config: Config, *, vocab_size: int) -> None:
        super().__init__(config, vocab_size=vocab_size)
        chosen = ChunkedCELoss if vocab_size >= config.chunk_from_vocab else CrossEntropyLoss
        self.implementation: BaseLoss = chosen.Config().build(vocab_size=vocab_size)

    def spread_over(self, vocab_group: dist.ProcessGroup | None) -> None:
        self.implementation.spread_over(vocab_group)

    def __call__(self, hidden_BTD: Tensor, lm_head: LMHead, labels_BT: Tensor) -> Tensor:
        return self.implementation(hidden_BTD, lm_head, labels_BT)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of cross entropy over valid tokens; its gradients are made in forward and scaled in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
        chunk_tokens: int,
        grad_enabled: bool,
        own_rows: range,
        vocab_group: dist.ProcessGroup | None,
    ) -> Tensor:
        # needs_input_grad looks at the inputs only: validation under no_grad would pay for gradients it drops.
        needs_hidden = grad_enabled and ctx.needs_input_grad[0]
        needs_weight = grad_enabled and ctx.needs_input_grad[1]
        wide = torch.promote_types(hidden_ND.dtype, torch.float32)
        loss_sum = torch.zeros((), dtype=wide, device=hidden_ND.device)
        grad_hidden_ND = torch.empty_like(hidden_ND) if needs_hidden else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=wide) if needs_weight else None
        # The chunks share their memory: allocated anew, it would be cold, and on a CPU mapped page by page.
        logits_CV = hidden_ND.new_empty(min(chunk_tokens, hidden_ND.shape[0]), weight_VD.shape[0])
        log_p_CV = torch.empty_like(logits_CV, dtype=wide)
        for begin in range(0, hidden_ND.shape[0], chunk_tokens):
            chunk = slice(begin, begin + chunk_tokens)
            hidden_CD = hidden_ND[chunk]
            logits_CV, log_p_CV = logits_CV[: hidden_CD.shape[0]], log_p_CV[: hidden_CD.shape[0]]
            valid_C1 = (labels_N[chunk] != IGNORE_INDEX).unsqueeze(1)
            targets_C1, is_own_C1 = _own_places(labels_N[chunk], own_rows)
            torch.mm(hidden_CD, weight_VD.T, out=logits_CV)
            torch.log_softmax(logits_CV, dim=1, dtype=wide, out=log_p_CV)
            if vocab_group is not None:  # from a softmax of the own part to one of the whole vocabulary
                own_C1 = logits_CV.to(wide).logsumexp(1, keepdim=True)
                log_p_CV += own_C1 - gathered(own_C1[None], vocab_group).logsumexp(0)
            loss_sum -= log_p_CV.gather(1, targets_C1).where(is_own_C1, 0).sum()
            if not (needs_hidden or needs_weight):
                continue
            # d loss / d logits = softmax - one_hot, in the memory of the logarithms.
            wide_grad_CV = log_p_CV.exp_()
            wide_grad_CV.scatter_add_(1, targets_C1, -is_own_C1.to(wide))
            wide_grad_CV.masked_fill_(~valid_C1, 0)
            grad_CV = wide_grad_CV if wide == hidden_ND.dtype else logits_CV.copy_(wide_grad_CV)
            if grad_hidden_ND is not None:
                torch.mm(grad_CV, weight_VD, out=grad_hidden_ND[chunk])
            if grad_weight_VD is not None:
                if grad_weight_VD.dtype == grad_CV.dtype:
                    grad_weight_VD.addmm_(grad_CV.T, hidden_CD)
                else:
                    grad_weight_VD += grad_CV.T @ hidden_CD
        ctx.save_for_backward(grad_hidden_ND, grad_weight_VD)
        ctx.weight_dtype = weight_VD.dtype
        return all_reduce_sum(loss_sum, vocab_group)

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        # Under create_graph=True autograd would take these gradients for constants and go on, wrongly.
        if torch.is_grad_enabled():
            raise RuntimeError(
                "ChunkedCELoss has no second derivative (create_graph=True); use CrossEntropyLoss for one"
            )
        grad_hidden_ND, grad_weight_VD = ctx.saved_tensors
        # In place: a second copy of the weight's gradient would be the largest tensor of the pass. Not if the graph is
        # kept for a second pass, as a pipeline does that computes gradients of inputs first and of weights later.
        scale = torch.mul if torch._C._autograd._get_current_graph_task_keep_graph() else Tensor.mul_
        grad_hidden = scale(grad_hidden_ND, grad_loss) if ctx.needs_input_grad[0] else None
        grad_weight = scale(grad_weight_VD, grad_loss).to(ctx.weight_dtype) if ctx.needs_input_grad[1] else None
        return grad_hidden, grad_weight, None, None, None, None, None


def _own_places(labels_N: Tensor, own_rows: range) -> tuple[Tensor, Tensor]:
    """Where the label of each token stands in this rank's rows of the vocabulary, and whether it does; [N, 1] each.

    A label that is elsewhere, or -100, has place 0.
    """
    place_N1 = labels_N.unsqueeze(1) - own_rows.start
    is_own_N1 = (place_N1 >= 0) & (place_N1 < len(own_rows)) & (labels_N != IGNORE_INDEX).unsqueeze(1)
    return place_N1.where(is_own_N1, 0), is_own_N1


def _wide(logits: Tensor) -> Tensor:
    """At least float32: softmax over a large vocabulary needs more digits than bfloat16 has."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
