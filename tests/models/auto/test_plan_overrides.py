"""plan_overrides over two ranks, against transformers in one process: replacements, computations, inner attention."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from hyper_parallel.components.loss import ChunkedCELoss
from hyper_parallel.config.errors import ConfigError, RunError
from hyper_parallel.config.sections import ParallelismConfig, TrainingConfig
from hyper_parallel.config.target import Target
from hyper_parallel.distributed.construction import construct_on_meta
from hyper_parallel.distributed.distributed_setup import DistributedSetup
from hyper_parallel.distributed.parallel_dims import ParallelDims
from hyper_parallel.models.auto import HyperAutoModelForCausalLM
from hyper_parallel.models.auto.attention import sdpa_hf
from hyper_parallel.models.auto.causal_lm import AutoCausalLM
from hyper_parallel.models.common.attention import HeadAttention
from hyper_parallel.models.common.context_parallel.inner_wrapper import sdpa_qkv
from hyper_parallel.models.common.context_parallel.spread_attention import OwnTokensError
from hyper_parallel.models.qwen3_moe.adapter import replacements
from hyper_parallel.protocols.injected_compute import InjectedCompute
from hyper_parallel.protocols.plan_override import PlanOverride
from hyper_parallel.protocols.sharding import PlacementMismatchError
from tests.distributed_world import run_world
from tests.models.auto import override_parts as parts
from tests.models.auto.folders import FAMILIES, save, tiny_model
from tests.models.reference import widened
from tests.test_docs import EXTENDING, snippets

TOLERANCE = 1e-12
DOCUMENTS = [0, 5, 32, 33, 64]
MODELLING = "transformers.models"
ATTENTION, MLP, EXPERTS = "model.layers.*.self_attn", "model.layers.*.mlp", "model.layers.*.mlp.experts"
CORED = PlanOverride(
    match=ATTENTION,
    module_type=f"{MODELLING}.qwen3.modeling_qwen3.Qwen3Attention",
    replace_module=Target.of(parts.cored),
)
HF_CORED = CORED.derive(replace_module=Target.of(parts.cored, hf=True))
SHIPPED = [
    PlanOverride(
        match=match, module_type=f"{MODELLING}.qwen3_moe.modeling_qwen3_moe.{kind}", replace_module=Target.of(factory)
    )
    for match, kind, factory in (
        (ATTENTION, "Qwen3MoeAttention", replacements.replace_attention),
        (EXPERTS, "Qwen3MoeExperts", replacements.replace_experts),
        ("model.layers.*.input_layernorm", "Qwen3MoeRMSNorm", replacements.replace_rms_norm),
    )
]
CORE_BOUNDARY = PlanOverride(
    match=f"{ATTENTION}.core", params={}, in_src={"q": "shard(2)", "k": "shard(2)", "v": "shard(2)"}, out_src=("none",)
)


def inner(wrapper: Any, target: str = "core", **more: Any) -> PlanOverride:
    return PlanOverride(
        match=ATTENTION, inner_target=target, inner_wrapper=wrapper, **{"region_dispatch": False, **more}
    )


def computed(match: str | tuple[str, ...], factory: Any, *, dispatch: bool = False, **arguments: Any) -> PlanOverride:
    return PlanOverride(match=match, local_compute_fn=Target.of(factory, **arguments), region_dispatch=dispatch)


def experts(factor: float) -> PlanOverride:
    return SHIPPED[1].derive(replace_module=Target.of(parts.dense, factor=factor))


EVERY_RANK = [
    PlanOverride(match=MLP, out_src=("replicate",)),
    PlanOverride(
        match=tuple(f"{MLP}.{name}_proj" for name in ("gate", "up", "down")),
        params={"weight": "replicate"},
        in_src={"input": "replicate"},
        out_src=("replicate",),
    ),
]
"""A layer that is computed as a whole by each."""
DOWN, OUT = f"{MLP}.down_proj", f"{ATTENTION}.o_proj"
SUMMED_WITHIN = [
    *(PlanOverride(match=last, out_src=("partial",), out_dst=("replicate",)) for last in (DOWN, OUT)),
    *(PlanOverride(match=layer, out_src=("replicate",)) for layer in (MLP, ATTENTION)),
]
"""Layers that sum in their last matrix."""
GATHERED = [
    PlanOverride(
        match=DOWN,
        params={"weight": "replicate"},
        in_src={"input": "shard(2)"},
        in_dst={"input": "replicate"},
        out_src=("replicate",),
    ),
    PlanOverride(match=MLP, out_src=("replicate",)),
    PlanOverride(match=OUT, out_dst=("partial",)),
]
"""One that is whole on each rank, from what is gathered; and a sum that is left one."""
INTO = tuple(f"{MLP}.{name}_proj" for name in ("gate", "up"))
CUT = [PlanOverride(match=INTO, params={"weight": "replicate"}, out_src=("replicate",), out_dst=("shard(2)",))]
"""Nothing in it divides what it is given, though it ends in a sum."""
OWN_ROWS = [computed(INTO, parts.own_rows).derive(params={"weight": "replicate"})]
WHOLE_EMBEDDING = [
    PlanOverride(match="model.embed_tokens", params={"weight": "replicate"}, out_src=("replicate",)),
    PlanOverride(match=ATTENTION, in_src={"hidden_states": "replicate", "attention_mask": "replicate"}),
]
"""And arguments that are None, or not named and stay where they are."""
TP, CP, EP = {"tp": 2}, {"cp": 2}, {"dp_shard": 2, "ep": 2}
VALIDATE = {"mode": "validate"}
CASES: dict[str, tuple[dict[str, Any], list[PlanOverride]]] = {
    "qwen3: mlp computed in chunks, sequence parallel": (
        TP | {"sequence_parallel": True},
        [computed(MLP, parts.chunked, chunks=3)],
    ),
    "qwen3: the same and an own attention, validated, on local tensors, documents": (
        TP | VALIDATE,
        [computed(MLP, parts.chunked), CORED, inner("sdpa_qkv")],
    ),
    "qwen3: the same on DTensors": (
        TP | VALIDATE,
        [
            computed(MLP, parts.chunked, dispatch=True),
            CORED,
            CORE_BOUNDARY,
            inner("sdpa_qkv", region_dispatch=True, inner_out_src={"tp": "shard(2)"}),
        ],
    ),
    "qwen3: mlp computed by every rank": (TP, EVERY_RANK),
    "qwen3: layers that sum within": (TP, SUMMED_WITHIN),
    "qwen3: a matrix from what is gathered": (TP, GATHERED),
    "qwen3: features that are cut": (TP | {"sequence_parallel": True}, CUT),
    "qwen3: rows of matrices that each rank has whole": (TP, OWN_ROWS),
    "qwen3: an embedding on every rank, validated": (TP | VALIDATE, WHOLE_EMBEDDING),
    "qwen3: an own attention around sdpa_qkv, documents": (CP, [CORED, inner("sdpa_qkv", when="cp")]),
    "qwen3: around sdpa_hf, documents": (CP | {"cp_method": "allgather"}, [HF_CORED, inner("sdpa_hf")]),
    "qwen3: a wrapper of the user's in transformers' attention": (CP, [inner(Target.of(parts.masked), "heads")]),
    "qwen3_moe: what ships, documents": (CP | {"ep": 2}, SHIPPED),
    "qwen3_moe: what ships, routers whose outputs are not moved, validated": (
        TP | VALIDATE,
        [*SHIPPED, PlanOverride(match="model.layers.*.mlp.gate", out_src=("auto", "none", "none"), out_dst="none")],
    ),
    "qwen3_moe: experts of the user's behind the exchange": (EP, [experts(1.0)]),
}
WRONG = {
    "qwen3: mlp, wrong": (TP, [computed(MLP, parts.chunked, factor=1 + 1e-6)]),
    "qwen3: a wrapper that sees its own tokens alone": (CP, [CORED, inner(Target.of(parts.masked, sees_all=False))]),
    "qwen3_moe: experts, wrong": (EP, [experts(1 + 1e-6)]),
}
"""What must be seen."""
SHOWN = "qwen3_moe: as the docs show it, documents"
MOE = {"router_aux_loss_coef": 0.0, "output_router_logits": False}

Numbers = tuple[float, dict[str, torch.Tensor]]


def tokens() -> torch.Tensor:
    return torch.randint(0, 64, (2, 33), generator=torch.Generator().manual_seed(1))


def built(folder: str, parallelism: ParallelismConfig, rules: list[PlanOverride]) -> Any:
    dims = ParallelDims.from_config(parallelism, dist.get_world_size())
    dims.build_mesh("cpu")
    setup = DistributedSetup(parallel_dims=dims, parallelism=parallelism, plan_overrides=tuple(rules))
    training = TrainingConfig(dtype="float64")
    return HyperAutoModelForCausalLM.from_pretrained(folder, distributed_setup=setup, training=training), dims


def numbers(model: Any, dims: ParallelDims, documents: list[int] | None) -> Numbers:
    """The loss over two rows and the gradients, put together from all ranks."""
    ids = tokens()[dims.dp_rank : dims.dp_rank + 1] if dims.dp_size > 1 else tokens()
    loss_fn = ChunkedCELoss.Config().build(vocab_size=64)
    with widened(model):
        out = model(ids[:, :-1], labels_BT=ids[:, 1:], loss_fn=loss_fn, cu_seqlens=documents)
        out.loss_sum.backward()
    loss = out.loss_sum.detach().clone()
    dist.all_reduce(loss, group=dims.loss_group)
    return loss.item(), {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def run_cases(folders: dict[str, str], root: str) -> tuple[dict[str, Numbers], list[str]]:
    sys.path.insert(0, root)
    from documented import gathered_experts

    shown = [computed(EXPERTS, gathered_experts).derive(when="ep"), inner("sdpa_qkv", "heads", when="cp")]
    found = {}
    for name, (settings, rules) in (CASES | WRONG | {SHOWN: (CP | {"ep": 2}, shown)}).items():
        parallelism = ParallelismConfig(**{"dp_shard": 1, **settings})
        model, dims = built(folders[name.partition(":")[0]], parallelism, rules)
        found[name] = numbers(model, dims, DOCUMENTS if name.endswith("documents") else None)
    _, (*rules, last) = CASES["qwen3: the same on DTensors"]
    parallelism = ParallelismConfig(**TP, **VALIDATE, dp_shard=1)
    wrong = built(folders["qwen3"], parallelism, [*rules, last.derive(inner_out_src={"tp": "replicate"})])
    with pytest.raises(PlacementMismatchError) as caught:
        numbers(*wrong, None)
    told = [str(caught.value)]
    surplus = PlanOverride(match=MLP, out_src=("auto", "replicate"), out_dst=("auto", "none"))
    dims = PlanOverride(match=MLP, in_src={"x": "shard(7)"})
    for rule in (surplus, dims):
        for mode in ("production", "validate"):
            parallelism = ParallelismConfig(**TP, dp_shard=1, mode=mode)
            with pytest.raises(RunError) as refused:
                numbers(*built(folders["qwen3"], parallelism, [rule]), None)
            told.append(str(refused.value))
    return found, told


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Numbers], list[str]]:
    """By case, and by family with and without documents; and what is told of wrong boundaries."""
    root = tmp_path_factory.mktemp("cases")
    models = {family: tiny_model(family, **(MOE if family == "qwen3_moe" else {})) for family in ("qwen3", "qwen3_moe")}
    (snippet,) = (text for text in snippets(EXTENDING) if "@local_compute" in text)
    (root / "documented.py").write_text(snippet)
    folders = {family: save(model, root / family) for family, model in models.items()}
    (results, told), _ = run_world(2, run_cases, folders, str(root), timeout=200)
    for family, model in models.items():
        for documents in (None, DOCUMENTS):
            results[f"{family}, {documents}"] = reference(model, documents or [0, 32, 64])
    return results, told


def reference(model: Any, bounds: list[int]) -> Numbers:
    """One document after the other."""
    ids, labels = (x.flatten().tensor_split(bounds[1:-1]) for x in (tokens()[:, :-1], tokens()[:, 1:]))
    model.zero_grad()
    with widened(model):
        losses = [
            F.cross_entropy(model(input_ids=ids_T[None]).logits[0], labels_T, reduction="sum")
            for ids_T, labels_T in zip(ids, labels, strict=True)
        ]
        loss = torch.stack(losses).sum()
        loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}


def difference(results: dict[str, Numbers], name: str) -> float:
    loss, gradients = results[name]
    documents = DOCUMENTS if name.endswith("documents") else None
    expected_loss, expected = results[f"{name.partition(':')[0]}, {documents}"]
    assert gradients.keys() == expected.keys()
    worst = [abs(loss - expected_loss) / expected_loss]
    for key, gradient in expected.items():
        scale = gradient.abs().max()
        assert scale > 1e-3, key
        worst.append(((gradients[key].view_as(gradient) - gradient).abs().max() / scale).item())
    return max(worst)


@pytest.mark.parametrize("name", [*CASES, SHOWN])
def test_follows_transformers_in_one_process(found: Any, name: str) -> None:
    assert difference(found[0], name) <= TOLERANCE


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_one_is_seen(found: Any, name: str) -> None:
    assert difference(found[0], name) > 1e-7


def test_a_wrong_boundary_is_told(found: Any) -> None:
    assert "'model.layers.0.self_attn.o_proj': argument input is declared Shard(dim=2) on mesh axis 'tp'" in found[1][0]


@pytest.mark.parametrize(
    ("i", "fact"),
    [
        (1, "mlp': out_src says how output 1 lies, but forward gives 1 tensor(s); leave out what it has not"),
        (3, "mlp': argument x is declared Shard(dim=7), but has 3 dims; correct this module's entry in the sharding "),
    ],
)
def test_what_a_tensor_has_not_is_told_in_both_modes(found: Any, i: int, fact: str) -> None:
    for told in found[1][i : i + 2]:
        assert told.startswith(f"plan of module 'model.layers.0.{fact}")


def overridden(
    rules: list[PlanOverride],
    training: TrainingConfig | None = None,
    *,
    family: str = "qwen3",
    changes: dict[str, Any] | None = None,
    **degrees: int,
) -> AutoCausalLM:
    """A model on meta, of which `rules` are applied as on each of several ranks."""
    config_class, sizes = FAMILIES[family]
    config = AutoCausalLM.Config(content=config_class(vocab_size=64, **sizes).to_dict(), changes=changes or {})
    parallelism = ParallelismConfig(**degrees)
    config.set_sharding_config(parallelism)
    model = construct_on_meta(config, torch.float32)
    assert isinstance(model, AutoCausalLM)
    model.apply_overrides(rules, parallelism, training or TrainingConfig())
    return model


def test_an_attention_that_would_see_the_tokens_of_one_rank_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"\[HP-REPLACE-002\] model.layers.\*.self_attn is replaced without its heads, "
    ):
        overridden([CORED], cp=2)
    model = overridden([CORED], tp=2)  # each rank has whole rows
    assert "model.layers.0.self_attn.heads" not in model.config.sharding
    model.check_plan()


class Renamed(torch.nn.Module):
    """With names of its own, and a module where ours would stand."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = torch.nn.Identity()

    def forward(self, mod: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, **kwargs: Any) -> Any: ...


