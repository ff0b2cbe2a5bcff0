"""comm.mode fake: one process in the place of all ranks holds what rank 0 of a real run does, and keeps no number."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from hyper_parallel import train as cli
from hyper_parallel.components.checkpoint import CheckpointManager
from hyper_parallel.components.validator import Validator
from hyper_parallel.config.errors import ConfigError
from hyper_parallel.config.sections import CommConfig
from hyper_parallel.distributed import process_group
from hyper_parallel.protocols.module import canonical_name
from hyper_parallel.trainer.callbacks import SafetensorsExportCallback
from hyper_parallel.trainer.config import TrainerConfig
from tests.trainer.runs import metrics, tiny_config, with_parallelism

PLAN = {
    # parameter: (its shape, into how many parts each dim is split over dp_shard 4 x tp 2, experts over ep 2 x efsdp 2)
    "embed_tokens.weight": ((4096, 32), (8, 1)),
    "lm_head.weight": ((4096, 32), (8, 1)),
    "norm.weight": ((32,), (4,)),
    "layers.0.self_attn.q_proj.weight": ((32, 32), (8, 1)),
    "layers.0.self_attn.k_proj.weight": ((16, 32), (8, 1)),
    "layers.0.self_attn.o_proj.weight": ((32, 32), (4, 2)),
    "layers.0.self_attn.q_norm.weight": ((8,), (4,)),
    "layers.0.mlp.router.weight": ((4, 32), (4, 1)),
    "layers.0.mlp.experts.gate_up_proj": ((4, 2, 16, 32), (2, 1, 2, 2)),
    "layers.0.mlp.experts.down_proj": ((4, 32, 16), (2, 2, 2)),
    "layers.1.mlp.gate_proj.weight": ((48, 32), (8, 1)),
    "layers.1.mlp.down_proj.weight": ((32, 48), (4, 2)),
}


def rehearsed(folder: Path, steps: int = 2, **degrees: object) -> TrainerConfig:
    config = with_parallelism(tiny_config(folder, steps=steps), **degrees)
    config.comm = CommConfig(mode="fake")
    return config


def test_rank_0_of_eight_holds_what_a_real_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.getLogger("hyper_parallel"), "handlers", [])  # those of a run before print elsewhere
    config = rehearsed(tmp_path, dp_shard=4, tp=2, ep=2, sequence_parallel=True, loss_parallel=True)
    assert config.ranks(1) == 8 and config.ranks(16) == 16 and not list(config.cross_faults(1))
    with config.build() as trainer:
        (model,) = trainer.model_parts
        held = {canonical_name(n): (tuple(p.shape), tuple(p.to_local().shape)) for n, p in model.named_parameters()}
        trainer.train()
    for name, (shape, parts) in PLAN.items():
        assert held[name] == (shape, tuple(size // part for size, part in zip(shape, parts, strict=True))), name
    told = capsys.readouterr().err
    assert "comm.mode fake: rank 0 is rehearsed, the others do not exist, and no number means anything\n" in told
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2]
    assert not dist.is_initialized()


def test_a_number_that_is_none_does_not_end_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the next rank of a ring would have sent is what the memory held."""
    config = rehearsed(tmp_path, steps=1, cp=2)
    with config.build() as trainer:
        monkeypatch.setattr(trainer, "clip_grad_fn", lambda *_: torch.tensor(float("nan")))
        trainer.train()
    assert [line["grad_norm"] for line in metrics(tmp_path)] == [None]


def test_a_wrong_layout_is_told_as_in_a_real_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    argv = ["--model_spec", "qwen3_moe", "--parallelism.tp", "3", "--checkpoint.enable", "false"]
    told = []
    for mode in ("real", "fake"):
        assert cli.main([*argv, "--comm.mode", mode]) == 2
        told.append(capsys.readouterr().err)
    assert told[0] == told[1]
    assert "parallelism.tp: dp_replicate 1 x tp 3 = 3 does not divide the world size 8; set divisors of 8" in told[0]


def test_what_one_process_cannot_stand_for_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = rehearsed(tmp_path)
    config.checkpoint = CheckpointManager.Config()
    config.validator = Validator.Config(enable=True)
    config.debug.check_nan_inf = True
    config.callbacks = (SafetensorsExportCallback.Config(),)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "3")
    none = "comm.mode is fake: numbers that mean nothing"
    told = [str(fault) for fault in config.cross_faults(1)]
    for fault in (
        "comm.mode: fake, but 2 processes were started: one stands for all ranks; start it without a launcher, with "
        "WORLD_SIZE in the environment",
        "comm.mode: fake, but RANK is 3: the process that stands for all ranks is rank 0; leave RANK out of the "
        "environment",
        "comm.mode: fake, but there is one rank, which needs no other; set degrees of parallelism, or WORLD_SIZE in "
        "the environment",
        f"checkpoint.enable: True, but {none} are not kept; set False",
        f"validator.enable: True, but {none} tell nothing of held-out data; set False",
        f"debug.check_nan_inf: True, but {none} may well not be finite; set False",
        f"callbacks.0: SafetensorsExportCallback, but {none} are not for it; leave it out",
    ):
        assert fault in told
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    monkeypatch.delenv("RANK")
    config = rehearsed(tmp_path, pp=2)
    config.checkpoint = CheckpointManager.Config(enable=False, load_from=str(tmp_path))
    told = [str(fault) for fault in config.cross_faults(1)]
    for fault in (
        "parallelism.pp: 2, but comm.mode is fake: a stage computes with what others send, and nobody does; see what "
        "it would do with python -m hyper_parallel.explain",
        f"checkpoint.load_from: {tmp_path}, but {none} need no weights to start from; leave it out",
    ):
        assert fault in told
    monkeypatch.setattr(process_group, "get_platform", lambda: SimpleNamespace(device_type="npu"))
    with pytest.raises(
        ConfigError, match=r"^HYPER_PARALLEL_DEVICE: npu, but torch's fake process group knows cpu, cuda, "
    ):
        process_group.join_fake(0, 2)
