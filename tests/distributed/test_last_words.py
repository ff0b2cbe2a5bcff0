"""Which errors mean that another rank is gone, and how tools for people end."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from hyper_parallel.config.errors import ConfigError, RunError
from hyper_parallel.distributed.last_words import PeerLostError, run_tool

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:3. And more"


def raised_by(action: str) -> BaseException:
    try:
        exec(action, {"dist": dist, "GLOO": GLOO})
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    "action",
    [
        "raise RuntimeError(GLOO)",
        "raise dist.DistBackendError('Connection closed by peer [127.0.0.1]:3')",
        "try:\n  raise RuntimeError(GLOO)\nexcept RuntimeError as error:\n  raise ValueError from error",
        "try:\n  raise RuntimeError(GLOO)\nexcept RuntimeError:\n  raise KeyError('in clean-up')",  # its context
    ],
)
def test_a_lost_peer_is_found_behind_what_it_has_caused(action: str) -> None:
    lost = PeerLostError.of(raised_by(action), "step 3")
    assert lost is not None and not lost.hangs
    assert str(lost).startswith(
        "step 3: another rank has ended without a word, killed or out of memory (Connection closed by peer [127.0.0.1]"
    )


@pytest.mark.parametrize(
    "action",
    ["{}['key']", "try:\n  raise RuntimeError(GLOO)\nexcept RuntimeError:\n  raise KeyError('of its own') from None"],
)
def test_what_a_rank_does_by_itself_is_no_lost_peer(action: str) -> None:
    assert PeerLostError.of(raised_by(action), "step 3") is None


def test_how_a_tool_ends(capsys: pytest.CaptureFixture[str]) -> None:
    def raising(error: Exception) -> int:
        def action() -> int:
            raise error

        return run_tool(action)

    assert run_tool(lambda: 1) == 1
    assert raising(ConfigError.one("folder", "it is empty", "give another")) == 2
    assert raising(RunError("step-3 is damaged")) == 1
    assert raising(PermissionError(13, "Permission denied", "out/step-3")) == 1
    assert capsys.readouterr().err.splitlines() == [
        "folder: it is empty; give another",
        "error: step-3 is damaged",
        "error: [Errno 13] Permission denied: 'out/step-3'",
    ]
    with pytest.raises(KeyError):
        raising(KeyError("a bug"))
