"""What a parameter is for, which decides how it is treated where matrices and scales differ (weight decay)."""

from __future__ import annotations

from typing import Literal, cast

from torch import nn

Role = Literal["matrix", "embedding", "norm", "bias", "router"]

_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)


def parameter_role(module: nn.Module, name: str) -> Role:
    """Role of the parameter `name` that `module` itself owns.

    Our Modules declare it (`parameter_roles`). Of any other module, torch's own types tell, and beyond them the shape:
    a parameter of one dim scales or shifts, one of more dims multiplies.

    Raises:
        AttributeError: `module` owns no parameter `name`.
    """
    declared = getattr(module, "parameter_roles", {})
    if name in declared:
        return cast(Role, declared[name])
    parameter = module._parameters.get(name)
    if parameter is None:
        raise AttributeError(
            f"{type(module).__name__} owns no parameter {name!r}; it owns {sorted(module._parameters)}"
        )
    if name == "bias":
        return "bias"
    if isinstance(module, nn.Embedding):
        return "embedding"
    if isinstance(module, _NORMS):
        return "norm"
    if parameter.dim() >= 2:
        return "matrix"
    return "norm" if name == "weight" else "bias"
