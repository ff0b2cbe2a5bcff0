"""Compares the curves of two runs, step by step.

    python -m hyper_parallel.loss_compare A/metrics.jsonl B/metrics.jsonl --yardstick C1/metrics.jsonl C2/metrics.jsonl

Prints what B's loss and gradient norm differ by from A's, over the steps that both have. Yardsticks are runs of A whose
initial weights were disturbed in the last place: how far A is from itself. With them B passes where mean |B - A| and
max |B - A| of the loss are at most 1.5 times the largest of the yardsticks. A and B must then end at the same step.

Exit codes: 0 compared, and passed where there are yardsticks; 1 failed; 2 a file or the command line is wrong.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from hyper_parallel.config.errors import ConfigError, Fault, raise_faults

QUANTITIES = ("loss", "grad_norm")
TIMES = 1.5
"""How many times the differences of the yardsticks are allowed."""
_SPANS_SHOWN = 5
_HEADINGS = ("steps", "positive", "negative", "mean", "mean |.|", "max |.|", "at step", "RMSE", "last")


@dataclass(frozen=True, slots=True)
class Run:
    """What metrics.jsonl says of a run."""

    path: str
    steps: dict[int, dict[str, float]] = field(repr=False)
    """Step -> the QUANTITIES that it has, ascending. What was not finite is NaN."""

    def curve(self, quantity: str, steps: Iterable[int]) -> list[float]:
        """The values of `quantity`, NaN where there is none."""
        return [self.steps[step].get(quantity, math.nan) for step in steps]


@dataclass(frozen=True)
class Differences:
    """Those of one quantity, second run minus first, and their statistics over the steps where both are finite. A
    statistic of nothing is NaN."""

    steps: Sequence[int]
    values: Sequence[float]
    """By step; NaN where one of the two is not finite."""

    @cached_property
    def _finite(self) -> list[float]:
        return [value for value in self.values if math.isfinite(value)]

    @property
    def not_finite(self) -> list[int]:
        """Steps that have no difference."""
        return [step for step, value in zip(self.steps, self.values, strict=True) if not math.isfinite(value)]

    @property
    def positive(self) -> int:
        """Steps at which the second run is higher."""
        return sum(value > 0 for value in self._finite)

    @property
    def negative(self) -> int:
        """Steps at which the second run is lower."""
        return sum(value < 0 for value in self._finite)

    @property
    def mean(self) -> float:
        """Signed: near 0 where the curves cross each other."""
        return _mean(self._finite)

    @property
    def mean_abs(self) -> float:
        """Mean of the absolute values."""
        return _mean([abs(value) for value in self._finite])

    @property
    def max_abs(self) -> float:
        """The largest absolute value."""
        return max((abs(value) for value in self._finite), default=math.nan)

    @property
    def worst_step(self) -> int | None:
        """The first step that differs by `max_abs`."""
        return next((s for s, v in zip(self.steps, self.values, strict=True) if abs(v) == self.max_abs), None)

    @property
    def rmse(self) -> float:
        """Root of the mean square."""
        return math.sqrt(_mean([value * value for value in self._finite]))

    @property
    def last(self) -> float:
        """At the last step that both have."""
        return self.values[-1] if self.values else math.nan


@dataclass(frozen=True, slots=True)
class Bound:
    """A statistic of the loss, and the largest of the yardsticks that it is held against."""

    what: str
    value: float
    largest: float
    of: str
    """The file with the largest."""

    @property
    def is_kept(self) -> bool:
        """Whether the value is at most TIMES the largest; what is not a number keeps no bound."""
        return self.value <= TIMES * self.largest

    def __str__(self) -> str:
        relation = "<=" if self.is_kept else "is not <="
        return f"{self.what} {self.value:.3e} {relation} {TIMES:g} x {self.largest:.3e} of {self.of}"


def read(path: str) -> Run:
    """Reads metrics.jsonl. Of a step that stands in it twice the last counts.

    Raises:
        ConfigError: the file cannot be read, or holds something else; the first wrong line is named.
    """
    steps: dict[int, dict[str, float]] = {}
    try:
        with open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    step, values = _step(line)
                except ValueError as error:
                    remedy = "remove the line, or give the metrics.jsonl of a run"
                    raise ConfigError.one(path, f"line {number} {error}", remedy) from error
                steps[step] = values
    except OSError as error:
        fact = f"it cannot be read: {error.strerror}"
        raise ConfigError.one(path, fact, "give the metrics.jsonl in a run's dump folder") from error
    except UnicodeDecodeError as error:
        raise ConfigError.one(path, "it is no text", "give the metrics.jsonl of a run") from error
    if not steps:
        raise ConfigError.one(path, "it holds no step", "give the metrics.jsonl of a run that has begun")
    return Run(path, dict(sorted(steps.items())))


def common_steps(first: Run, second: Run) -> list[int]:
    """The steps that both have.

    Raises:
        ConfigError: there are none.
    """
    common = [step for step in first.steps if step in second.steps]
    if not common:
        fact = f"its steps {_spans(second.steps)} are none of {first.path}'s, which are {_spans(first.steps)}"
        raise ConfigError.one(second.path, fact, "give two runs with a step in common")
    return common


def differences(first: Run, second: Run, quantity: str, steps: Sequence[int]) -> Differences:
    """`second` minus `first` at `steps`, which both have."""
    pairs = zip(first.curve(quantity, steps), second.curve(quantity, steps), strict=True)
    return Differences(steps, [b - a for a, b in pairs])


def bounds(first: Run, second: Run, yardsticks: Sequence[Run], steps: Sequence[int]) -> list[Bound]:
    """Mean and max of |second - first| of the loss, held against those of the yardsticks over the same `steps`.

    Raises:
        ConfigError: one of the runs ended before the other, or a yardstick lacks some of the steps, or is not finite
            there.
    """
    faults = [
        Fault(run.path, f"it has not the steps {_spans(missing)} of {other.path}", "train both to the same step")
        for run, other in ((first, second), (second, first))
        if (missing := [step for step in other.steps if step not in run.steps and step > max(run.steps)])
    ]
    for yardstick in yardsticks:
        if missing := [step for step in steps if step not in yardstick.steps]:
            fact, remedy = f"it has not the steps {_spans(missing)}", "train it as long as the runs that it measures"
            faults.append(Fault(yardstick.path, fact, remedy))
        elif wrong := _not_finite(yardstick, "loss", steps):
            fact = f"its loss is not finite at {_spans(wrong)}"
            faults.append(Fault(yardstick.path, fact, "give disturbed runs that train"))
    raise_faults(faults)
    own = differences(first, second, "loss", steps)
    found = [(differences(first, yardstick, "loss", steps), yardstick.path) for yardstick in yardsticks]
    # A step without a number has no difference that could be small enough.
    mean, most = (math.nan, math.nan) if own.not_finite else (own.mean_abs, own.max_abs)
    return [
        Bound("mean |loss difference|", mean, *max((each.mean_abs, path) for each, path in found)),
        Bound("max |loss difference|", most, *max((each.max_abs, path) for each, path in found)),
    ]


def report(first: Run, second: Run, steps: Sequence[int]) -> Iterator[str]:
    """The lines that tell how the runs differ."""
    yield f"A {first.path}"
    yield f"B {second.path}"
    yield f"{len(steps)} step(s) in both: {_spans(steps)}"
    for name, run, other in (("A", first, second), ("B", second, first)):
        if alone := [step for step in run.steps if step not in other.steps]:
            yield f"{len(alone)} step(s) in {name} only: {_spans(alone)}"
    told = [name for name in QUANTITIES if all(name in run.steps[step] for run in (first, second) for step in steps)]
    for quantity in told:
        for name, run in (("A", first), ("B", second)):
            if wrong := _not_finite(run, quantity, steps):
                yield f"{quantity} of {name} is not finite at {len(wrong)} step(s): {_spans(wrong)}"
    yield f"{'B - A':<10}" + "".join(f"{heading:>11}" for heading in _HEADINGS)
    for quantity in told:
        found = differences(first, second, quantity, steps)
        counts = len(steps) - len(found.not_finite), found.positive, found.negative
        cells = [*map(str, counts), f"{found.mean:.3e}", f"{found.mean_abs:.3e}", f"{found.max_abs:.3e}"]
        cells += ["" if found.worst_step is None else str(found.worst_step), f"{found.rmse:.3e}", f"{found.last:.3e}"]
        yield f"{quantity:<10}" + "".join(f"{cell:>11}" for cell in cells)
    for quantity in QUANTITIES:
        if quantity not in told:
            yield f"{quantity}: not in every line of both, so not compared"


def draw(first: Run, others: Sequence[Run], yardsticks: Sequence[Run], path: str) -> None:
    """Writes one picture as PNG: losses, what they differ by from the first, and gradient norms.

    Raises:
        ConfigError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 10), layout="constrained")
    losses, apart, norms = figure.subplots(3, sharex=True)
    for axes, quantity in ((losses, "loss"), (norms, "grad_norm")):
        for run in (first, *others):
            axes.plot(list(run.steps), run.curve(quantity, run.steps), linewidth=1, label=run.path)
    for run in yardsticks:
        steps = common_steps(first, run)
        apart.plot(steps, differences(first, run, "loss", steps).values, color="0.7", linewidth=0.6, label=run.path)
    for number, run in enumerate(others, 1):  # in the colours that they have above
        steps = common_steps(first, run)
        values = differences(first, run, "loss", steps).values
        apart.plot(steps, values, color=f"C{number}", linewidth=0.8, label=run.path)
    losses.set(ylabel="loss")
    apart.set(ylabel=f"loss minus that of\n{first.path}")
    norms.set(ylabel="gradient norm", xlabel="step")
    losses.legend(fontsize="small")
    apart.legend(fontsize="small")
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise ConfigError.one("--plot", f"{path} cannot be written: {error.strerror}", "give another file") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Compares what `argv` (default: this process's command line) names; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m hyper_parallel.loss_compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("first", metavar="A", help="metrics.jsonl of the run that is compared with")
    parser.add_argument("second", metavar="B", help="metrics.jsonl of the run that is compared")
    parser.add_argument("--plot", metavar="FILE", help="picture of losses, differences and gradient norms, as PNG")
    parser.add_argument(
        "--yardstick", nargs="+", default=[], metavar="C", help="metrics.jsonl of disturbed runs of A: PASS or FAIL"
    )
    arguments = parser.parse_args(argv)
    try:
        return _compare(arguments.first, arguments.second, arguments.yardstick, arguments.plot)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2


def _compare(first_path: str, second_path: str, yardstick_paths: Sequence[str], plot: str | None) -> int:
    faults: list[Fault] = []
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        remedy = "pip install 'hyper_parallel[plot]', or leave it out"
        faults.append(Fault("--plot", "matplotlib is not installed", remedy))
    runs: list[Run] = []
    for path in (first_path, second_path, *yardstick_paths):
        try:
            runs.append(read(path))
        except ConfigError as error:
            faults += error.faults
    raise_faults(faults)
    first, second, *yardsticks = runs
    steps = common_steps(first, second)
    held = bounds(first, second, yardsticks, steps) if yardsticks else []
    for line in report(first, second, steps):
        print(line)
    if plot is not None:
        draw(first, [second], yardsticks, plot)
        print(f"picture: {plot}")
    for bound in held:
        print(bound)
    if held:
        print("PASS" if all(bound.is_kept for bound in held) else "FAIL")
    return 0 if all(bound.is_kept for bound in held) else 1


def _step(line: str) -> tuple[int, dict[str, float]]:
    """
    Raises:
        ValueError: what is wrong with the line.
    """
    try:
        content = json.loads(line)
    except json.JSONDecodeError:
        raise ValueError("is no JSON") from None
    if not isinstance(content, dict) or type(content.get("step")) is not int:
        raise ValueError("has no step that is a whole number")
    if "loss" not in content:
        raise ValueError("has no loss")
    values = {}
    for quantity in QUANTITIES:
        if quantity in content:
            value = content[quantity]
            if value is not None and type(value) not in (int, float):
                raise ValueError(f"has the {quantity} {json.dumps(value)}, which is no number")
            values[quantity] = math.nan if value is None or not math.isfinite(value) else float(value)
    return content["step"], values


def _not_finite(run: Run, quantity: str, steps: Iterable[int]) -> list[int]:
    return [step for step in steps if math.isnan(run.steps[step].get(quantity, math.nan))]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _spans(steps: Iterable[int]) -> str:
    """Ascending whole numbers as 1-3, 7, 9-12; of many spans the first ones."""
    spans: list[list[int]] = []
    for step in steps:
        if spans and step == spans[-1][1] + 1:
            spans[-1][1] = step
        else:
            spans.append([step, step])
    shown = [str(low) if low == high else f"{low}-{high}" for low, high in spans[:_SPANS_SHOWN]]
    return ", ".join(shown) + (" and more" if len(spans) > _SPANS_SHOWN else "")


if __name__ == "__main__":
    sys.exit(main())
