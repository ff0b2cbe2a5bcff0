"""explain: what it says is sent in a step is what real ranks send; the plan; the faults of train."""

from __future__ import annotations

import functools
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from hyper_parallel import explain
from hyper_parallel.config.errors import RunError
from hyper_parallel.distributed.traffic import Traffic
from hyper_parallel.protocols import collectives
from hyper_parallel.trainer.rehearsal import Rehearsal, fake_world
from tests.distributed_world import run_world
from tests.trainer.test_tensor_parallel import LP, SP, TIED, TP, Case

CASES: dict[int, dict[str, Case]] = {
    2: {
        "fsdp": Case({"dp_shard": 2}, 2, recompute=True),
        "tp": Case(TP, 4),
        "tp, sp, lp, tied, uneven vocabulary": Case(TP | SP | LP, 4, sizes=TIED | {"vocab_size": 4097}),
        **{
            method: Case({"cp": 2, "dp_shard": 1, "cp_method": method}, 4)
            for method in ("ring", "ulysses", "allgather")
        },
        "ep": Case({"dp_shard": 2, "ep": 2}, 4),
        "pp": Case({"pp": 2, "dp_shard": 1}, 4, sizes=TIED),
        "zbv": Case({"pp": 2, "dp_shard": 1, "pp_schedule": "zbv"}, 2, sizes=TIED | {"num_hidden_layers": 4}),
    },
    4: {
        "hsdp": Case({"dp_replicate": 2, "dp_shard": 2}, 1),
        "pp x shard": Case({"pp": 2, "dp_shard": 2}, 1),
    },
}
COUNTED = {
    "all_gather_into_tensor": "all-gather",
    "all_gather_single": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "reduce_scatter_single": "reduce-scatter",
    "all_reduce": "all-reduce",
    "all_to_all_single": "all-to-all",
    "isend": "send/recv",
}