def test_sdpa_hf_goes_by_position() -> None:
    dims: Any = SimpleNamespace(meshes=[None], tp_mesh=None, cp_mesh=None, ep_mesh=None)
    wrapper = InjectedCompute(factory=Target.of(sdpa_hf), kind="inner_wrapper", path="plan_overrides.1.inner_wrapper")
    q, k, v = torch.randn(3, 1, 2, 4, 8, dtype=torch.float64)
    out, _ = wrapper.forward_of(Renamed(), "core", dims)(None, q, k, v, None, scaling=0.3, documents=None)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3).transpose(1, 2)
    torch.testing.assert_close(out, expected)
    for module, fact in (
        (HeadAttention.Config().build(), "HeadAttention takes q_BTHD, k_BTKD, v_BTKD, rope, documents, and sdpa_hf"),
        (torch.nn.Linear(1, 1), "Linear takes no documents, which say what sees what; take documents, and hand on"),
    ):
        with pytest.raises(ConfigError) as caught:
            wrapper.forward_of(module, "core", dims)
        told = f"plan_overrides.1.inner_wrapper: [HP-REPLACE-002] core: forward of {fact}"
        assert str(caught.value).startswith(told)


def test_only_what_is_new_stands_in_for_the_attention_of_all_ranks() -> None:
    norm = computed(f"{ATTENTION}.q_norm", parts.chunked)
    with pytest.raises(
        ConfigError, match=r"plan_overrides.0.replace_module: .* replaced without its heads, which sees all ranks of cp"
    ):
        overridden([CORED, norm], cp=2)
    assert overridden([CORED, norm, inner("sdpa_qkv")], cp=2).replaced_modules


