"""Settings that no run can have: each is one fault, found before anything is made."""

from __future__ import annotations

import pytest

from hyper_parallel.config import manager
from hyper_parallel.config.errors import ConfigError
from hyper_parallel.trainer import HyperTrainer

TOKENIZER_REMEDY = "give a folder with a tokenizer.json, as transformers' save_pretrained() writes it"


@pytest.mark.parametrize(
    ("flag", "value", "fault"),
    [
        ("training.steps", "-5", "-5 is below 1; give 1 or more"),
        ("training.max_grad_norm", "nan", "nan is not above 0; give a positive norm, or None"),
        ("training.seed", str(2**64), f"{2**64} is above {2**63 - 1}; give {2**63 - 1} or less"),
        ("comm.timeout_seconds", "1" + "0" * 20, f"1{'0' * 20} is above {2**31 - 1}; give {2**31 - 1} or less"),
        ("lr_scheduler.min_lr", "nan", "nan is below 0; give 0 or more"),
        ("optimizer.lr", "inf", "inf is not finite; give a positive learning rate, such as 3e-4"),
        ("optimizer.weight_decay", "inf", "inf is not finite; give 0 (no decay) or more"),
        ("parallelism.dp_replicate", "0", "0 is below 1; give 1 or more"),
        ("parallelism.dp_shard", "-2", "-2 is neither -1 nor above 0; give -1 for all ranks that are left"),
        ("tokenizer.path", "nowhere", f"nowhere is missing; {TOKENIZER_REMEDY}"),
        ("hf_assets_path", "nowhere", f"nowhere is missing; {TOKENIZER_REMEDY}"),
    ],
)
def test_one_fault(flag: str, value: str, fault: str) -> None:
    with pytest.raises(ConfigError) as error:
        manager.load(HyperTrainer.Config, ["--model_spec", "qwen3_moe", f"--{flag}", value], world_size=1)
    assert str(error.value) == f"{flag}: {fault}"


def test_ranks_that_are_not_there_cannot_write_traces() -> None:
    argv = ["--model_spec", "qwen3_moe", "--profiler.enable", "--profiler.ranks", "0", "2", "5"]
    argv += ["--training.global_batch_size", "24"]
    assert manager.load(HyperTrainer.Config, argv, world_size=6).profiler.ranks == (0, 2, 5)
    with pytest.raises(ConfigError) as error:
        manager.load(HyperTrainer.Config, argv, world_size=2)
    assert str(error.value) == "profiler.ranks: 2, 5 are not among the ranks 0 to 1; remove them"
