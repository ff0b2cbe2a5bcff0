"""AutoCausalLM: a causal language model of transformers behind the protocol of ours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from hyper_parallel.config.configurable import setting
from hyper_parallel.config.errors import ConfigError, Fault, raise_faults
from hyper_parallel.config.sections import ParallelismConfig, TrainingConfig
from hyper_parallel.models.auto import attention, experts
from hyper_parallel.models.auto.adapted_modules import adapt_modules
from hyper_parallel.models.auto.composition import hidden_states
from hyper_parallel.models.auto.initializers import recorded_initializers
from hyper_parallel.models.auto.layout import layout_faults, layout_of
from hyper_parallel.models.auto.routing import TokensByRow
from hyper_parallel.models.auto.sharding import sharding_faults, sharding_plan
from hyper_parallel.models.common.attention import fullgraph_faults
from hyper_parallel.models.common.context_parallel.inner_wrapper import sdpa_qkv
from hyper_parallel.models.common.decoder import Output
from hyper_parallel.models.common.documents import WholeRows
from hyper_parallel.models.common.embedding import TiedHead, WholeVocabulary
from hyper_parallel.models.common.moe import LoadBalancing, RouterStats, summed
from hyper_parallel.models.common.replaced_modules import calls_of, fit_experts, kept_heads
from hyper_parallel.protocols.initializer import initialize_
from hyper_parallel.protocols.model import BaseModel, LossFn, ModelOutput
from hyper_parallel.protocols.module import canonical_name

if TYPE_CHECKING:
    from hyper_parallel.protocols.plan_override import PlanOverride


class AutoCausalLM(BaseModel):
    """The modules of a transformers model under their own names, so that parameters have Hugging Face's.

    Its base model is called for hidden states; the output matrix is kept apart, so that the loss may do without the
    whole of the logits. A matrix tied to the embedding is not there a second time.
    """

    inner_wrappers = MappingProxyType({"sdpa_qkv": sdpa_qkv, "sdpa_hf": attention.sdpa_hf})

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        """A Hugging Face config.json."""

        model_type: ClassVar[str] = "auto"
        """Hugging Face's name is in `content`."""

        content: dict[str, Any] = setting(default_factory=dict, hidden=True)
        """What config.json says."""
        changes: dict[str, Any] = field(default_factory=dict)
        """Fields of config.json that get another value, as {attn_pdrop: 0.0}."""

        @property
        def vocab_size(self) -> int:
            """Token ids are below this."""
            return self.hf_config().vocab_size

        @property
        def hidden_size(self) -> int:
            """Size of the residual stream."""
            return self.hf_config().hidden_size

        def hf_config(self) -> Any:
            """The PretrainedConfig, changes included.

            Raises:
                ConfigError: transformers has no such model, or refuses a value.
            """
            from transformers import AutoConfig

            def made(values: dict[str, Any]) -> Any:
                try:
                    return AutoConfig.for_model(**values)
                except Exception as error:  # its checks raise what they like
                    fact = f"transformers refuses config.json: {' '.join(str(error).split())[:200]}"
                    raise ConfigError.one("model_spec", fact, "correct it, or model_spec.changes") from error

            plain = made({"model_type": "", **self.content})
            raise_faults(
                Fault(f"model_spec.changes.{name}", f"{plain.model_type} has no such field", "leave it out")
                for name in self.changes
                if not hasattr(plain, name)
            )
            return made({**self.content, **self.changes}) if self.changes else plain

        def construct(self) -> nn.Module:
            """transformers' model on meta, in the default dtype."""
            from transformers import AutoModelForCausalLM

            attention.register()
            experts.register()
            config = self.hf_config()
            for output in ("output_attentions", "output_hidden_states", "output_router_logits"):
                if getattr(config, output, False):  # would be kept by hooks on modules, for nobody
                    setattr(config, output, False)
            with torch.device("meta"):
                try:
                    return AutoModelForCausalLM.from_config(
                        config,
                        dtype=torch.get_default_dtype(),
                        attn_implementation=attention.NAME,
                        experts_implementation=experts.NAME,
                    )
                except Exception as error:  # no such class, or what its code does where no attention can be chosen
                    cause = " ".join(f"{type(error).__name__}: {error}".split())
                    fact = (
                        f"transformers makes no causal model of it, to which an attention can be given ({cause[:200]})"
                    )
                    raise ConfigError.one("model_spec", fact, "choose another model") from error

        def update_from_config(self, trainer_config: Any) -> None:
            raise_faults(fullgraph_faults(trainer_config.compile))
            self.set_sharding_config(trainer_config.parallelism, trainer_config.training.seq_len)

        def set_sharding_config(self, parallelism: ParallelismConfig, seq_len: int | None = None) -> None:
            """Fills in `sharding`, where there is more than one rank along tp, cp or ep.

            Args:
                seq_len: tokens of a row. None: any.

            Raises:
                ConfigError: the model is not understood, or cannot be spread so.
            """
            model = self.construct()
            layout = layout_of(model)
            raise_faults([*layout_faults(model, layout), *self._row_faults(seq_len)])
            if max(parallelism.tp, parallelism.cp, parallelism.ep) == 1:
                return
            adapt_modules(model)
            plan = sharding_plan(model, layout, parallelism)
            raise_faults(sharding_faults(model, layout, plan, parallelism, seq_len))
            self.sharding = plan

        def _row_faults(self, seq_len: int | None) -> Iterator[Fault]:
            longest = self.hf_config().max_position_embeddings
            if seq_len is not None and seq_len > longest:
                fact = f"{seq_len} is above the model's max_position_embeddings {longest}"
                yield Fault("training.seq_len", fact, f"give {longest} or less")

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.config: AutoCausalLM.Config = config
        model = config.construct()
        self.layout = layout = layout_of(model)
        raise_faults(layout_faults(model, layout))
        initializers = recorded_initializers(model)
        self.param_init = {
            name: initializers[id(parameter)]
            for name, parameter in model.named_parameters()
            if id(parameter) in initializers
        }
        adapt_modules(model)
        hf_config = model.config
        self.vocab_size, self.max_seq_len = hf_config.vocab_size, hf_config.max_position_embeddings
        self.balance_coefficient: float = getattr(hf_config, "router_aux_loss_coef", 0.0) if layout.routers else 0.0
        self._attended = (
            hf_config.num_hidden_layers
            * hf_config.num_attention_heads
            * (getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads)
        )
        self.is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        self.output_matrix, self.input_matrix = layout.head, layout.embedding
        self.add_module(layout.base, model.base_model)
        if not self.is_tied:
            self.add_module(layout.head, model.get_output_embeddings())
        self.rows = WholeRows.Config().build()
        self.tokens_by_row = TokensByRow.Config().build()
        self.balance = LoadBalancing.Config().build()
        self.vocabulary = WholeVocabulary.Config(vocab_size=self.vocab_size).build()
        self.logits_output = Output.Config().build()
        self.loss_output = Output.Config().build()
        self._stats: dict[int, RouterStats] = {}
        self._kept_heads: set[str] = set()  # of attentions of the user's, which may call them or not
        for layer, name in enumerate(layout.routers):
            router = self.get_submodule(name)
            router.parameter_roles = {"weight": "router"}
            router.register_forward_hook(partial(self._note_routing, layer))

    def apply_overrides(
        self, overrides: Sequence[PlanOverride], parallelism: ParallelismConfig, training: TrainingConfig
    ) -> None:
        super().apply_overrides(overrides, parallelism, training)
        fit_experts(self, self.config.sharding)  # a replaced module may hold some of its own
        self._kept_heads = kept_heads(self, self.config.sharding, parallelism.cp)

    def verify_module_protocol(self) -> None:
        """
        Raises:
            TypeError: transformers does not say how it would draw some parameter, so it cannot be drawn in shards.
        """
        drawn = self.param_init
        if missing := [name for name, _ in self.named_parameters() if canonical_name(name) not in drawn]:
            raise TypeError(f"transformers draws neither normally nor as a constant: {', '.join(missing)}")

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
        """
        Raises:
            OwnTokensError: under cp, an attention of the user's has kept the heads and not called them.
        """
        batch, tokens = input_ids_BT.shape
        if tokens > self.max_seq_len:
            raise ValueError(f"rows of {tokens} tokens are above max_position_embeddings {self.max_seq_len}")
        rows = self.rows(input_ids_BT, position_ids_BT, cu_seqlens, labels_BT)
        self._stats = {}
        self._batch = batch
        with calls_of(self, self._kept_heads):
            hidden_BTC = hidden_states(
                self.get_submodule(self.layout.base),
                self.get_submodule(self.layout.embedding),
                rows.input_ids_BT,
                rows.position_ids_BT,
                rows.documents,
            )
        output = ModelOutput()
        if stats := [self._stats[layer] for layer in range(len(self.layout.routers))]:
            output = output._replace(tokens_per_expert=torch.stack([each.tokens_BE.sum(0) for each in stats]))
            if self.balance_coefficient:
                totals = summed(stats)
                assert totals.probability_BE is not None
                balance_B = self.balance(totals.tokens_BE, totals.probability_BE, rows.row_tokens * len(stats))
                output = output._replace(aux_loss_sum=self.balance_coefficient * balance_B.sum())
        self._stats = {}
        head = self._head()
        if loss_fn is None:
            logits_BTV = self.logits_output(hidden_BTC, lambda hidden_BTC: self.vocabulary(head(hidden_BTC)))
            return output._replace(logits=logits_BTV)
        if rows.labels_BT is None:
            raise ValueError("loss_fn is given without labels_BT")
        loss_sum = self.loss_output(hidden_BTC, lambda hidden_BTC: loss_fn(hidden_BTC, head, rows.labels_BT))
        return output._replace(loss_sum=loss_sum)

    def blocks(self) -> list[nn.Module]:
        return [self.get_submodule(name) for name in self.layout.blocks]

    def flops_per_token(self, seq_len: int) -> float:
        """As `Decoder.flops_per_token`: 6 FLOPs per weight that a token meets, and 12 per layer, head, head dim and
        token of the row."""
        weights = float(self._head().weight.numel())
        shares = {
            name.rpartition(".")[0] + ".experts": router.top_k / router.weight.shape[0]
            for name in self.layout.routers
            for router in [self.get_submodule(name)]
        }
        inside = tuple(f"{block}." for block in self.layout.blocks)
        for name, parameter in self.named_parameters():
            name = canonical_name(name)
            if name.startswith(inside):
                weights += parameter.numel() * shares.get(name.rpartition(".")[0], 1.0)
        return 6.0 * weights + 12.0 * self._attended * seq_len

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """As `BaseModel.init_weights`, with the distributions that transformers draws from; and the buffers, which it
        computes from the config."""
        for name, parameter in self.named_parameters():
            name = canonical_name(name)
            initialize_(parameter, self.param_init[name], seed=seed, name=name)
        base = self.get_submodule(self.layout.base)
        for module in base.modules():
            if any(True for _ in module.buffers(recurse=False)):
                base._init_weights(module)

    def _head(self) -> Any:
        if self.is_tied:
            return TiedHead(self.get_submodule(self.layout.embedding))
        return self.get_submodule(self.layout.head)

    def _note_routing(self, layer: int, router: nn.Module, args: Any, output: Any) -> None:
        """What the router did, seen from outside: a layer of transformers hands nothing on but hidden states."""
        logits_NE, _, experts_NK = output
        chosen_BA = self.tokens_by_row(experts_NK, self._batch).flatten(1)
        tokens_BE = torch.zeros(self._batch, logits_NE.shape[-1], dtype=torch.int64, device=chosen_BA.device)
        tokens_BE = tokens_BE.scatter_add(1, chosen_BA, torch.ones_like(chosen_BA))
        probability_BE = None
        if self.balance_coefficient:
            wide = torch.promote_types(logits_NE.dtype, torch.float32)
            probability_BE = self.tokens_by_row(logits_NE.softmax(-1, dtype=wide), self._batch).sum(1)
        self._stats[layer] = RouterStats(tokens_BE, probability_BE)
