"""How transformers would draw each parameter of a model, as our initialisers, which any shard can be drawn by alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hyper_parallel.protocols.initializer import Constant, Initializer, Normal


def recorded_initializers(model: nn.Module) -> dict[int, Initializer]:
    """By the id of each parameter of `model`, a PreTrainedModel on meta, what its `_init_weights` fills it with.

    Parameters that it fills with anything but a constant or a normal distribution of mean 0 are left out. The row of a
    padding token, which transformers zeroes, is drawn as the others.
    """
    recorder = _Recorder({id(parameter) for parameter in model.parameters()})
    with torch.no_grad(), recorder:
        model.apply(model._init_weights)
    return recorder.found


class _Recorder(TorchDispatchMode):
    """Notes the operators that write whole parameters; the last one counts."""

    def __init__(self, parameters: set[int]) -> None:
        super().__init__()
        self.parameters = parameters
        self.found: dict[int, Initializer] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and id(args[0]) in self.parameters:
            name, values = func.overloadpacket.__name__, args[1:]
            if name == "normal_" and (values or (0.0,))[0] == 0.0:
                self.found[id(args[0])] = Normal(values[1] if len(values) > 1 else 1.0)
            elif name == "zero_":
                self.found[id(args[0])] = Constant(0.0)
            elif name == "fill_":
                self.found[id(args[0])] = Constant(float(values[0]))
            elif name.endswith("_"):  # another one in place
                self.found.pop(id(args[0]), None)
        return func(*args, **(kwargs or {}))
