"""What the modules of a transformers model are for, told from the tree; what cannot be told is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from hyper_parallel.config.errors import Fault
from hyper_parallel.models.auto.composition import strange_composition


@dataclass(frozen=True, slots=True)
class Layout:
    """The parts of a causal language model, by name."""

    base: str
    """The model without its output matrix, in which all else lies."""
    embedding: str
    """Vectors of the tokens."""
    head: str
    """The output matrix."""
    blocks: tuple[str, ...]
    """The repeated layers, in order."""
    routers: tuple[str, ...]
    """The routers of the layers with experts, in order."""


def layout_of(model: nn.Module) -> Layout:
    """The layout of `model`, a PreTrainedModel for causal language modelling. `layout_faults` tells what is amiss."""
    names = {id(module): name for name, module in model.named_modules()}
    kinds = set(model._no_split_modules or ())
    return Layout(
        base=model.base_model_prefix,
        embedding=names.get(id(model.get_input_embeddings()), ""),
        head=names.get(id(model.get_output_embeddings()), ""),
        blocks=tuple(name for name, module in model.named_modules() if type(module).__name__ in kinds),
        routers=tuple(name for name, module in model.named_modules() if is_router(module)),
    )


def layout_faults(model: nn.Module, layout: Layout) -> Iterator[Fault]:
    """Modules of `model` that are not understood: their parallel plan, or their numbers, would be a guess."""
    kind, config = type(model).__name__, model.config
    if getattr(config, "is_encoder_decoder", False) or not model._supports_attention_backend:
        yield _fault(kind, "is no decoder whose attention can be chosen (its _supports_attention_backend is False)")
        return
    if window := getattr(config, "sliding_window", None):
        yield _fault(kind, f"has a sliding window of {window} tokens, which is not implemented")
    children = {name for name, _ in model.named_children()}
    if not layout.embedding or not layout.head or children != {layout.base, layout.head}:
        yield _fault(kind, f"consists of {', '.join(sorted(children))}, not of a base model and an output matrix")
        return
    head = model.get_submodule(layout.head)
    if not isinstance(head, nn.Linear) or head.bias is not None:
        yield _fault(layout.head, f"is a {type(head).__name__}, not a Linear without bias")
    if not layout.blocks or len({name.rpartition(".")[0] for name in layout.blocks}) > 1:
        yield _fault(kind, f"has its layers ({', '.join(model._no_split_modules or ())}) not in one list")
        return
    for name, module in model.named_modules():
        if reason := _strangeness(name, module, layout):
            yield _fault(name, f"({type(module).__name__}) {reason}")
    if layout.routers and not hasattr(config, "router_aux_loss_coef"):
        yield _fault(kind, "has routers, but its config no router_aux_loss_coef")
    if reason := strange_composition(model, layout):
        yield _fault(kind, reason)


def _fault(module: str, fact: str) -> Fault:
    return Fault("model_spec", f"module {module} {fact}", "choose another model: this one is not understood")


def _strangeness(name: str, module: nn.Module, layout: Layout) -> str | None:
    """Why `module` is not understood. None: it is."""
    block = next((block for block in layout.blocks if name == block or name.startswith(f"{block}.")), None)
    if is_attention(module):
        if not getattr(module, "is_causal", False):
            return "is not causal"
        if dropout := _attention_dropout(module):
            return f"drops {dropout} of its weights, which is not implemented: set the field of config.json to 0"
    if not any(True for _ in module.parameters(recurse=False)):
        return None
    if name == layout.head or (isinstance(module, nn.Embedding) and block is None):
        return None
    if is_norm(module):
        return None
    if block is None:
        return "stands outside of the layers, and is neither an embedding nor a norm"
    if is_conv1d(module) or type(module) is nn.Linear or is_router(module):
        return None
    if is_stacked_experts(module):
        return _strange_experts(module)
    return "is neither a matrix, a norm, a router nor stacked experts"


def _strange_experts(module: nn.Module) -> str | None:
    """Why these experts are not ours by another name. None: they are."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    config: Any = getattr(module, "config", None)
    converters = get_checkpoint_conversion_mapping(getattr(config, "model_type", "")) or ()
    patterns = {tuple(getattr(converter, "source_patterns", ())) for converter in converters}
    if ("mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight") not in patterns:
        return "has another layout in checkpoints than Qwen's"
    if not isinstance(module.act_fn, nn.SiLU) and type(module.act_fn).__name__ != "SiLUActivation":
        return f"has {type(module.act_fn).__name__} between its matrices, not silu"
    plain = module.is_concatenated and module.has_gate and not (module.is_transposed or module.has_bias)
    if not plain or module.has_post_expert_norm:
        return "does not consist of a gate, an up and a down matrix alone"
    return None


def is_attention(module: nn.Module) -> bool:
    """Whether it calls the attention function that its config names."""
    return type(module).__name__.endswith("Attention")


def _attention_dropout(module: nn.Module) -> float:
    dropped = getattr(module, "attn_dropout", None)  # of GPT-2's kind
    return dropped.p if isinstance(dropped, nn.Dropout) else getattr(module, "attention_dropout", 0.0)


def is_norm(module: nn.Module) -> bool:
    """Whether it normalises the last dim, and has vectors to scale and shift it."""
    return type(module).__name__.endswith("Norm") and all(p.dim() == 1 for p in module.parameters(recurse=False))


def is_router(module: nn.Module) -> bool:
    """Whether it gives logits, weights and indices of the chosen experts, as softmax routers of transformers do."""
    names = {name for name, _ in module.named_parameters(recurse=False)}
    return type(module).__name__.endswith("TopKRouter") and names == {"weight"} and hasattr(module, "top_k")


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is a matrix stored [in, out], with a bias."""
    return type(module).__name__ == "Conv1D"


def is_stacked_experts(module: nn.Module) -> bool:
    """Whether it has the matrices of several experts, with gate above up."""
    return {leaf for leaf, _ in module.named_parameters(recurse=False)} == {"gate_up_proj", "down_proj"}