@contextmanager
def counted(sent: Counter[str]) -> Iterator[None]:
    """Adds up the bytes that the functions of torch.distributed are given to send, called by whomever."""
    is_within = False

    def counting(name: str, function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_within
            if not is_within:
                sent[COUNTED[name]] += sent_bytes(name, args, kwargs)
            outer, is_within = is_within, True
            try:
                return function(*args, **kwargs)
            finally:
                is_within = outer

        return call

    class Operators:
        """In the place of the operators that our own collectives are made of."""

        def __getattr__(self, name: str) -> Any:
            operator = getattr(torch.ops._c10d_functional, name)

            def call(tensor: Any, *rest: Any) -> Any:
                group = dist.distributed_c10d._resolve_process_group(rest[-1])
                parts = rest[1] if name == "all_to_all_single" else [1] * group.size()
                others = (sum(parts) - parts[group.rank()]) / sum(parts)
                times = {"all_reduce": 2, "all_gather_into_tensor": group.size()}.get(name, 1)
                sent[COUNTED[name]] += int(tensor.nbytes * times * others)
                return operator(tensor, *rest)

            return operator if name == "wait_tensor" else call

    def functional(tensor: Any, reduceOp: str, group: Any, tag: str = "", own: Any = funcol.all_reduce) -> Any:
        resolved = funcol._resolve_group(group, tag)
        members = dist.distributed_c10d._resolve_process_group(resolved) if isinstance(resolved, str) else resolved
        sent["all-reduce"] += 2 * tensor.nbytes * (members.size() - 1) // members.size()
        return own(tensor, reduceOp, group, tag)

    functions = {name: counting(name, getattr(dist, name)) for name in COUNTED}
    with ExitStack() as patches:
        for module in (dist, dist.distributed_c10d):
            patches.enter_context(patch.multiple(module, **functions))
        patches.enter_context(patch.object(collectives, "_ops", Operators()))
        patches.enter_context(patch.object(funcol, "all_reduce", functional))  # of DTensor, in the gradient norm
        yield


def sent_bytes(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    if name == "isend":
        return args[0].nbytes
    named = dict(zip(("output", "input", *["output_split_sizes", "input_split_sizes"]), args, strict=False)) | kwargs
    group = named.get("group") or (args[2] if name == "all_reduce" and len(args) > 2 else None)
    ranks = dist.get_world_size(group)
    if name == "all_reduce":
        return 2 * (args or (kwargs["tensor"],))[0].nbytes * (ranks - 1) // ranks
    given = named.get("input", named.get("input_tensor"))
    if COUNTED[name] == "all-gather":
        return given.nbytes * (ranks - 1)
    if COUNTED[name] == "reduce-scatter":
        return given.nbytes * (ranks - 1) // ranks
    splits = named.get("input_split_sizes") or [1] * ranks
    return given.nbytes * (sum(splits) - splits[dist.get_rank(group)]) // sum(splits)


def real_steps(folder: str, world_size: int) -> dict[str, Counter[str]]:
    """What this rank sends in the second step of each run, by kind."""
    steps = {}
    for name, case in CASES[world_size].items():
        with case.config(Path(folder) / name, 2).build() as trainer:
            batches = iter(trainer.dataloader)
            trainer.train_step(batches)
            steps[name] = Counter()
            with counted(steps[name]):
                trainer.train_step(batches)
    return steps


@pytest.mark.slow
@pytest.mark.parametrize("world_size", CASES)
def test_what_is_sent_is_what_real_ranks_send(tmp_path: Path, world_size: int) -> None:
    real = run_world(world_size, real_steps, str(tmp_path), world_size, timeout=280)
    for name, case in CASES[world_size].items():
        config = case.config(tmp_path / name, 2)
        copied: tuple[str, ...] = ()
        for rank in reversed(range(world_size)):
            with fake_world(rank, world_size):
                rehearsal = Rehearsal(config, copied)
                copied = copied or rehearsal.model_parts[-1].copied_parameters
                sent: Counter[str] = Counter()
                for flow, moved in rehearsal.step().items():
                    sent[flow.kind] += moved.sent_bytes
            if name == "ep":
                # Two layers with experts: 4 rows of 32 tokens go to 2 experts each, half of them to the other rank, and
                # come back, and so their gradients, 32 float64 each; and the numbers of tokens for its 2 experts.
                assert sent.pop("all-to-all") == 2 * (4 * (4 * 32 * 2 // 2) * 32 * 8 + 2 * 8)
                del real[rank][name]["all-to-all"]  # the numbers alone: what is sent depends on the router
            assert +sent == +real[rank][name], f"{name}, rank {rank}"
            assert sum(sent.values()) > 10_000


def test_the_parameters_of_a_tensor_parallel_run(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--parallelism.tp", "2", "--parallelism.sequence_parallel", "--training.micro_batch_size", "1"]
    assert explain.main(["--model_spec", "qwen3_moe", "--world_size", "8", *flags]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for line in (
        "Mesh of 8 rank(s)",
        "dp_shard 4 0 2 4 6 | 1 3 5 7",
        "tp 2 0 1 | 2 3 | 4 5 | 6 7",
        "layers.*.self_attn.o_proj.weight 4 256 x 256 64 x 128 dp_shard S(0), tp S(1)",
        "layers.*.self_attn.q_proj.weight 4 256 x 256 32 x 256 dp_shard S(0), tp S(0)",
        "layers.*.self_attn x_BTC tp S(1) -> R all-gather reduce-scatter",
        "layers.*.self_attn output 0 tp P(sum) -> S(1) reduce-scatter all-gather",
        "embed_tokens tp forward is vocabulary_parallel_embedding",
        "layers.* 4 2,564,736",
        "the rest 1 2,097,408",
    ):
        assert line in lines, line
    assert "Stages" not in lines and not dist.is_initialized()


def test_what_the_document_shows(capsys: pytest.CaptureFixture[str]) -> None:
    document = (Path(__file__).parents[1] / "docs" / "parallelism.md").read_text()
    section = document.partition("## What a run would do")[2].partition("\n## ")[0]
    (command,) = re.findall(r"```bash\npython -m hyper_parallel.explain (.*?)\n```", section, re.DOTALL)
    (shown,) = re.findall(r"```text\n(.*?)\n```", section, re.DOTALL)
    assert explain.main(shlex.split(command)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in shown.splitlines() if line != "..." and line not in lines] == []


def test_a_collective_that_nobody_has_counted_is_named() -> None:
    with pytest.raises(
        RunError, match=r"^nobody has said what the collective gather_ moves; add it to .*traffic.KINDS$"
    ):
        Traffic()._count("gather_", {})


def test_the_stages_of_a_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--parallelism.pp", "2", "--training.micro_batch_size", "4", "--parallelism.pp_schedule", "gpipe"]
    assert explain.main(["--model_spec", "qwen3_moe", *flags]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "Mesh of 2 rank(s)" in lines  # as few as there can be
    assert "name number shape on the first rank of its stage placement" in lines
    stages = lines.index("Stages")
    assert lines[stages + 2 : stages + 4] == [
        "0 0 embed_tokens layers.0 layers.1",
        "1 1 layers.2 layers.3 norm lm_head",
    ]
    # Two micro-batches of 4 x 256 tokens, of 256 float32 each: activations one way, gradients the other, and with them
    # what the routers did: 32 counts and 32 probabilities a row.
    hidden, counts, probabilities = 2 * 4 * 256 * 256 * 4, 2 * 4 * 32 * 8, 2 * 4 * 32 * 4
    assert f"0 send/recv world 6 {hidden + counts + probabilities:,}" in lines
    assert f"1 send/recv world 4 {hidden + probabilities:,}" in lines


@pytest.mark.parametrize(
    ("argv", "fault"),
    [
        (["--parallelism.tp", "3", "--world_size", "4"], "parallelism.tp: dp_replicate 1 x tp 3 = 3 does not divide"),
        (["--optimizer.lrr", "1"], "optimizer.lrr: is no setting; did you mean 'optimizer.lr'?"),
        (
            ["--parallelism.tp", "4"],
            "parallelism.tp: 4 does not divide the model's num_key_value_heads 2; set a divisor",
        ),
    ],
)
def test_what_train_refuses(argv: list[str], fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain.main(["--model_spec", "qwen3_moe", *argv]) == 2
    assert fault in capsys.readouterr().err


def test_a_size_of_no_use_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        explain.main(["--model_spec", "qwen3_moe", "--world_size", "0"])
    assert end.value.code == 2 and "--world_size: 0 is below 1" in capsys.readouterr().err


def test_one_process_has_neither_mesh_nor_fsdp(capsys: pytest.CaptureFixture[str]) -> None:
    assert explain.main(["--model_spec", "qwen3_moe"]) == 0
    plain = capsys.readouterr().out
    assert "Mesh" not in plain and "FSDP" not in plain and "norm.weight" in plain
    assert explain.main(["--model_spec", "qwen3_moe", "--training.mixed_precision_param", "bfloat16"]) == 0
    assert "Mesh of 1 rank(s)" in (mixed := capsys.readouterr().out) and "FSDP units" in mixed
