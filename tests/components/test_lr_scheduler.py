from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from transformers import optimization as reference

from hyper_parallel.components.lr_scheduler import LRSchedulersContainer
from hyper_parallel.components.optimizer import AdamW, adopt
from hyper_parallel.config.errors import ConfigError

Config = LRSchedulersContainer.Config


def optimizers(lr: float = 1.0) -> AdamW:
    return AdamW.Config(lr=lr).build(model_parts=[nn.Linear(2, 2)])


def curve(config: Config, steps: int, lr: float = 1.0) -> list[float]:
    held = optimizers(lr)
    scheduler = config.build(optimizers=held, training_steps=steps)
    rates = []
    for _ in range(steps):
        assert scheduler.get_last_lr() == held.lr
        rates.append(held.lr)
        scheduler.step()
    return rates


def reference_curve(make: object, steps: int, lr: float, **settings: object) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = make(optimizer, **settings)
    rates = []
    for _ in range(steps):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


LR, STEPS, WARMUP = 3e-3, 50, 7
AGAINST_TRANSFORMERS = {
    "cosine": (Config(warmup_steps=WARMUP), reference.get_cosine_schedule_with_warmup, {"num_training_steps": STEPS}),
    "cosine to min_lr": (
        Config(warmup_steps=WARMUP, min_lr=3e-4),
        reference.get_cosine_with_min_lr_schedule_with_warmup,
        {"num_training_steps": STEPS, "min_lr": 3e-4},
    ),
    "linear": (
        Config(warmup_steps=WARMUP, decay_type="linear"),
        reference.get_linear_schedule_with_warmup,
        {"num_training_steps": STEPS},
    ),
    "constant": (
        Config(warmup_steps=WARMUP, decay_type="constant"),
        reference.get_constant_schedule_with_warmup,
        {},
    ),
    # A min_lr_ratio above 0 would lift transformers' warm-up too: only 0 coincides.
    "wsd": (
        Config(warmup_steps=WARMUP, decay_type="wsd", decay_steps=12),
        reference.get_wsd_schedule,
        {"num_decay_steps": 12, "num_training_steps": STEPS, "decay_type": "linear"},
    ),
}


@pytest.mark.parametrize("shape", AGAINST_TRANSFORMERS)
def test_follows_transformers_where_it_has_the_same_shape(shape: str) -> None:
    config, make, settings = AGAINST_TRANSFORMERS[shape]
    ours = curve(config, STEPS, LR)
    theirs = reference_curve(make, STEPS, LR, num_warmup_steps=WARMUP, **settings)
    assert ours == pytest.approx(theirs, rel=1e-12, abs=1e-18)


def test_the_first_step_of_warm_up_has_rate_zero_and_the_one_after_it_the_peak() -> None:
    rates = curve(Config(warmup_steps=4, decay_type="constant"), 6, lr=0.8)
    assert rates == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8, 0.8])
    assert curve(Config(decay_type="constant"), 2, lr=0.8) == [0.8, 0.8]


def test_ten_steps_of_the_cosine_in_figures() -> None:
    rates = curve(Config(warmup_steps=1, min_lr=1e-5), 10, lr=1e-4)
    expected = [0, 1e-4, 9.729e-5, 8.947e-5, 7.75e-5, 6.281e-5, 4.719e-5, 3.25e-5, 2.053e-5, 1.271e-5]
    assert rates == pytest.approx(expected, rel=1e-3)


def test_wsd_falls_over_the_last_steps_to_min_lr() -> None:
    rates = curve(Config(warmup_steps=2, decay_type="wsd", decay_steps=4, min_lr=0.2), 10)
    assert rates == pytest.approx([0, 0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4])


@pytest.mark.parametrize("decay_type", ["linear", "cosine"])
def test_a_fall_shorter_than_the_run_stays_at_min_lr(decay_type: str) -> None:
    config = Config(warmup_steps=2, decay_type=decay_type, decay_steps=4, min_lr=0.2)
    rates = curve(config, 10)
    middle = 0.2 + 0.8 * 0.5
    assert rates[2] == 1.0 and rates[4] == pytest.approx(middle)
    assert rates[6:] == [0.2] * 4
    # Beyond the end, too: the rate after the last step of a run.
    assert config.lr_at(1000, peak_lr=1.0, training_steps=10) == 0.2


