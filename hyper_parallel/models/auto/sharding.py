"""The parallel plan of a transformers model, derived from its modules: a pure function of the tree.

A layer is understood if it consists of norms, an attention, and a feed-forward layer or a router with stacked experts.
What a matrix is for is told by its name, and checked by its sizes. A module that has no place in the plan is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from hyper_parallel.config.errors import Fault
from hyper_parallel.config.sections import ParallelismConfig
from hyper_parallel.models.auto.conv1d import row_parallel_conv1d
from hyper_parallel.models.auto.experts import dispatched
from hyper_parallel.models.auto.layout import (
    Layout,
    is_attention,
    is_conv1d,
    is_norm,
    is_router,
    is_stacked_experts,
)
from hyper_parallel.models.auto.routing import tokens_of_ranks_by_row
from hyper_parallel.models.common.attention import HeadAttention
from hyper_parallel.models.common.context_parallel.plan import context_parallel_faults, with_context_parallel
from hyper_parallel.models.common.decoder_sharding import (
    FEATURE,
    ROW,
    column_linear,
    embedding_and_output,
    expert_count_faults,
    experts,
    head_attention,
    moe_layer,
    norm,
    router,
    row_linear,
    size_faults,
    split,
    split_layer,
    stream,
    whole,
)
from hyper_parallel.protocols.mesh import MeshAxisName
from hyper_parallel.protocols.sharding import LocalMap, ShardingConfig, ShardingPlan

COLUMNS = frozenset({"q_proj", "k_proj", "v_proj", "c_attn", "gate_proj", "up_proj", "c_fc", "fc1"})
"""Names of matrices that go from the stream to heads or intermediate features."""
ROWS = frozenset({"o_proj", "out_proj", "c_proj", "down_proj", "fc2"})
"""Names of those that go back."""


def sharding_plan(model: nn.Module, layout: Layout, parallelism: ParallelismConfig) -> ShardingPlan:
    """The plan over the axes tp, ep and cp, with one entry a module.

    Args:
        model: a PreTrainedModel for causal language modelling, after `adapt_modules`. `sharding_faults` tells what of
            it has no entry.
        layout: that of `model`.
    """
    embedding, place = model.get_submodule(layout.embedding), stream(parallelism)
    plan = embedding_and_output(
        parallelism,
        layout.embedding,
        None if _is_tied(model) else layout.head,
        vocab_size=model.config.vocab_size,
        padding_id=getattr(embedding, "padding_idx", None),
    )
    if type(embedding) is not nn.Embedding:  # it may do more than look up
        del plan[layout.embedding]
    for name, module in model.get_submodule(layout.base).named_children():
        name = f"{layout.base}.{name}"
        if is_norm(module):
            plan[name] = norm(place, bias=_has_bias(module), argument=_argument(module))
        elif type(module) is nn.Embedding and name != layout.embedding:  # of positions
            plan[name] = ShardingConfig(
                state_shardings={"weight": whole()}, out_src=(whole(),), out_dst=(place,), local_map=LocalMap()
            )
    for block in layout.blocks:
        for name, module in model.get_submodule(block).named_children():
            plan |= {
                ".".join(filter(None, (block, name, inner))): own
                for inner, own in _layer_plan(module, parallelism).items()
            }
    if layout.routers and parallelism.sequence_parallel:
        plan["tokens_by_row"] = ShardingConfig(local_map=LocalMap(forward=tokens_of_ranks_by_row))
    if parallelism.cp > 1:
        heads = [name for name, module in model.named_modules() if isinstance(module, HeadAttention)]
        plan = with_context_parallel(plan, parallelism, [name for name in heads if name in plan])
    return plan


def sharding_faults(
    model: nn.Module, layout: Layout, plan: ShardingPlan, parallelism: ParallelismConfig, seq_len: int | None
) -> Iterator[Fault]:
    """What of `model` its `plan` cannot spread over the ranks of axes tp, cp and ep. `seq_len`: None: any."""
    for name, module in model.named_modules():
        placed = plan[name].state_shardings if name in plan else {}
        if name == layout.head and _is_tied(model):
            continue
        if unplaced := [leaf for leaf, _ in module.named_parameters(recurse=False) if leaf not in placed]:
            kind = type(module).__name__
            fact = f"module {name} ({kind}) has no place in a parallel plan for its {', '.join(unplaced)}"
            yield Fault("model_spec", fact, "set tp, cp and ep 1, or choose another model")
        if parallelism.tp > 1 and isinstance(module, nn.Dropout) and module.p and not name.endswith("attn_dropout"):
            fact = f"module {name} drops {module.p} of what the ranks of tp share, and each would drop other parts"
            yield Fault("model_spec", fact, "set the field of config.json to 0 with model_spec.changes, or tp 1")
    if parallelism.tp > 1:
        is_split = parallelism.loss_parallel or not _is_tied(model)
        vocab_size = model.config.vocab_size if is_split else None
        sizes = _sizes(model, plan)
        yield from size_faults(sizes, parallelism, seq_len or parallelism.tp, vocab_size=vocab_size)
    if parallelism.ep > 1:
        counts = {len(module.down_proj) for module in model.modules() if is_stacked_experts(module)}
        yield from expert_count_faults(counts, parallelism.ep)
    if parallelism.cp > 1:
        rows = seq_len or model.config.max_position_embeddings
        yield from context_parallel_faults(model.config.num_attention_heads, parallelism, rows)


def _sizes(model: nn.Module, plan: ShardingPlan) -> dict[str, int]:
    """Whatever is split, by what it is called; of equal layers once."""
    config = model.config
    heads = config.num_attention_heads
    sizes = {"num_attention_heads": heads, "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads}
    for name, module in model.named_modules():
        parent, _, leaf = name.rpartition(".")
        if is_stacked_experts(module):
            sizes["moe_intermediate_size"] = module.down_proj.shape[-1]
        elif name in plan and leaf in ROWS and not is_attention(model.get_submodule(parent)):
            inner = _features(module)[0]
            if inner not in sizes.values():
                sizes[f"{name}.in_features"] = inner
    return sizes


def _layer_plan(module: nn.Module, parallelism: ParallelismConfig) -> ShardingPlan:
    """The plan of a child of a block and of what is below it, by name. Empty: it is not understood."""
    if is_norm(module):
        return {"": norm(stream(parallelism), bias=_has_bias(module), argument=_argument(module))}
    if not any(True for _ in module.parameters()):
        return {}
    if is_attention(module):
        return _attention_plan(module, parallelism)
    children = dict(module.named_children())
    routers = [name for name, child in children.items() if is_router(child)]
    stacks = [name for name, child in children.items() if is_stacked_experts(child)]
    if len(routers) == len(stacks) == 1 and len(children) == 2:
        place = split(0) if parallelism.sequence_parallel else whole()  # of tokens in one dim
        spread = experts(place, "hidden_states", "top_k_weights")
        forward = partial(dispatched, num_experts=len(children[stacks[0]].down_proj))
        return {
            "": moe_layer(_argument(module), parallelism),
            routers[0]: router(place, _argument(children[routers[0]])),
            stacks[0]: replace(spread, local_map=LocalMap(forward=forward, axis=MeshAxisName.EP)),
        }
    return _with_matrices(split_layer(_argument(module), parallelism), module)


def _attention_plan(module: nn.Module, parallelism: ParallelismConfig) -> ShardingPlan:
    """Each rank has some of the heads. Norms within are of single heads, and shared."""
    whole_layer = split_layer(_argument(module), parallelism)
    if "position_embeddings" in inspect.signature(module.forward).parameters:
        whole_layer = replace(whole_layer, in_src=whole_layer.in_src | {"position_embeddings": whole()})
    plan = _with_matrices(whole_layer, module)
    if not plan:
        return {}
    if hasattr(module, "split_size"):
        # The heads of three maps side by side are no part of a whole that a DTensor could describe.
        plan[""] = replace(plan[""], local_map=LocalMap(), sizes_per_rank=("split_size",))
    plan["heads"] = head_attention()
    for name, child in module.named_children():
        if is_norm(child) and child.weight.numel() == module.head_dim:
            plan[name] = norm(split(FEATURE), bias=_has_bias(child), argument=_argument(child))
    return plan


def _with_matrices(own: ShardingConfig, module: nn.Module) -> ShardingPlan:
    """A layer of matrices to the features that ranks share, and one back. Empty: it is none."""
    matrices = {n: child for n, child in module.named_children() if isinstance(child, nn.Linear) or is_conv1d(child)}
    columns = {name: child for name, child in matrices.items() if name in COLUMNS}
    rows = {name: child for name, child in matrices.items() if name in ROWS}
    if not columns or len(rows) != 1 or len(columns) + 1 != len(matrices):
        return {}
    ((row_name, row),) = rows.items()
    first = next(iter(columns.values()))
    if _features(first)[1] != _features(row)[0]:
        return {}
    plan = {"": own, row_name: row_linear(bias=_has_bias(row), argument=_argument(row))}
    plan |= {n: column_linear(bias=_has_bias(child), argument=_argument(child)) for n, child in columns.items()}
    for name, child in matrices.items():
        if is_conv1d(child):
            plan[name] = _of_conv1d(plan[name], child, is_row=name == row_name)
    return plan


def _of_conv1d(linear: ShardingConfig, module: nn.Module, *, is_row: bool) -> ShardingConfig:
    """The plan of a Linear, for a matrix that is stored the other way round."""
    if is_row:
        states = {"weight": split(ROW), "bias": whole()}
        return replace(linear, state_shardings=states, local_map=LocalMap(forward=row_parallel_conv1d))
    states = {name: split(parameter.dim() - 1) for name, parameter in module.named_parameters()}
    return replace(linear, state_shardings=states)


def _features(matrix: Any) -> tuple[int, int]:
    """Of the input and of one map's output."""
    shape = matrix.weight.shape
    return (shape[0], shape[-1]) if is_conv1d(matrix) else (shape[1], shape[0])


def _argument(module: nn.Module) -> str:
    """Name of the first argument of forward."""
    return next(iter(inspect.signature(module.forward).parameters))


def _has_bias(module: nn.Module) -> bool:
    return getattr(module, "bias", None) is not None


def _is_tied(model: Any) -> bool:
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight
