"""The checkpoint layout of transformers' own models: their names, with stacked experts taken apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hyper_parallel.config.errors import ConfigError
from hyper_parallel.models.auto.adapted_modules import adapt_modules
from hyper_parallel.models.auto.layout import is_conv1d, layout_of
from hyper_parallel.models.common.hf_config import read_json
from hyper_parallel.protocols.state_dict_adapter import HFBlock, StateDictAdapter

if TYPE_CHECKING:
    from hyper_parallel.models.auto.causal_lm import AutoCausalLM


class AutoStateDictAdapter(StateDictAdapter):
    """Parameters have the names that transformers writes them under, but for experts, which it writes one by one."""

    config: AutoCausalLM.Config

    def __init__(self, config: AutoCausalLM.Config) -> None:
        super().__init__(config)
        model = config.construct()
        layout = layout_of(model)
        self._architecture, self._prefix = type(model).__name__, f"{layout.base}."
        is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        self._copies = {f"{layout.head}.weight": f"{layout.embedding}.weight"} if is_tied else {}
        adapt_modules(model)
        maps = {name: module for name, module in model.named_modules() if is_conv1d(module)}
        self._side_by_side = {name for name, module in maps.items() if module.weight.dim() > 2}

    def hf_blocks(self, name: str, shape: Sequence[int]) -> list[HFBlock]:
        if name.rpartition(".")[0] in self._side_by_side:
            return _in_one(name, shape, dim=len(shape) - 2)
        layer, experts, matrix = name.partition(".mlp.experts.")
        if not experts:
            return [HFBlock(name, ())]
        prefix = f"{layer}.mlp.experts"
        if matrix == "down_proj":
            return [HFBlock(f"{prefix}.{e}.down_proj.weight", (e,)) for e in range(shape[0])]
        assert matrix == "gate_up_proj", name
        parts = ("gate_proj", "up_proj")
        return [HFBlock(f"{prefix}.{e}.{part}.weight", (e, i)) for e in range(shape[0]) for i, part in enumerate(parts)]

    def hf_layouts(self, name: str, shape: Sequence[int]) -> list[list[HFBlock]]:
        layouts = [self.hf_blocks(name, shape)]
        if ".mlp.experts." in name:
            layouts.append(_in_one(name, shape, dim=1) if name.endswith(".gate_up_proj") else [HFBlock(name, ())])
        # GPT-2 on the hub, and whatever was saved from a base model, is without its prefix.
        bare = [block._replace(hf_name=block.hf_name.removeprefix(self._prefix)) for block in layouts[-1]]
        return [*layouts, bare]

    def to_hf(self, name: str, parameter: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        if name.rpartition(".")[0] in self._side_by_side:
            yield name, parameter.flatten(-2)
        else:
            yield from StateDictAdapter.to_hf(self, name, parameter)

    def hf_copies(self) -> dict[str, str]:
        return self._copies

    def hf_config(self, dtype: str) -> dict[str, Any]:
        return {**self.config.hf_config().to_diff_dict(), "architectures": [self._architecture], "dtype": dtype}

    def hf_differences(self, folder: Path) -> list[str]:
        from hyper_parallel.models.auto.causal_lm import AutoCausalLM

        ours = self.config.hf_config()
        content = read_json(folder)
        if content.get("model_type") != ours.model_type:
            fact = f"model_type is {content.get('model_type')!r}, not {ours.model_type}"
            raise ConfigError.one(str(folder / "config.json"), fact, "give a folder of the same family")
        theirs = AutoCausalLM.Config(content=content).hf_config().to_dict()
        silent = {"dtype", "transformers_version", "architectures", "_name_or_path"}
        return [
            f"{name} is {theirs.get(name)} there, {value} here"
            for name, value in ours.to_dict().items()
            if name not in silent and theirs.get(name) != value
        ]


def _in_one(name: str, shape: Sequence[int], *, dim: int) -> list[HFBlock]:
    """A parameter of `shape` whose dims `dim` and `dim` + 1 are one in the checkpoint's tensor."""
    before, size = (slice(None),) * dim, shape[dim + 1]
    return [HFBlock(name, (*before, i), (*before, slice(i * size, (i + 1) * size))) for i in range(shape[dim])]
