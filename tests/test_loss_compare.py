"""Statistics on known numbers, what passes and what fails, and what a wrong file is told."""

from __future__ import annotations

import json
import math
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hyper_parallel import loss_compare
from hyper_parallel.loss_compare import Differences, main, read

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Makes a file of losses by step, and gives its path."""

    def write(name: str, losses: dict[int, float | None], norms: dict[int, float | None] | None = None) -> str:
        lines = [{"step": step, "loss": loss} for step, loss in losses.items()]
        for line in lines:
            if norms is not None:
                line["grad_norm"] = norms[line["step"]]
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return str(path)

    return write


def test_statistics_of_known_differences() -> None:
    found = Differences([1, 2, 3, 5], [3.0, -4.0, 0.0, -1.0])
    assert (found.positive, found.negative) == (1, 2)
    assert (found.mean, found.mean_abs, found.max_abs, found.worst_step) == (-0.5, 2.0, 4.0, 2)
    assert (found.rmse, found.last, found.not_finite) == (math.sqrt(26 / 4), -1.0, [])


def test_steps_that_are_not_finite_count_in_no_statistic() -> None:
    found = Differences([1, 2, 3], [2.0, math.nan, math.inf])
    assert (found.mean, found.max_abs, found.not_finite) == (2.0, 2.0, [2, 3])
    empty = Differences([1], [math.nan])
    assert empty.worst_step is None
    assert all(map(math.isnan, (empty.mean, empty.mean_abs, empty.max_abs, empty.rmse, empty.last)))


def test_the_report(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    a = write("a", {1: 8.0, 2: 6.0, 3: 5.0, 4: 4.0, 9: 1.0}, {1: 1.0, 2: 1.0, 3: 2.0, 4: 2.0, 9: 1.0})
    b = write("b", {2: 6.5, 3: 4.75, 4: None, 5: 1.0, 7: 1.0, 9: 1.0}, dict.fromkeys([2, 3, 4, 5, 7, 9], 1.0))
    assert main([a, b]) == 0
    first, second, *facts, headings, loss, norm = capsys.readouterr().out.splitlines()
    assert (first, second) == (f"A {a}", f"B {b}")
    assert facts == [
        "4 step(s) in both: 2-4, 9",
        "1 step(s) in A only: 1",
        "2 step(s) in B only: 5, 7",
        "loss of B is not finite at 1 step(s): 4",
    ]
    assert headings.split() == [
        "B",
        "-",
        "A",
        "steps",
        "positive",
        "negative",
        "mean",
        "mean",
        "|.|",
        "max",
        "|.|",
        "at",
        "step",
        "RMSE",
        "last",
    ]
    assert loss.split() == ["loss", "3", "1", "1", "8.333e-02", "2.500e-01", "5.000e-01", "2", "3.227e-01", "0.000e+00"]
    assert norm.split() == [
        "grad_norm",
        "4",
        "0",
        "2",
        "-5.000e-01",
        "5.000e-01",
        "1.000e+00",
        "3",
        "7.071e-01",
        "0.000e+00",
    ]


def test_a_step_that_stands_twice_counts_as_it_was_written_last(tmp_path: Path) -> None:
    path = tmp_path / "resumed.jsonl"
    path.write_text('{"step": 2, "loss": 9}\n{"step": 1, "loss": 3}\n{"step": 2, "loss": 1, "grad_norm": NaN}\n')
    run = read(str(path))
    assert list(run.steps) == [1, 2]
    assert run.curve("loss", [1, 2]) == [3.0, 1.0]
    assert all(map(math.isnan, run.curve("grad_norm", [1, 2])))


def test_runs_without_gradient_norms_are_compared_by_loss_alone(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([write("a", {1: 1.0}, {1: 1.0}), write("b", {1: 2.0})]) == 0
    assert capsys.readouterr().out.endswith("grad_norm: not in every line of both, so not compared\n")


@pytest.mark.parametrize(
    ("second", "passes"),
    [
        ([1.0 + 3.0, 1.0, 1.0, 1.0], True),  # max 3 = 1.5 x 2, mean 0.75 = 1.5 x 0.5
        ([1.0 + 3.125, 1.0, 1.0, 1.0], False),  # both above
        ([1.0 - 0.75, 1.0 + 0.75, 1.75, 1.75], True),  # mean 0.75 is the bound itself
        ([1.0 - 0.875, 1.0 + 0.75, 1.75, 1.75], False),  # mean above, max far below
        ([1.0 + 3.0, None, 1.0, 1.0], False),
    ],
)
def test_yardsticks_pass_or_fail(
    write: Write, capsys: pytest.CaptureFixture[str], second: list[float | None], passes: bool
) -> None:
    a, near = write("a", dict.fromkeys(range(1, 5), 1.0)), write("near", {1: 2.0, 2: 1.0, 3: 1.0, 4: 1.0})
    far = write("far", {1: 3.0, 2: 1.0, 3: 1.0, 4: 1.0, 5: 100.0})  # of step 5 nobody else knows
    b = write("b", dict(enumerate(second, 1)))
    assert main([a, b, "--yardstick", far, near]) == (0 if passes else 1)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == ("PASS" if passes else "FAIL")
    assert [line.rpartition(" 1.5 x ")[2] for line in lines[-3:-1]] == [f"5.000e-01 of {far}", f"2.000e+00 of {far}"]


def test_equal_runs_pass_a_yardstick_of_nothing(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    a = write("a", {1: 1.0})
    assert main([a, a, "--yardstick", a]) == 0
    assert f"max |loss difference| 0.000e+00 <= 1.5 x 0.000e+00 of {a}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ('{"step": 1, "loss": 1}\n{"step": 2, "lo', "line 2 is no JSON; remove the line, or"),
        ("[1]\n", "line 1 has no step that is a whole number; "),
        ('{"step": true, "loss": 1}\n', "line 1 has no step that is a whole number; "),
        ('{"step": 1}\n', "line 1 has no loss; "),
        ('{"step": 1, "loss": "low"}\n', 'line 1 has the loss "low", which is no number; '),
        ("", "it holds no step; "),
        ('{"step": 4, "loss": 1}\n{"step": 6, "loss": 1}\n', "its steps 4, 6 are none of {a}'s, which are 1-3; "),
    ],
)
def test_wrong_files(write: Write, capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, fact: str) -> None:
    a, path = write("a", {1: 1.0, 2: 1.0, 3: 1.0}), tmp_path / "wrong.jsonl"
    path.write_text(text)
    assert main([a, str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"{path}: {fact.format(a=a)}")


def test_all_missing_files_are_told_at_once(write: Write, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    missing = [str(tmp_path / name) for name in ("one", "two")]
    binary = tmp_path / "weights"
    binary.write_bytes(b"\xff\xfe\xfd")
    assert main([missing[0], str(tmp_path), "--yardstick", missing[1], str(binary)]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"{missing[0]}: it cannot be read: No such file or directory; give the metrics.jsonl in a run's dump folder",
        f"{tmp_path}: it cannot be read: Is a directory; give the metrics.jsonl in a run's dump folder",
        f"{missing[1]}: it cannot be read: No such file or directory; give the metrics.jsonl in a run's dump folder",
        f"{binary}: it is no text; give the metrics.jsonl of a run",
    ]


def test_yardsticks_that_measure_nothing_are_refused(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write("a", dict.fromkeys(range(1, 9), 1.0)), write("b", dict.fromkeys(range(1, 9), 1.0))
    short = write("short", dict.fromkeys((1, 2, 5), 1.0))
    broken = write("broken", dict.fromkeys(range(1, 9), 1.0) | {3: None})
    assert main([a, b, "--yardstick", short, broken]) == 2
    output = capsys.readouterr()
    assert output.err.splitlines() == [
        f"{short}: it has not the steps 3-4, 6-8; train it as long as the runs that it measures",
        f"{broken}: its loss is not finite at 3; give disturbed runs that train",
    ]


def test_a_run_that_ended_early_is_not_judged(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    whole, died = write("whole", dict.fromkeys(range(1, 501), 1.0)), write("died", dict.fromkeys(range(1, 4), 1.0))
    for a, b in ((whole, died), (died, whole)):
        assert main([a, b]) == 0  # without a verdict
        capsys.readouterr()
        assert main([a, b, "--yardstick", whole]) == 2
        fact = f"{died}: it has not the steps 4-500 of {whole}; train both to the same step\n"
        assert capsys.readouterr().err == fact


def test_the_picture(write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write("a", {1: 1.0, 2: 2.0}, {1: 1.0, 2: 1.0}), write("b", {2: 3.0}, {2: None})
    picture = tmp_path / "diff.png"
    assert main([a, b, "--plot", str(picture), "--yardstick", a]) == 1
    content = picture.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", content[16:24]) == (1080, 1200)
    assert main([a, b, "--plot", str(tmp_path / "nowhere" / "diff.png")]) == 2
    assert capsys.readouterr().err == (
        f"--plot: {tmp_path}/nowhere/diff.png cannot be written: No such file or directory; give another file\n"
    )


def test_a_picture_needs_matplotlib(
    write: Write, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loss_compare.importlib.util, "find_spec", lambda name: None)
    a = write("a", {1: 1.0})
    assert main([a, a, "--plot", "diff.png"]) == 2
    assert capsys.readouterr().err == (
        "--plot: matplotlib is not installed; pip install 'hyper_parallel[plot]', or leave it out\n"
    )


def test_what_is_drawn_is_what_differs(write: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: drawn.append(figure))
    a, b = write("a", {1: 1.0, 2: 2.0}, {1: 5.0, 2: 6.0}), write("b", {1: 1.5, 2: 1.0}, {1: 7.0, 2: 8.0})
    c = write("c", {1: 1.25, 2: 2.0, 3: 9.0}, {1: 7.0, 2: 8.0, 3: 9.0})
    assert main([a, b, "--plot", "diff.png", "--yardstick", c]) == 1
    curves = [{line.get_label(): list(line.get_ydata()) for line in axes.lines} for axes in drawn[0].axes]
    assert curves == [{a: [1.0, 2.0], b: [1.5, 1.0]}, {b: [0.5, -1.0], c: [0.25, 0.0]}, {a: [5.0, 6.0], b: [7.0, 8.0]}]


def test_the_start_loads_no_framework() -> None:
    program = (
        "import sys; from hyper_parallel.loss_compare import main\n"
        "try: main(['--help'])\n"
        "finally: print(sorted({'torch', 'numpy', 'matplotlib', 'yaml'} & sys.modules.keys()))"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[-1] == "[]" and "--yardstick" in output