@pytest.mark.parametrize(
    ("match", "kind", "degrees", "fact"),
    [
        ("model.embed_tokens", "torch.nn.Embedding", TP, "model.embed_tokens is replaced, but tp computes it by vocab"),
        (
            f"{ATTENTION}.heads",
            "hyper_parallel.models.common.attention.HeadAttention",
            CP,
            r"model.layers.\*.self_attn.heads is replaced, but cp computes it by spread_head_attention, so its forward",
        ),
        ("lm_head", "torch.nn.Linear", TP, "lm_head is replaced, but a loss reads its weight and does not call it"),
    ],
)
def test_a_replacement_whose_forward_would_not_run(match: str, kind: str, degrees: dict[str, int], fact: str) -> None:
    rule = PlanOverride(match=match, module_type=kind, replace_module=Target.of(parts.renamed))
    with pytest.raises(ConfigError, match=rf"plan_overrides.0.replace_module: \[HP-REPLACE-002\] {fact}"):
        overridden([rule], **degrees)
    if not match.startswith("lm"):
        other = CP if degrees is TP else TP
        assert overridden([rule], **other).replaced_modules  # there it runs
        instead = computed(match, parts.chunked)
        assert overridden([rule, instead], **degrees).replaced_modules


def test_a_computation_that_a_loss_does_not_call() -> None:
    with pytest.raises(
        ConfigError, match=r"plan_overrides.0.local_compute_fn: \[HP-REPLACE-002\] a loss reads the weig"
    ):
        overridden([computed("lm_head", parts.chunked)], tp=2)


