"""A decoder taken apart for a pipeline: each part is the same model without what other parts own."""

from __future__ import annotations

import copy
from collections.abc import Collection

from hyper_parallel.config.sections import ParallelismConfig
from hyper_parallel.distributed.parallel_dims import ParallelDims
from hyper_parallel.distributed.pipeline_plan import layers_of_stages, stages_of_rank
from hyper_parallel.models.common.decoder import Decoder


def pipeline_decoder(model: Decoder, parallel_dims: ParallelDims, *, parallelism: ParallelismConfig) -> list[Decoder]:
    """The parts of `model` for the stages of this rank, in order. Parameters keep their names.

    Args:
        model: on meta, not parallelised yet; it is left as it is.
        parallel_dims: with its mesh built.

    Raises:
        TypeError: the sharding plan does not fit the whole model.
    """
    if model.config.sharding:
        model.check_plan()
    layers = layers_of_stages(parallelism, len(model.layers))
    return [
        part(model, layers[stage], is_first=stage == 0, is_last=stage == len(layers) - 1)
        for stage in stages_of_rank(parallelism, parallel_dims.pp_rank)
    ]


def part(model: Decoder, layers: Collection[int], *, is_first: bool, is_last: bool) -> Decoder:
    """A copy of `model` with `layers` alone; the first part has the embedding, the last one what follows the layers.

    A tied embedding is in both: the last part has a copy, for the output matrix.
    """
    made = copy.deepcopy(model)
    for layer in range(len(made.layers)):
        if layer not in layers:
            made.layers[layer] = None
    if not is_last:
        made.norm = None
        made.lm_head = None
    if not is_first:
        if is_last and model.config.tie_word_embeddings:
            made.copied_parameters = ("embed_tokens.weight",)
        else:
            made.embed_tokens = None
    made.forget_absent_plans()
    return made
