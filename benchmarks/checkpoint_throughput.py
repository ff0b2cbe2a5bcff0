"""Saving, loading and exporting a run's state, against the raw parts of torch and safetensors on the same state."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

from benchmarks.report import Gate, Report
from hyper_parallel.components.checkpoint import CheckpointManager
from hyper_parallel.components.optimizer import AdamW
from hyper_parallel.models.qwen3 import create_model_spec

TIMES_RAW, TIMES_SAVE_FILE, STALL_SHARE = 0.9, 0.8, 0.1
ROUNDS = 9
TOKENS = 512
SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 16384,
}


class _Nothing:
    """In the place of what a run has beside model and optimizer."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class _Run:
    def __init__(self, folder: Path, **sizes: int) -> None:
        spec = create_model_spec(**sizes)
        self.model: nn.Module = spec.model.build()
        self.model.init_weights(seed=1)
        self.optimizers = AdamW.Config().build(model_parts=[self.model])
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizers.step()
        self.folder, self.adapter = folder, spec.state_dict_adapter(spec.model)

    def compute_gradients(self) -> None:
        """What a step does between a save and its change of weights."""
        ids = torch.arange(TOKENS)[None]
        self.model(ids, labels_BT=ids, loss_fn=lambda hidden_BTC, *_, **__: hidden_BTC.sum()).loss_sum.backward()

    def manager(self, **config: Any) -> CheckpointManager:
        return CheckpointManager.Config(**config).build(
            dump_folder=str(self.folder),
            sd_adapter=self.adapter,
            tokenizer=None,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=_Nothing(),
            dataloader=_Nothing(),
            train_state=_Nothing(),
        )


def measure(folder: Path, *, quick: bool) -> Report:
    """All in turns, in this process. Every save waits for the disk, ours and torch's; exports do not."""
    work = folder / "checkpoint_throughput"
    shutil.rmtree(work, ignore_errors=True)
    run = _Run(work / "ours", **(SIZES | ({"num_hidden_layers": 1} if quick else {})))
    manager, behind = run.manager(), run.manager(folder="behind", async_mode="thread")
    state = manager._state()
    tensors = {name: value for name, value in run.model.state_dict().items()}
    size_bytes = sum(value.nbytes for value in _tensors(state))
    seconds: dict[str, list[float]] = {}

    def timed(name: str, action: Callable[[], object]) -> None:
        start = time.perf_counter()
        action()
        seconds.setdefault(name, []).append(time.perf_counter() - start)

    for number in range(1, (1 if quick else ROUNDS) + 1):
        shutil.rmtree(work / "raw", ignore_errors=True)
        timed("save", lambda step=number: manager.save(step))
        timed("raw save", lambda: dcp.save(state, storage_writer=dcp.FileSystemWriter(work / "raw"), no_dist=True))
        timed("stall", lambda step=number: behind.save(step))
        run.compute_gradients()
        start = time.perf_counter()
        behind.wait_copied()
        seconds["stall"][-1] += time.perf_counter() - start
        behind.wait()
        timed("load", manager.load)
        timed("raw load", lambda: dcp.load(state, storage_reader=dcp.FileSystemReader(work / "raw"), no_dist=True))
        for left in (run.folder / "export", work / "file", *run.folder.glob("*/step-*")):
            shutil.rmtree(left, ignore_errors=True)
        (work / "file").mkdir()
        timed("export", lambda: manager.export_hf(run.folder / "export"))
        timed("save_file", lambda: save_file(tensors, work / "file" / "model.safetensors"))
    behind.close()

    def rates(name: str, of_bytes: int) -> list[float]:
        return [of_bytes / value for value in seconds[name]]

    weights_bytes = sum(value.nbytes for value in tensors.values())
    what = f"of {size_bytes / 1e6:,.0f} MB"
    gates = [
        _gate(f"save {what} / torch.distributed.checkpoint", rates("save", size_bytes), rates("raw save", size_bytes)),
        _gate(f"load {what} / torch.distributed.checkpoint", rates("load", size_bytes), rates("raw load", size_bytes)),
        _gate(
            f"export of {weights_bytes / 1e6:,.0f} MB / safetensors.torch.save_file",
            rates("export", weights_bytes),
            rates("save_file", weights_bytes),
            TIMES_SAVE_FILE,
        ),
        Gate(
            what=f"what training waits for, async_mode thread / none, {TOKENS} tokens a step",
            unit="seconds",
            ours=seconds["stall"],
            theirs=seconds["save"],
            relation="<=",
            bound=STALL_SHARE,
        ),
    ]
    return Report("checkpoint_throughput", gates, ["our load compares every file with its digest; torch's does not"])


def _gate(what: str, ours: list[float], theirs: list[float], bound: float = TIMES_RAW) -> Gate:
    return Gate(what=what, unit="bytes/s", ours=ours, theirs=theirs, relation=">=", bound=bound)


def _tensors(state: Any) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    return [tensor for value in state.values() for tensor in _tensors(value)] if isinstance(state, dict) else []
