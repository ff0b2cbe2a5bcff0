"""Values from outside as the fields of a Config want them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, get_type_hints

from hyper_parallel.config.errors import Fault, did_you_mean, raise_faults
from hyper_parallel.config.values import coerce

if TYPE_CHECKING:
    from hyper_parallel.models.common.decoder import Decoder


def checked_fields(kind: type[Decoder.Config], values: Mapping[str, Any], path: str) -> dict[str, Any]:
    """`values` of fields of `kind`, each as its annotation wants it.

    Raises:
        ConfigError: unknown fields, values of another type. Paths start with `path`.
    """
    hints = get_type_hints(kind)
    known = {f.name for f in dataclasses.fields(kind)}
    raise_faults(
        Fault(f"{path}.{name}", f"{kind.model_type} has no such field", did_you_mean(name, {*known, "flavor"}))
        for name in values
        if name not in known
    )
    return {name: coerce(value, hints[name], f"{path}.{name}") for name, value in values.items()}
