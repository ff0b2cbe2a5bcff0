"""The checkpoint layout that Qwen3 and Qwen3-MoE have on the hub, and that transformers writes."""

from __future__ import annotations

from collections.abc import Sequence

from hyper_parallel.protocols.state_dict_adapter import HFBlock, StateDictAdapter


class DecoderStateDictAdapter(StateDictAdapter):
    """Everything but the output matrix stands under ``model.``; the matrices of experts stand one by one."""

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
        parts = enumerate(("gate_proj", "up_proj"))
        return [HFBlock(f"{prefix}.{e}.{part}.weight", (e, i)) for i, part in parts for e in range(shape[0])]
