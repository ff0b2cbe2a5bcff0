"""The tensors of a model, as a checkpoint names them, and whether a checkpoint is of this model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hyper_parallel.components.checkpoint.storage import CheckpointError
from hyper_parallel.distributed.together import gathered, together


def model_tensors(model_parts: list[nn.Module], *, copy_buffers: bool = False) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name, sharing memory with the model; of tied ones the first name only, of
    copies in several parts the last.

    Args:
        copy_buffers: give buffers memory of their own: unlike parameters, they may change in a forward pass.
    """
    tensors: dict[int, tuple[str, torch.Tensor]] = {}
    for part in model_parts:
        for name, tensor in part.state_dict(keep_vars=True).items():
            copied = copy_buffers and not isinstance(tensor, nn.Parameter)
            tensors.setdefault(id(tensor), (name, tensor.detach().clone() if copied else tensor.detach()))
    return dict(tensors.values())


@torch.no_grad()
def fill_copies(model_parts: list[nn.Module], loaded: dict[str, torch.Tensor]) -> None:
    """Gives what was loaded into one part to those that hold a copy of it."""
    for part in model_parts if len(model_parts) > 1 else ():
        for name, tensor in part.state_dict().items():
            if name in loaded:
                tensor.copy_(loaded[name])


def refuse_another_model(
    verdict: str, saved: dict[str, Any], state: dict[str, Any], kind: Callable[[Any], str], way_out: str
) -> None:
    """
    Args:
        verdict: what it means if `state` and what is saved differ in their names, or in the `kind` of their tensors.

    Raises:
        CheckpointError: on every rank, with the first differences.
    """
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    own, _ = flatten_state_dict(state)
    # What this rank has not may belong to another stage of the pipeline.
    strange = set.intersection(*gathered({name for name in saved if name not in own}))

    def compare() -> None:
        differences = [f"{name} is not in the checkpoint" for name in own if name not in saved]
        differences += [f"{name} is not in this run" for name in sorted(strange) if not name.startswith("rng.")]
        differences += [
            f"{name} is {kind(saved[name])} in the checkpoint, {kind(value)} in this run"
            for name, value in own.items()
            if name in saved and kind(value) != kind(saved[name])
        ]
        if differences:
            more = f" and {len(differences) - 3} more" if len(differences) > 3 else ""
            raise CheckpointError(f"{verdict}: {'; '.join(differences[:3])}{more}; {way_out}")

    together(compare, CheckpointError)


def parameter_names(model_parts: list[nn.Module]) -> frozenset[str]:
    """Which of `model_tensors` are parameters."""
    tensors = (item for part in model_parts for item in part.state_dict(keep_vars=True).items())
    return frozenset(name for name, tensor in tensors if isinstance(tensor, nn.Parameter))


@torch.no_grad()
def not_finite(tensors: dict[str, torch.Tensor]) -> list[str]:
    """Names of those that hold NaN or an infinity."""
    if not tensors:
        return []
    # A sum costs one pass without a copy. It is not finite either where it overflows.
    sums = torch.stack([tensor.sum().isfinite() for tensor in tensors.values()]).tolist()
    suspects = [name for name, is_finite in zip(tensors, sums, strict=True) if not is_finite]
    return [name for name in suspects if not tensors[name].isfinite().all()]


def shape_of(entry: Any) -> str:
    """That of a live tensor, or of a tensor that the metadata of a checkpoint describes."""
    if isinstance(entry, torch.Tensor):
        return str(list(entry.shape))
    return str(list(entry.size)) if hasattr(entry, "properties") else "no tensor"


def kind_of(entry: Any) -> str:
    """Type and shape, of the same."""
    dtype = getattr(entry, "dtype", None) or getattr(getattr(entry, "properties", None), "dtype", None)
    return shape_of(entry) if dtype is None else f"{str(dtype).removeprefix('torch.')} {shape_of(entry)}"
