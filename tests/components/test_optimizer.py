from __future__ import annotations

import copy
import logging
import math

import pytest
import torch
from torch import nn

from hyper_parallel.components.optimizer import AdamW, OptimizersContainer, adopt, parameter_groups
from hyper_parallel.config.errors import ConfigError, Fault
from tests.distributed_world import run_world

IMPLEMENTATIONS = ("fused", "foreach", "for_loop")


class Net(nn.Module):
    """Every role but router, a tied pair, a frozen and an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.LayerNorm(6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unused = nn.Linear(6, 2, bias=False)
        self.head = nn.Linear(6, 11)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.frozen(self.norm(self.embed(ids))))


def net(seed: int = 0, dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(seed)
    return Net().to(dtype)


def train(model: nn.Module, optimizers: OptimizersContainer, first: int, last: int) -> None:
    for step in range(first, last):
        ids = torch.arange(step, step + 8).remainder(11).view(2, 4)
        nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.roll(1, 1).flatten()).backward()
        optimizers.step()
        optimizers.zero_grad()


def adamw(model: nn.Module, **settings: object) -> AdamW:
    return AdamW.Config(**settings).build(model_parts=[model], params=None, model=model)


def names_of(model: nn.Module, parameters: list[nn.Parameter]) -> set[str]:
    names = {id(p): name for name, p in model.named_parameters()}
    return {names[id(p)] for p in parameters}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_adamw_follows_the_algorithm_in_float64(implementation: str) -> None:
    lr, (b1, b2), eps, decay = 0.02, (0.8, 0.97), 1e-6, 0.3
    model = net()
    optimizers = adamw(model, lr=lr, betas=(b1, b2), eps=eps, weight_decay=decay, implementation=implementation)
    decays = {"embed.weight": decay, "unused.weight": decay, "norm.weight": 0.0, "norm.bias": 0.0, "head.bias": 0.0}
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    means = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in expected.items()}
    for t in range(1, 6):
        for i, (name, p) in enumerate(model.named_parameters()):
            if name not in decays:
                continue
            p.grad = torch.sin(torch.arange(p.numel(), dtype=p.dtype).view_as(p) + i + t)
            first, second = means[name]
            first = b1 * first + (1 - b1) * p.grad
            second = b2 * second + (1 - b2) * p.grad**2
            means[name] = first, second
            w = expected[name] * (1 - lr * decays[name])
            expected[name] = w - lr * (first / (1 - b1**t)) / ((second / (1 - b2**t)).sqrt() + eps)
        optimizers.step()
    for name, p in model.named_parameters():
        assert (p - expected[name]).abs().max() < 1e-12, name


def test_groups_go_by_role_and_hold_tied_weights_once_and_frozen_ones_never() -> None:
    model = net()
    decayed, undecayed = parameter_groups([model])
    assert names_of(model, decayed["params"]) == {"embed.weight", "unused.weight"}
    assert names_of(model, undecayed["params"]) == {"norm.weight", "norm.bias", "head.bias"}
    assert len(decayed["params"]) == 2
    assert "weight_decay" not in decayed and undecayed["weight_decay"] == 0.0


def test_a_name_with_norm_in_it_is_not_a_norm() -> None:
    model = nn.ModuleDict({"norm_proj": nn.Linear(2, 2, bias=False)})
    (group,) = parameter_groups([model])
    assert "weight_decay" not in group


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(ValueError, match="no parameter with requires_grad"):
        adamw(nn.Linear(2, 2).requires_grad_(False))


OTHERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.1),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.01, momentum=0.5, centered=True),
} | {name: None for name in IMPLEMENTATIONS}


def build(kind: str, model: nn.Module) -> OptimizersContainer:
    make = OTHERS[kind]
    if make is None:
        return adamw(model, lr=0.01, implementation=kind)
    return adopt(make(parameter_groups([model])), [model])


@pytest.mark.parametrize("kind", OTHERS)
def test_reloaded_state_goes_on_bitwise(kind: str) -> None:
    straight = net()
    optimizers = build(kind, straight)
    train(straight, optimizers, 0, 3)
    weights, state = copy.deepcopy(straight.state_dict()), copy.deepcopy(optimizers.state_dict())
    train(straight, optimizers, 3, 6)

    resumed = net(seed=1)
    resumed.load_state_dict(weights)
    fresh = build(kind, resumed)
    assert fresh.state_dict().keys() == state.keys()
    fresh.load_state_dict(state)
    train(resumed, fresh, 3, 6)
    for (name, a), b in zip(straight.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("kind", OTHERS)
def test_asking_a_fresh_optimizer_for_its_state_changes_nothing(kind: str) -> None:
    asked, left_alone = net(), net()
    a, b = build(kind, asked), build(kind, left_alone)
    state = a.state_dict()
    assert all(v == 0 for k, v in state.items() if k.endswith(".step"))
    train(asked, a, 0, 2)
    train(left_alone, b, 0, 2)
    for (name, p), q in zip(asked.named_parameters(), left_alone.named_parameters(), strict=True):
        assert torch.equal(p, q[1]), name


def test_gradients_and_rates_survive_a_save_between_backward_and_step() -> None:
    model = net()
    optimizers = adamw(model, lr=0.01)
    model(torch.tensor([[1, 2]])).sum().backward()
    before = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    optimizers.state_dict()
    assert optimizers.lr == 0.01
    assert {name for name, p in model.named_parameters() if p.grad is not None} == before.keys()
    assert all(torch.equal(model.get_parameter(name).grad, g) for name, g in before.items())


def test_state_is_named_after_parameters_one_without_gradient_included() -> None:
    model = net()
    optimizers = adamw(model)
    train(model, optimizers, 0, 2)
    state = optimizers.state_dict()
    trained = {"embed.weight", "norm.weight", "norm.bias", "head.bias", "unused.weight"}
    assert {k.removeprefix("state.").rpartition(".")[0] for k in state if k.startswith("state.")} == trained
    assert state["state.embed.weight.step"] == 2
    assert state["state.unused.weight.step"] == 0
    assert math.isclose(state["param_groups.embed.weight.weight_decay"], 0.1)


def test_wrappers_of_blocks_do_not_show_in_names() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = nn.Sequential(torch.compile(checkpoint_wrapper(nn.Linear(2, 2, bias=False)), backend="eager"))
    assert "state.0.weight.exp_avg" in adamw(model).state_dict()


def test_settings_of_this_run_outlive_those_of_the_checkpoint() -> None:
    old, new = net(), net()
    saved = adamw(old, weight_decay=0.1, betas=(0.9, 0.99), implementation="fused")
    train(old, saved, 0, 1)
    resumed = adamw(new, weight_decay=0.5, betas=(0.8, 0.9), implementation="for_loop")
    resumed.load_state_dict(copy.deepcopy(saved.state_dict()))
    decayed, undecayed = resumed.optimizers[0].param_groups
    assert (decayed["weight_decay"], undecayed["weight_decay"]) == (0.5, 0.0)
    assert (decayed["betas"], decayed["fused"], decayed["foreach"]) == ((0.8, 0.9), False, False)
    assert resumed.optimizers[0].state[new.embed.weight]["step"] == 1


def test_a_checkpoint_without_a_parameter_of_ours_is_refused() -> None:
    model = net()
    state = {k: v for k, v in adamw(model).state_dict().items() if ".norm.weight." not in k}
    with pytest.raises(KeyError, match=r"norm\.weight"):
        adamw(net()).load_state_dict(state)


def test_one_optimizer_for_each_model_part() -> None:
    parts = [nn.ModuleDict({"a": nn.Linear(2, 3)}), nn.ModuleDict({"b": nn.Linear(3, 2)})]
    optimizers = AdamW.Config().build(model_parts=parts)
    state = copy.deepcopy(optimizers.state_dict())
    assert len(list(optimizers)) == 2
    assert {k.split(".")[1] for k in state} == {"a", "b"}
    optimizers.load_state_dict(state)


def test_adopt_takes_torch_optimizers_of_this_model_only(caplog: pytest.LogCaptureFixture) -> None:
    model, other = net(), net()
    ours = adamw(model)
    assert adopt(ours, [model]) is ours
    with pytest.raises(ConfigError, match="optimizer: the target made a dict, which is neither"):
        adopt({}, [model])
    with pytest.raises(ConfigError, match=r"optimizer: SGD 0 holds 1 parameter\(s\) that its model part does not have"):
        adopt(torch.optim.SGD([other.head.bias], lr=1), [model])
    with pytest.raises(ConfigError, match=r"optimizer: 1 optimizer\(s\) for 2 model part\(s\)"):
        adopt(torch.optim.SGD(model.parameters(), lr=1), [model, other])
    with caplog.at_level(logging.WARNING):
        adopt(torch.optim.SGD([model.embed.weight, model.norm.weight, model.norm.bias], lr=1), [model])
    assert "unused.weight, head.bias" in caplog.text and "frozen" not in caplog.text


def test_the_rate_is_a_float_not_a_tensor() -> None:
    assert all(type(group["lr"]) is float for group in adamw(net()).optimizers[0].param_groups)


@pytest.mark.parametrize(
    ("settings", "path", "value"),
    [
        ({"lr": 0.0}, "lr", "0.0"),
        ({"lr": math.nan}, "lr", "nan"),
        ({"betas": (0.9, 1.0)}, "betas", "(0.9, 1.0)"),
        ({"betas": (-0.1, 0.9)}, "betas", "(-0.1, 0.9)"),
        ({"eps": 0.0}, "eps", "0.0"),
        ({"weight_decay": -0.1}, "weight_decay", "-0.1"),
    ],
)
def test_impossible_settings(settings: dict[str, object], path: str, value: str) -> None:
    faults: list[Fault] = list(AdamW.Config(**settings).faults())
    assert [fault.path for fault in faults] == [path]
    assert value in faults[0].fact
    assert list(AdamW.Config().faults()) == []


def sharded_case() -> dict[str, torch.Tensor]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def shard(model: Net) -> Net:
        return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))

    model = shard(net())
    optimizers = adamw(model, lr=0.01)
    train(model, optimizers, 0, 3)
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizers.state_dict())
    train(model, optimizers, 3, 5)

    resumed = shard(net(seed=1))
    fresh = adamw(resumed, lr=0.01)
    assert fresh.state_dict().keys() == state.keys()
    resumed.load_state_dict(weights)
    fresh.load_state_dict(state)
    train(resumed, fresh, 3, 5)
    for (name, a), b in zip(model.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a.to_local(), b.to_local()), name
    return {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in fresh.state_dict().items()}


def test_sharded_state_resumes_bitwise_and_is_that_of_one_process() -> None:
    model = net()
    optimizers = adamw(model, lr=0.01)
    train(model, optimizers, 0, 5)
    alone = optimizers.state_dict()
    for state in run_world(2, sharded_case):
        assert state.keys() == alone.keys()
        for key, value in alone.items():
            if key.startswith("state."):
                assert torch.allclose(state[key], value, rtol=0, atol=1e-12), key
