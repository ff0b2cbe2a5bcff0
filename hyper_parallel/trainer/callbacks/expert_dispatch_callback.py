"""ExpertDispatchCallback: how evenly tokens are spread over the expert-parallel ranks, as metrics."""

from __future__ import annotations

from torch import Tensor

from hyper_parallel.distributed.reductions import all_reduce_sum
from hyper_parallel.trainer.callbacks.base import Callback, TrainerState


class ExpertDispatchCallback(Callback):
    """Counts what each rank receives for its experts over the micro-batches of a step, with one collective a step.
    Every run with `parallelism.ep` has it.

    The load of a rank in a layer is what it receives over the mean of all ranks: 1 everywhere is balance, `ep` is all
    tokens on one rank of each group. The slowest rank makes the others wait. The step's numbers get

    - `ep_max_load`: of the most loaded rank of all layers;
    - `ep_mean_max_load`: of the most loaded rank of a layer, mean over layers.
    """

    _tokens_LE: Tensor | None = None

    def on_substep_end(self, state: TrainerState) -> None:
        assert state.model_output is not None and state.model_output.tokens_per_expert is not None
        tokens_LE = state.model_output.tokens_per_expert
        self._tokens_LE = tokens_LE if self._tokens_LE is None else self._tokens_LE + tokens_LE

    def on_step_end(self, state: TrainerState) -> None:
        assert self._tokens_LE is not None, "a step has at least one micro-batch"
        dims = self.trainer.parallel_dims
        sent_LR = self._tokens_LE.unflatten(1, (dims.ep, -1)).sum(-1)
        self._tokens_LE = None
        # ep is the innermost of the axes that hold different tokens, so its groups are neighbours.
        group, groups = dims.token_rank // dims.ep, dims.dp_size * dims.cp // dims.ep
        received_GLR = sent_LR.new_zeros(groups, *sent_LR.shape)
        received_GLR[group] = sent_LR
        received_GLR = all_reduce_sum(received_GLR, dims.loss_group).cpu().double()
        load_GLR = received_GLR / received_GLR.mean((0, 2), keepdim=True)
        state.add_metric("ep_max_load", float(load_GLR.max()))
        state.add_metric("ep_mean_max_load", float(load_GLR.amax((0, 2)).mean()))
