"""Context parallelism: the tokens of every row are spread over ranks, and attention is where they meet."""

from hyper_parallel.models.common.context_parallel.all_gather import AllGatherAttention
from hyper_parallel.models.common.context_parallel.ring import RingAttention
from hyper_parallel.models.common.context_parallel.spread_attention import SpreadAttention
from hyper_parallel.models.common.context_parallel.ulysses import UlyssesAttention

ATTENTIONS: dict[str, type[SpreadAttention]] = {
    "ring": RingAttention,
    "ulysses": UlyssesAttention,
    "allgather": AllGatherAttention,
}
"""Implementations by `parallelism.cp_method`."""