def test_experts_within_a_replaced_layer_are_kept_out_of_graphs_too() -> None:
    rule = PlanOverride(
        match=MLP,
        module_type=f"{MODELLING}.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
        replace_module=Target.of(parts.block_of_dense),
    )
    layer = overridden([rule], family="qwen3_moe", changes={"mlp_only_layers": []}, dp_shard=2, ep=2).blocks()[0]
    experts: Any = layer.get_submodule("mlp.experts")
    assert type(experts) is parts.DenseExperts and experts.run_eagerly(lambda: 3) == 3


def test_an_inner_attention_that_is_not_told_of_other_ranks() -> None:
    core = parts.Core()
    x = torch.zeros(1, 4, 2, 8)
    assert sdpa_qkv(core, None, None, None, None)(x, x, x, documents=None).shape == x.shape
    with pytest.raises(
        OwnTokensError, match=r"Core is called with documents None, so each rank of cp sees its own tokens al"
    ):
        sdpa_qkv(core, None, None, object(), None)(x, x, x, documents=None)


def test_sdpa_qkv_does_what_it_is_asked_for_or_refuses() -> None:
    class Scaled(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any, documents: Any, scale: Any = None, mask: Any = None) -> Any:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale).transpose(1, 2)

    x = torch.randn(1, 4, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    compute = sdpa_qkv(Scaled(), None, None, None, None)
    for scale in (None, 0.05):
        expected = Scaled()(x, 2 * x, x, None, scale=scale)
        torch.testing.assert_close(compute(x, 2 * x, x, None, scale, None), expected, rtol=0, atol=1e-14)
    with pytest.raises(
        RunError, match=r"^Scaled is called with mask, which sdpa_qkv does not do; leave it out, or wri"
    ):
        compute(x, x, x, None, None, torch.zeros(4, 4))


def test_an_attention_that_keeps_heads_and_does_not_call_them() -> None:
    def forward(model: AutoCausalLM) -> Any:
        model.to_empty(device="cpu").init_weights(seed=1)
        return model(torch.arange(8)[None], cu_seqlens=documents)

    documents, kept = None, CORED.derive(replace_module=Target.of(parts.cored, keeps_heads=True))
    with pytest.raises(OwnTokensError, match=r"model.layers.0.self_attn.heads was not called, so each rank of cp sees"):
        forward(overridden([kept], cp=2))
    assert forward(overridden([kept], tp=2)).logits is not None
    assert forward(overridden([kept, inner("sdpa_qkv")], cp=2)).logits is not None  # it is called in their place
    documents = [0, 3, 8]
    model = overridden(SHIPPED[:1], family="qwen3_moe", cp=2)
    heads: Any = model.get_submodule("model.layers.0.self_attn.heads")
    assert forward(model).logits is not None and heads.was_called


def test_low_precision_is_what_is_computed_in() -> None:
    rule = CORED.derive(when="low_precision")
    for dtype, mixed, is_replaced in (
        ("float32", None, False),
        ("bfloat16", None, True),
        ("float32", "bfloat16", True),
        ("bfloat16", "float32", False),
    ):
        training = TrainingConfig(dtype=dtype, mixed_precision_param=mixed)  # type: ignore[arg-type]
        assert bool(overridden([rule], training).replaced_modules) is is_replaced


def test_what_the_model_has_not_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        overridden([CORED, inner("sdpa_qkv", "croe")], cp=2)
    fact = "plan_overrides.1.inner_target: there is no module model.layers.*.self_attn.croe; near: model.layers.*.self"
    assert str(caught.value).startswith(fact) and "\n" not in str(caught.value)
    with pytest.raises(
        ConfigError, match=r"model.layers.\*.self_attn.core has no boundary, by which its arguments becom"
    ):
        overridden([CORED, inner("sdpa_qkv", region_dispatch=True)], tp=2)
    with pytest.raises(
        ConfigError, match=r"region_dispatch: True, but the model's plan computes model.layers.\*.input_l"
    ):
        overridden([computed("model.layers.*.input_layernorm", parts.chunked, dispatch=True)], tp=2)
