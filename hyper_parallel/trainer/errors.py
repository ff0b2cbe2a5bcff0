"""What can end a training run."""

from __future__ import annotations

from pathlib import Path

from hyper_parallel.config.errors import RunError


class TrainingError(RunError):
    """Training cannot go on. The message says at which step, why, and what to do."""


class NonFiniteError(TrainingError):
    """The loss or the gradient norm is not finite."""

    def __init__(self, step: int, quantity: str, value: float, last_checkpoint: Path | None) -> None:
        saved = (
            f"the last finite checkpoint is {last_checkpoint}"
            if last_checkpoint is not None
            else "no checkpoint was saved before it"
        )
        super().__init__(
            f"step {step}: {quantity} is {value}, so no weight was changed; {saved}; lower optimizer.lr, or find the "
            "module with debug.check_nan_inf"
        )


class NotFiniteHereError(TrainingError):
    """`debug.check_nan_inf` found numbers that are not finite on this rank."""


class CallbackError(TrainingError):
    """A callback raised what it should not have. Its traceback is in the log, of the first rank that failed alone."""

    def __init__(self, callback: str, moment: str, step: int, rank: int, error: BaseException) -> None:
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        super().__init__(
            f"step {step}: {callback} raised in {moment} on rank {rank}: {cause}; its traceback is in the log; mend "
            "it, or leave it out of callbacks"
        )
