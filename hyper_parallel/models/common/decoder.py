"""Decoder: embedding, blocks, final norm and output matrix. The families differ in what their layers hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from hyper_parallel.config.errors import Fault, raise_faults
from hyper_parallel.config.sections import ParallelismConfig, TrainingConfig, above_zero, at_least
from hyper_parallel.distributed.pipeline_plan import layer_faults
from hyper_parallel.models.common.attention import Attention, fullgraph_faults
from hyper_parallel.models.common.context_parallel.inner_wrapper import sdpa_qkv
from hyper_parallel.models.common.documents import DocumentGroups, WholeRows
from hyper_parallel.models.common.embedding import Embedding, TiedHead, WholeVocabulary
from hyper_parallel.models.common.feed_forward import FeedForward
from hyper_parallel.models.common.linear import Linear
from hyper_parallel.models.common.moe import LoadBalancing, MoE, RouterStats, summed
from hyper_parallel.models.common.norm import Float64Rounding, RMSNorm
from hyper_parallel.models.common.replaced_modules import calls_of, fit_experts, kept_heads
from hyper_parallel.models.common.rope import RopeParameters, RopeTables, rope_tables
from hyper_parallel.protocols.model import BaseModel, LossFn, ModelOutput
from hyper_parallel.protocols.module import Module

if TYPE_CHECKING:
    from hyper_parallel.protocols.plan_override import PlanOverride


class Block(Module):
    """One layer: attention, then feed-forward or experts, each on a normalised copy of the residual stream."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Parts of the layer."""

        attention: Attention.Config
        """Attention of the layer."""
        mlp: FeedForward.Config | MoE.Config
        """What follows it."""
        norm_eps: float = 1e-6
        """Guard of both norms."""
        float64_rounding: Float64Rounding = "none"
        """See Decoder.Config."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        size = config.attention.hidden_size
        norm = RMSNorm.Config(size=size, eps=config.norm_eps, float64_rounding=config.float64_rounding)
        self.input_layernorm = norm.build()
        self.self_attn = config.attention.build()
        self.post_attention_layernorm = norm.build()
        self.mlp = config.mlp.build()

    def forward(
        self, hidden_BTC: torch.Tensor, rope: RopeTables, documents: DocumentGroups | None
    ) -> tuple[torch.Tensor, RouterStats | None]:
        """The residual stream behind the layer, and what its router did (None without experts)."""
        hidden_BTC = hidden_BTC + self.self_attn(self.input_layernorm(hidden_BTC), rope, documents)
        out_BTC, stats = self.mlp(self.post_attention_layernorm(hidden_BTC))
        return hidden_BTC + out_BTC, stats


class Output(Module):
    """What is made of the last hidden states: a module, so that it has a boundary of its own."""

    def forward(self, hidden_BTC: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return function(hidden_BTC)


class Handover(Module):
    """The residual stream on its way from one part of the model to the next: a module, so that it has a boundary."""

    def forward(self, hidden_BTC: torch.Tensor) -> torch.Tensor:
        return hidden_BTC


class Decoder(BaseModel):
    """A causal language model with rotary positions and grouped-query attention.

    A part of it has None in the place of what it leaves to other parts: the embedding, some of `layers`, the last norm
    and the output matrix.
    """

    inner_wrappers = MappingProxyType({"sdpa_qkv": sdpa_qkv})

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        """Sizes under Hugging Face's names; a default is what transformers takes for a field that config.json lacks."""

        model_type: ClassVar[str]
        """Hugging Face's name of the family."""
        architecture: ClassVar[str]
        """The class that transformers loads a checkpoint with."""

        vocab_size: int = 151936
        """Token ids are below this."""
        hidden_size: int = 4096
        """Size of the residual stream."""
        intermediate_size: int = 22016
        """Size between the projections of a feed-forward layer."""
        num_hidden_layers: int = 32
        """Blocks."""
        num_attention_heads: int = 32
        """Query heads."""
        num_key_value_heads: int | None = None
        """Key and value heads. None: as many as query heads."""
        head_dim: int | None = None
        """Size of one head. None: hidden_size / num_attention_heads."""
        attention_bias: bool = False
        """Biases in the four projections of the attention."""
        rms_norm_eps: float = 1e-6
        """Guard of all norms."""
        max_position_embeddings: int = 32768
        """Longest row, in tokens."""
        rope_parameters: RopeParameters = field(default_factory=RopeParameters)
        """Frequencies of the rotary positions."""
        tie_word_embeddings: bool = False
        """Use the embedding as the output matrix."""
        initializer_range: float = 0.02
        """Standard deviation of the first weights of every matrix."""
        float64_rounding: Float64Rounding = "none"
        """none: a float64 model rounds nothing, so that two ways to train it can be compared. transformers: it rounds
        norms and router probabilities to float32, as transformers does in every type. Other types are not touched."""

        @property
        def kv_heads(self) -> int:
            """Key and value heads, the default resolved."""
            return self.num_key_value_heads or self.num_attention_heads

        @property
        def head_size(self) -> int:
            """Size of one head, the default resolved."""
            return self.head_dim or self.hidden_size // self.num_attention_heads

        def faults(self) -> Iterator[Fault]:
            yield from at_least(
                self,
                1,
                "vocab_size",
                "hidden_size",
                "intermediate_size",
                "num_hidden_layers",
                "num_attention_heads",
                "num_key_value_heads",
                "head_dim",
                "max_position_embeddings",
            )
            if min(self.num_attention_heads, self.kv_heads) >= 1 and self.num_attention_heads % self.kv_heads:
                yield Fault(
                    "num_key_value_heads",
                    f"{self.kv_heads} does not divide num_attention_heads {self.num_attention_heads}",
                    "give a divisor",
                )
            yield from above_zero(self, "rms_norm_eps")
            yield from at_least(self, 0, "initializer_range")
            if self.num_attention_heads >= 1 and self.hidden_size >= 1 and self.head_dim is None and not self.head_size:
                yield Fault(
                    "num_attention_heads",
                    f"{self.num_attention_heads} is above hidden_size {self.hidden_size}, and head_dim is None",
                    "give fewer heads, or head_dim",
                )
            elif self.num_attention_heads >= 1 and self.head_size % 2:
                yield Fault("head_dim", f"{self.head_size} is odd", "rotary positions turn pairs: give an even size")

        def update_from_config(self, trainer_config: Any) -> None:
            raise_faults(self._run_faults(trainer_config))
            parallelism = trainer_config.parallelism
            if max(parallelism.tp, parallelism.cp, parallelism.ep) > 1:
                self.set_sharding_config(parallelism)
            if parallelism.pp > 1 and self.sharding:
                from hyper_parallel.models.common.decoder_sharding import handover_plan

                self.sharding |= handover_plan(parallelism)
            if parallelism.cp > 1 and self.sharding:
                from hyper_parallel.models.common.context_parallel.plan import with_context_parallel

                self.sharding = with_context_parallel(self.sharding, parallelism)

        def _run_faults(self, trainer_config: Any) -> Iterator[Fault]:
            rows, parallelism = trainer_config.training.seq_len, trainer_config.parallelism
            if rows > self.max_position_embeddings:
                yield Fault(
                    "training.seq_len",
                    f"{rows} is above the model's max_position_embeddings {self.max_position_embeddings}",
                    "shorten the rows, or set rope_parameters and max_position_embeddings for longer ones",
                )
            yield from fullgraph_faults(trainer_config.compile)
            if parallelism.tp > 1:
                from hyper_parallel.models.common.decoder_sharding import divisibility_faults

                yield from divisibility_faults(self, parallelism, rows)
            if parallelism.ep > 1:
                from hyper_parallel.models.common.decoder_sharding import expert_faults

                yield from expert_faults(self, parallelism)
            if parallelism.cp > 1:
                from hyper_parallel.models.common.context_parallel.plan import context_parallel_faults

                yield from context_parallel_faults(self.num_attention_heads, parallelism, rows)
            if parallelism.pp > 1:
                yield from layer_faults(parallelism, self.num_hidden_layers)

        def set_sharding_config(self, parallelism: ParallelismConfig) -> None:
            """Fills in `sharding`, the tensor- and expert-parallel plan of the family, to which context parallelism
            adds. A family without a plan leaves it empty."""

        def block(self, layer: int) -> Block.Config:
            """Config of block `layer`, counted from 0."""
            return Block.Config(
                attention=Attention.Config(
                    hidden_size=self.hidden_size,
                    num_heads=self.num_attention_heads,
                    num_kv_heads=self.kv_heads,
                    head_dim=self.head_size,
                    bias=self.attention_bias,
                    norm_eps=self.rms_norm_eps,
                    init_std=self.initializer_range,
                    float64_rounding=self.float64_rounding,
                ),
                mlp=self.mlp(layer),
                norm_eps=self.rms_norm_eps,
                float64_rounding=self.float64_rounding,
            )

        def mlp(self, layer: int) -> FeedForward.Config | MoE.Config:
            """Config of what follows the attention in block `layer`."""
            return FeedForward.Config(
                hidden_size=self.hidden_size,
                intermediate_size=self.intermediate_size,
                init_std=self.initializer_range,
            )

    balance_coefficient: float = 0.0
    """Weight of the load-balancing loss. 0: it is not computed."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.config: Decoder.Config = config
        self.vocab_size = config.vocab_size
        self.max_seq_len = config.max_position_embeddings
        std = config.initializer_range
        self.embed_tokens = Embedding.Config(
            vocab_size=config.vocab_size, hidden_size=config.hidden_size, init_std=std
        ).build()
        self.layers = nn.ModuleList(config.block(layer).build() for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm.Config(
            size=config.hidden_size, eps=config.rms_norm_eps, float64_rounding=config.float64_rounding
        ).build()
        if not config.tie_word_embeddings:
            self.lm_head = Linear.Config(
                in_features=config.hidden_size, out_features=config.vocab_size, init_std=std
            ).build()
        self.rows = WholeRows.Config().build()
        self.balance = LoadBalancing.Config().build()
        self.vocabulary = WholeVocabulary.Config(vocab_size=config.vocab_size).build()
        self.logits_output = Output.Config().build()
        self.loss_output = Output.Config().build()
        self.handed_in = Handover.Config().build()
        self.handed_on = Handover.Config().build()
        self._kept_heads: set[str] = set()  # of attentions of the user's, which may call them or not
        self.experts_of_layer = {
            layer: block.mlp.num_experts for layer, block in enumerate(self.layers) if isinstance(block.mlp, MoE)
        }

    def apply_overrides(
        self, overrides: Sequence[PlanOverride], parallelism: ParallelismConfig, training: TrainingConfig
    ) -> None:
        super().apply_overrides(overrides, parallelism, training)
        fit_experts(self, self.config.sharding)
        self._kept_heads = kept_heads(self, self.config.sharding, parallelism.cp)

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
        tokens = input_ids_BT.shape[1]
        if tokens > self.max_seq_len:
            raise ValueError(f"rows of {tokens} tokens are above max_position_embeddings {self.max_seq_len}")
        rows = self.rows(input_ids_BT, position_ids_BT, cu_seqlens, labels_BT)

        hidden_BTC = self.handed_in(received[0]) if received else self.embed_tokens(rows.input_ids_BT)
        rope = rope_tables(
            self.config.rope_parameters,
            rows.position_ids_BT,
            head_dim=self.config.head_size,
            max_position_embeddings=self.max_seq_len,
            dtype=hidden_BTC.dtype,
        )
        stats: dict[int, RouterStats] = {}
        with calls_of(self, self._kept_heads):
            for layer, block in enumerate(self.layers):
                if block is not None:
                    hidden_BTC, block_stats = block(hidden_BTC, rope, rows.documents)
                    if block_stats is not None:
                        stats[layer] = block_stats
        totals = self._router_totals(received, list(stats.values()), hidden_BTC)
        output = ModelOutput(tokens_per_expert=self._tokens_per_expert(stats, hidden_BTC.device))
        if self.norm is None:
            return output._replace(sent=(self.handed_on(hidden_BTC), *(totals or ())))

        hidden_BTC = self.norm(hidden_BTC)
        if totals is not None:
            layer_tokens = rows.row_tokens * len(self.experts_of_layer)
            balance_B = self.balance(totals.tokens_BE, totals.probability_BE, layer_tokens)
            output = output._replace(aux_loss_sum=self.balance_coefficient * balance_B.sum())
        head = TiedHead(self.embed_tokens) if self.config.tie_word_embeddings else self.lm_head
        if loss_fn is None:
            logits_BTV = self.logits_output(hidden_BTC, lambda hidden_BTC: self.vocabulary(head(hidden_BTC)))
            return output._replace(logits=logits_BTV)
        if rows.labels_BT is None:
            raise ValueError("loss_fn is given without labels_BT")
        loss_sum = self.loss_output(hidden_BTC, lambda hidden_BTC: loss_fn(hidden_BTC, head, rows.labels_BT))
        return output._replace(loss_sum=loss_sum)

    def boundary(
        self, rows: int, tokens: int, dtype: torch.dtype, parallelism: ParallelismConfig
    ) -> tuple[torch.Tensor, ...]:
        """The residual stream and, where they are balanced, what the routers before it did (`RouterStats`)."""
        with torch.device("meta"):
            own_BT = self.rows(torch.empty(rows, tokens, dtype=torch.int64), None, None, None).input_ids_BT
            own_tokens = own_BT.shape[1] // parallelism.sequence_ranks()
            hidden_BTC = torch.empty(rows, own_tokens, self.config.hidden_size, dtype=dtype, requires_grad=True)
        return hidden_BTC, *self._router_boundary(rows, dtype)

    def _router_boundary(self, rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        if not (self.experts_of_layer and self.balance_coefficient):
            return ()
        rounds_float64 = self.config.float64_rounding == "transformers"
        wide = torch.float32 if rounds_float64 else torch.promote_types(dtype, torch.float32)
        tokens_BE = torch.empty(rows, max(self.experts_of_layer.values()), dtype=torch.int64, device="meta")
        return tokens_BE, torch.empty_like(tokens_BE, dtype=wide, requires_grad=True)

    def _router_totals(
        self, received: Sequence[torch.Tensor], stats: list[RouterStats], hidden_BTC: torch.Tensor
    ) -> RouterStats | None:
        """What all routers up to here did. None: there is no auxiliary loss to compute from it."""
        boundary = self._router_boundary(len(hidden_BTC), hidden_BTC.dtype)
        before = received[1:] or [torch.zeros_like(meta, device=hidden_BTC.device) for meta in boundary]
        return summed([RouterStats(*before), *stats]) if before else None

    def _tokens_per_expert(self, stats: dict[int, RouterStats], device: torch.device) -> torch.Tensor | None:
        if not self.experts_of_layer:
            return None
        counts = []
        for layer, experts in self.experts_of_layer.items():
            nothing_E = torch.zeros(experts, dtype=torch.int64, device=device)
            counts.append(stats[layer].tokens_BE.sum(0) if layer in stats else nothing_E)
        return torch.stack(counts)

    def blocks(self) -> list[nn.Module]:
        return [block for block in self.layers if block is not None]

    def flops_per_token(self, seq_len: int) -> float:
        """6 FLOPs per weight that a token meets and 12 per layer, head, head dim and token of the row (Chowdhery et
        al. 2022, PaLM, https://arxiv.org/abs/2204.02311, appendix B). A token meets its own experts only, and of the
        embedding a single row, which costs nothing; recomputation does not count."""
        config = self.config
        weights = config.hidden_size * config.vocab_size
        for block in self.layers:
            for name, parameter in block.named_parameters():
                share = block.mlp.config.top_k / block.mlp.config.num_experts if ".experts." in name else 1.0
                weights += parameter.numel() * share
        attended = config.num_hidden_layers * config.num_attention_heads * config.head_size * seq_len
        return 6.0 * weights + 12.0 * attended
