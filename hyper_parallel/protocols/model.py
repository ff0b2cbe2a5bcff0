"""BaseModel: what the trainer asks of a language model, and nothing more."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import nn

from hyper_parallel.config.errors import Fault, raise_faults
from hyper_parallel.config.sections import ParallelismConfig, TrainingConfig
from hyper_parallel.protocols.initializer import initialize_
from hyper_parallel.protocols.module import Module, _owned_parameters
from hyper_parallel.protocols.module_names import of_all_layers
from hyper_parallel.protocols.module_replacement import ReplacementContext, replace_modules, replacing_path
from hyper_parallel.protocols.plan_merge import merged_plan, without_modules
from hyper_parallel.protocols.sharding import ShardingPlan, plan_of

if TYPE_CHECKING:
    from hyper_parallel.protocols.plan_override import PlanOverride

LossFn = Callable[[torch.Tensor, Any, torch.Tensor], torch.Tensor]
"""`loss_fn(hidden_BTD, lm_head, labels_BT)` -> sum over valid tokens; `lm_head` is a callable with a `.weight`."""


class ModelOutput(NamedTuple):
    """What one forward pass gives. Where ranks share rows, logits are of the whole rows, and the rest is the summand of
    this rank's tokens."""

    logits: torch.Tensor | None = None
    """[B, T, V] when no `loss_fn` was given."""
    loss_sum: torch.Tensor | None = None
    """Scalar sum of the loss over the valid tokens, when a `loss_fn` was given."""
    aux_loss_sum: torch.Tensor | None = None
    """Scalar sum over the B rows of the weighted auxiliary loss of each, where the model has one."""
    tokens_per_expert: torch.Tensor | None = None
    """[layers with experts, E] int64 tokens sent to each expert, detached, where the model has experts. Of a part of a
    model: 0 in the layers of other parts."""
    sent: tuple[torch.Tensor, ...] = ()
    """What the next part of the model takes; then there is neither logits nor loss. Empty behind the last layer."""


