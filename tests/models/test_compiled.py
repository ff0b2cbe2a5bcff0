"""A compiled block gives the numbers of the block as it is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hyper_parallel.models.qwen3_moe import create_model_spec
from tests.models.reference import MOE_SIZES
from tests.models.test_agreement import sum_cross_entropy, tokens


@pytest.mark.parametrize("cu_seqlens", [None, [0, 3, 7, 16, 20, 32]], ids=["rows", "packed"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_compiled_blocks_agree(dtype: torch.dtype, cu_seqlens: list[int] | None) -> None:
    torch._dynamo.reset()
    sizes: dict[str, Any] = {k: v for k, v in MOE_SIZES.items() if k != "output_router_logits"}
    model = create_model_spec(**sizes, initializer_range=0.3).model.build().to(dtype)
    model.init_weights(0)
    input_ids, labels = tokens(2, 16), tokens(2, 16).roll(-1, 1)

    def run() -> list[torch.Tensor]:
        model.zero_grad()
        output = model(input_ids, cu_seqlens=cu_seqlens, labels_BT=labels, loss_fn=sum_cross_entropy)
        loss = output.loss_sum + output.aux_loss_sum
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())]

    plain = run()
    for block in model.blocks():
        # Packed rows break the graph at the attention: their shapes change with every batch.
        block.compile(backend="aot_eager", fullgraph=cu_seqlens is None)
    tolerance = 1e-11 if dtype == torch.float64 else 1e-4
    for before, after in zip(plain, run(), strict=True):
        assert (before - after).abs().max() < tolerance * max(1, before.abs().max().item())
