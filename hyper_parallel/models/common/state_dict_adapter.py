"""The checkpoint layout that Qwen3 and Qwen3-MoE have on the hub, and that transformers writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyper_parallel.models.common.hf_config import hf_config, read_hf_config
from hyper_parallel.protocols.state_dict_adapter import HFBlock, StateDictAdapter

if TYPE_CHECKING:
    from hyper_parallel.models.common.decoder import Decoder


class DecoderStateDictAdapter(StateDictAdapter):
    """Everything but the output matrix stands under ``model.``; the matrices of experts stand one by one.

    Experts are also read stacked, as transformers keeps them in memory and writes them with
    ``save_pretrained(folder, save_original_format=False)``.
    """

    config: Decoder.Config

    def hf_blocks(self, name: str, shape: Sequence[int]) -> list[HFBlock]:
        if name == "lm_head.weight":
            return [HFBlock(name, ())]
        layer, experts, matrix = name.partition(".mlp.experts.")
        if not experts:
            return [HFBlock("model." + name.replace(".mlp.router.", ".mlp.gate."), ())]
        prefix = f"model.{layer}.mlp.experts"
        if matrix == "down_proj":
            return [HFBlock(f"{prefix}.{e}.down_proj.weight", (e,)) for e in range(shape[0])]
        assert matrix == "gate_up_proj", name
        parts = ("gate_proj", "up_proj")
        return [HFBlock(f"{prefix}.{e}.{part}.weight", (e, i)) for e in range(shape[0]) for i, part in enumerate(parts)]

    def hf_layouts(self, name: str, shape: Sequence[int]) -> list[list[HFBlock]]:
        stacked = []
        if name.endswith(".mlp.experts.gate_up_proj"):
            every, inner = slice(None), shape[2]
            stacked = [HFBlock(f"model.{name}", (every, i), (every, slice(i * inner, (i + 1) * inner))) for i in (0, 1)]
        elif ".mlp.experts." in name:
            stacked = [HFBlock(f"model.{name}", ())]
        return [self.hf_blocks(name, shape), *filter(None, [stacked])]

    def hf_copies(self) -> dict[str, str]:
        return {"lm_head.weight": "model.embed_tokens.weight"} if self.config.tie_word_embeddings else {}

    def hf_config(self, dtype: str) -> dict[str, Any]:
        return hf_config(self.config, dtype)

    def hf_differences(self, folder: Path) -> list[str]:
        ours = hf_config(self.config, "any")
        theirs = hf_config(read_hf_config(folder, type(self.config)), "any")
        return [f"{name} is {theirs[name]} there, {ours[name]} here" for name in ours if theirs[name] != ours[name]]
