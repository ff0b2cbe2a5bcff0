"""ChunkedCausalLMLoss: the mean cross entropy of a model that is never asked for all of its logits."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hyper_parallel.components.loss import IGNORE_INDEX, BaseLoss, ChunkedCELoss
from hyper_parallel.config.errors import ConfigError, Fault, raise_faults


class ChunkedCausalLMLoss(nn.Module):
    """ModelOutputLoss, with the logits of one chunk of tokens at a time."""

    def __init__(self, chunk_size: int = 1024, ignore_index: int = IGNORE_INDEX) -> None:
        """`chunk_size`: tokens in a chunk.

        Raises:
            ConfigError: a chunk has no token, or `ignore_index` is not -100, which the data path writes.
        """
        super().__init__()
        faults = []
        if chunk_size < 1:
            faults.append(Fault("loss.chunk_size", f"{chunk_size} is below 1", "give 1 or more"))
        if ignore_index != IGNORE_INDEX:
            faults.append(Fault("loss.ignore_index", f"{ignore_index} is not {IGNORE_INDEX}", "leave it out"))
        raise_faults(faults)
        self._chunk_size = chunk_size
        self._loss_sum: BaseLoss | None = None

    def bind_model(self, model: Any, distributed_setup: Any) -> None:
        """Makes the loss for the model's vocabulary.

        Raises:
            ConfigError: the model computes no loss by itself.
        """
        del distributed_setup
        if not isinstance(getattr(model, "vocab_size", None), int):
            fact = f"{type(model).__name__} has no vocab_size, so it is no model that takes a loss_fn"
            raise ConfigError.one("loss", fact, "give a BaseModel, or hyper_parallel.components.loss.CrossEntropyLoss")
        self._loss_sum = ChunkedCELoss.Config(chunk_tokens=self._chunk_size).build(vocab_size=model.vocab_size)

    def prepare_model_inputs(self, model_inputs: dict[str, Any], loss_inputs: dict[str, Any]) -> dict[str, Any]:
        """Has the model compute the loss in the place of logits."""
        del loss_inputs
        assert self._loss_sum is not None, "bind_model comes first"
        return {**model_inputs, "loss_fn": self._loss_sum}

    def forward(self, *, model_output: Any, labels: Tensor | None) -> Tensor:
        """The mean over the valid tokens; 0 without one."""
        del labels
        return model_output.loss_sum / model_output.valid_token_count.clamp(min=1)