def test_a_run_that_is_all_warm_up() -> None:
    assert curve(Config(warmup_steps=3), 3) == pytest.approx([0, 1 / 3, 2 / 3])


def test_each_group_has_its_own_peak_and_all_the_same_min_lr() -> None:
    model = nn.Linear(2, 2)
    groups = [{"params": [model.weight], "lr": 1.0}, {"params": [model.bias], "lr": 0.5}]
    held = adopt(torch.optim.SGD(groups, lr=9.0), [model])
    scheduler = Config(decay_type="linear", min_lr=0.1).build(optimizers=held, training_steps=2)
    scheduler.step()
    assert [g["lr"] for g in held.optimizers[0].param_groups] == pytest.approx([0.55, 0.3])


def test_resume_is_exact_and_wins_over_the_rate_in_the_optimizer_state() -> None:
    config = Config(warmup_steps=5, min_lr=1e-5)
    straight = curve(config, 40, lr=1e-3)
    first = optimizers(1e-3)
    scheduler = config.build(optimizers=first, training_steps=40)
    for _ in range(17):
        scheduler.step()
    state, optimizer_state = scheduler.state_dict(), copy.deepcopy(first.state_dict())

    second = optimizers(1e-3)
    resumed = config.build(optimizers=second, training_steps=40)
    second.load_state_dict(optimizer_state)
    resumed.load_state_dict(state)
    rates = []
    for _ in range(17, 40):
        rates.append(second.lr)
        resumed.step()
    assert rates == straight[17:]


def test_resuming_with_another_schedule_follows_the_new_one() -> None:
    held = optimizers(2.0)
    resumed = Config(decay_type="linear").build(optimizers=held, training_steps=100)
    resumed.load_state_dict({"step": 25})
    assert held.lr == 1.5


@pytest.mark.parametrize(
    ("settings", "paths"),
    [
        ({"warmup_steps": -1}, ["warmup_steps"]),
        ({"min_lr": -1e-5}, ["min_lr"]),
        ({"decay_type": "linear", "decay_steps": 0}, ["decay_steps"]),
        ({"decay_type": "wsd"}, ["decay_steps"]),
        ({"decay_type": "constant", "decay_steps": 5, "min_lr": 0.1}, ["decay_steps", "min_lr"]),
    ],
)
def test_impossible_settings(settings: dict[str, object], paths: list[str]) -> None:
    assert [fault.path for fault in Config(**settings).faults()] == paths


def test_a_schedule_longer_than_the_run() -> None:
    (fault,) = Config(warmup_steps=30).faults_for(20)
    assert str(fault) == (
        "lr_scheduler.warmup_steps: 30: with training.steps 20, warm-up does not fit; "
        "let warmup_steps and decay_steps add up to 20 or fewer"
    )
    assert list(Config(warmup_steps=20).faults_for(20)) == []
    assert len(list(Config(warmup_steps=15, decay_type="wsd", decay_steps=6).faults_for(20))) == 1
    with pytest.raises(ConfigError, match=r"^lr_scheduler\.warmup_steps: 30"):
        Config(warmup_steps=30).build(optimizers=optimizers(), training_steps=20)


def test_a_min_lr_above_the_peak_is_refused() -> None:
    (fault,) = Config(min_lr=0.01).faults_for(20, peak_lr=1e-3)
    assert (fault.path, fault.remedy) == ("lr_scheduler.min_lr", "lower min_lr or raise lr")
    with pytest.raises(ConfigError, match=r"^lr_scheduler\.min_lr: 0\.01 is above optimizer\.lr 0\.001[^\n]*$"):
        Config(min_lr=0.01).build(optimizers=optimizers(1e-3), training_steps=20)


def test_rates_stay_python_floats() -> None:
    held = optimizers()
    Config(warmup_steps=2).build(optimizers=held, training_steps=4).step()
    assert all(type(group["lr"]) is float and math.isfinite(group["lr"]) for group in held.optimizers[0].param_groups)
