"""The numbers of one optimizer step, and rates over several."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """The numbers of one optimizer step, over all ranks."""

    step: int
    """Counted from 1."""
    loss: float
    grad_norm: float
    """Before clipping."""
    lr: float
    """Rate that the step was taken with."""
    tokens: int
    """Tokens of all rows of the step, on all ranks."""
    step_seconds: float
    """From asking for the batch to updated weights."""
    tokens_per_second: float
    """`tokens` / `step_seconds`."""
    data_seconds: float
    """Part of `step_seconds` spent waiting for the batch."""
    memory_bytes: int | None = None
    """Peak of this rank. None: not measurable."""
    mfu: float | None = None
    """Model FLOPs utilisation, 0 to 1 (Chowdhery et al., 2022, appendix B). None: the devices' peak is not known.
    MetricsProcessor fills it in."""
    extra: dict[str, float | None] = field(default_factory=dict)
    """What else is known of the step, by name, such as aux_loss or validation_loss."""

    def as_dict(self) -> dict[str, float | None]:
        """All numbers by name, in the order in which they are written; mfu only where it is known."""
        numbers: dict[str, float | None] = {
            "step": self.step,
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "lr": self.lr,
            "tokens": self.tokens,
            "step_seconds": self.step_seconds,
            "tokens_per_second": self.tokens_per_second,
            "data_seconds": self.data_seconds,
            "memory_bytes": self.memory_bytes,
        }
        if self.mfu is not None:
            numbers["mfu"] = self.mfu
        if clash := numbers.keys() & self.extra.keys():
            raise ValueError(f"extra metrics have the names of step metrics: {', '.join(sorted(clash))}; rename them")
        return numbers | self.extra


class RateWindow:
    """Tokens per second and MFU over the steps since the last `close`, so that one slow step is soon forgotten."""

    def __init__(self) -> None:
        self.tokens_per_second = 0.0
        """Of the last closed window."""
        self.mfu: float | None = None
        """Of the last closed window."""
        self._records: list[StepMetrics] = []

    def add(self, record: StepMetrics) -> None:
        self._records.append(record)

    def close(self) -> None:
        """Ends the window, which has one step at least, and begins the next."""
        seconds = sum(r.step_seconds for r in self._records)
        self.tokens_per_second = sum(r.tokens for r in self._records) / seconds
        shares = [r.mfu * r.step_seconds for r in self._records if r.mfu is not None]
        self.mfu = sum(shares) / seconds if shares else None
        self._records.clear()