class BaseModel(Module):
    """A causal language model, written for one device."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Sizes of a model."""

        def update_from_config(self, trainer_config: Any) -> None:
            """Takes over what the model needs to know of the whole run. Called on the run's private copy.

            Raises:
                ConfigError: the run asks for something that the model cannot do.
            """

    vocab_size: int
    """Token ids are below this."""
    max_seq_len: int
    """Longest row that the model was made for, in tokens."""
    copied_parameters: tuple[str, ...] = ()
    """Of a part of a model: names of parameters that it holds a copy of. The first part owns them, and both get the
    sum of their gradients."""

    inner_wrappers: ClassVar[Mapping[str, Callable[..., Any]]] = MappingProxyType({})
    """By name, what its attention has for the `inner_wrapper` of an override."""
    output_matrix: str = "lm_head"
    """Name of the module whose weight a loss reads without calling it, where it is not the embedding."""
    input_matrix: str = "embed_tokens"
    """Name of the embedding."""
    replaced_modules: Mapping[str, tuple[str, str]] = MappingProxyType({})
    """By name, the class of each module that plan_overrides have replaced, and the one that it has now."""

    @abstractmethod
    def forward(
        self,
        input_ids_BT: torch.Tensor,
        *,
        position_ids_BT: torch.Tensor | None = None,
        cu_seqlens: Sequence[int] | None = None,
        labels_BT: torch.Tensor | None = None,
        loss_fn: LossFn | None = None,
        received: Sequence[torch.Tensor] = (),
    ) -> ModelOutput:
        """One forward pass.

        Args:
            input_ids_BT: token ids, int64.
            position_ids_BT: position of each token in its document. None: counted from the documents' starts.
            cu_seqlens: document boundaries over the flattened B*T tokens: starts with 0, ends with B*T, row ends are
                boundaries too. None: each row is one document.
            labels_BT: target of each position (already shifted), -100 where nothing is trained.
            loss_fn: gives the loss; without it the logits are returned.
            received: what the part before this one has `sent`. Empty: this is the first part, or the whole model.
        """

    def boundary(
        self, rows: int, tokens: int, dtype: torch.dtype, parallelism: ParallelismConfig
    ) -> tuple[torch.Tensor, ...]:
        """Meta tensors like those that a part of the model, once parallelised, sends to the next from this rank for a
        batch of `rows` x `tokens` computed in `dtype`; those that a gradient comes back for require it. Only models
        with a `pipelining_fn` are asked."""
        raise NotImplementedError(f"{type(self).__name__} is not made to be taken apart")

    def apply_overrides(
        self, overrides: Sequence[PlanOverride], parallelism: ParallelismConfig, training: TrainingConfig
    ) -> None:
        """Puts what `overrides` make in the place of modules, and what they write of boundaries and of what is computed
        within them into the plan; before parameters are sharded.

        Raises:
            ConfigError: see `module_replacement.replace_modules`, `plan_merge.merged_plan` and `without_modules`; or
                HP-REPLACE-002, a forward of the user's would not run.
        """
        context = ReplacementContext(
            **{name: getattr(parallelism, name) for name in ("tp", "cp", "ep", "pp")},
            mode=parallelism.mode,
            low_precision=(training.mixed_precision_param or training.dtype) == "bfloat16",
        )
        before = dict(self.named_modules())
        self.replaced_modules = replace_modules(self, overrides, context)
        now = dict(self.named_modules())
        assert isinstance(self.config, Module.Config)
        matrix = self.output_matrix if self.output_matrix in now else self.input_matrix
        plan = merged_plan(now, self.config.sharding, overrides, context, self.inner_wrappers, matrix)
        raise_faults(dict.fromkeys(_idle_forwards(before, now, plan, overrides, context, self.output_matrix)))
        self.config.sharding = without_modules(plan, before, now, overrides, context)

    @abstractmethod
    def blocks(self) -> list[nn.Module]:
        """The repeated blocks in order: units of sharding, recomputation and compilation."""

    @abstractmethod
    def flops_per_token(self, seq_len: int) -> float:
        """Model FLOPs of a forward and backward pass per token in rows of one document of `seq_len` tokens."""

    def init_weights(self, seed: int) -> None:
        """Writes the initial values of all materialised parameters; of a sharded one, this rank's block only.

        They depend on (seed, parameter name, position in the whole tensor) alone.
        """
        for name, owner, leaf in _owned_parameters(self):
            # Not through the attribute, which may be a part of it.
            parameter = owner._parameters[leaf]
            assert parameter is not None
            declared: Any = owner  # a Module, or one of the user's that stands in the place of one
            initialize_(parameter, declared.param_init[leaf], seed=seed, name=name)


def _idle_forwards(
    before: Mapping[str, nn.Module],
    now: Mapping[str, nn.Module],
    plan: ShardingPlan,
    overrides: Sequence[PlanOverride],
    context: ReplacementContext,
    output_matrix: str,
) -> Iterator[Fault]:
    """Faults of what a user has written to run in the place of a forward, and nothing would call."""
    for name, module in now.items():
        entry, old = plan_of(name, plan), before.get(name)
        if name == output_matrix and entry is not None and entry.compute is not None:
            fact = f"[HP-REPLACE-002] a loss reads the weight of {name} and does not call it, so this would not run"
            yield Fault(entry.compute.path, fact, "leave it out, and write a loss")
        if old is None or type(old).forward is type(module).forward:
            continue
        spread = None if entry is None else entry.local_map
        if name == output_matrix:
            fact = f"[HP-REPLACE-002] {name} is replaced, but a loss reads its weight and does not call it"
            yield Fault(replacing_path(name, overrides, context), fact, "leave it as it is, and write a loss")
        elif spread is not None and spread.forward is not None and getattr(context, spread.axis) > 1:
            assert entry is not None
            if entry.spreads_experts:  # their own forward runs behind the exchange of tokens
                continue
            function = getattr(spread.forward, "func", spread.forward).__name__
            fact = f"[HP-REPLACE-002] {of_all_layers(name)} is replaced, but {spread.axis} computes it by {function}"
            path = replacing_path(name, overrides, context)
            yield Fault(path, f"{fact}, so its forward would not run", "write a local_compute_fn for it")
