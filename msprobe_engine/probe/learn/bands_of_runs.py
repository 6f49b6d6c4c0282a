"""Learns what is normal from healthy runs: a band per metric and the relations that held, for rule ``learned``.

A band follows the run: at each knot (steps, closer at the beginning, where most moves) it is the median of the values around it, plus and
minus a multiple of their robust scatter, on a logarithmic scale where a metric is positive. A quarter of the run, in blocks, is not
learned from; each band is widened until it is silent there and in the rest. What cannot be made silent is left out and named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.records import UPDATES_MADE
from msprobe_engine.core.text.words import some
from msprobe_engine.formats.monitor.completeness import missing_parts
from msprobe_engine.formats.monitor.reader import Run, open_run
from msprobe_engine.formats.monitor.series import Floats, Integers, Key
from msprobe_engine.probe.learn.relations import relations
from msprobe_engine.probe.rules.bands import OPS, Band, Bands, sample_key
from msprobe_engine.probe.rules.builtin.values.learned import Limits

KNOTS = (0.0, 1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1.0)
"""Knots as parts of the run."""
FACTOR, WIDER, ROUNDS = 6.0, 1.5, 8
"""A band begins at so many deviations and is widened by so much, so often at most."""
LOG_FLOOR, SHARE_FLOOR, LINEAR_FLOOR = 0.5, 0.05, 0.1
"""Least half width: of logarithms, of shares of zeros, of other numbers relative to their median."""
FEW = 20
"""Values that a metric has to have."""
BLOCK, HELD_OUT = 8, 4
"""Steps of a block; every so many blocks one is held out."""
RECOVERY = 10

SCHEDULES = ("learning_rate", "loss_scale", "skipped", "weight_decay", "beta1", "beta2", "eps", "momentum", UPDATES_MADE)
_TIMES = ("seconds", "time", "memory", "bytes")
Progress = Callable[[Iterable[str]], Iterable[str]]


class _Line(NamedTuple):
    """One metric of one rank of one run."""

    steps: Integers
    values: Floats


class Alarm(NamedTuple):
    """A band that a healthy run has left.

    Attributes:
        metric: family, statistic and name, or the name of a number of the step.
    """

    metric: str
    steps: list[int]


@dataclass
class Learned:
    """What came out.

    Attributes:
        counts: what (``grad_reduced norm``, ``scalars``) to number of bands.
        left_out: reason to metrics.
        unread: what of the files could not be read, to how often.
        unread_count: how much of that is damage; what is learned lacks it.
        missing: what the runs have not written, or what is not here, see `msprobe_engine.formats.monitor.completeness`.
        widened: bands that had to be widened to be silent.
        steps: first and last step.
    """

    bands: Bands
    steps: tuple[int, int]
    counts: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, list[str]] = field(default_factory=dict)
    unread: dict[str, int] = field(default_factory=dict)
    unread_count: int = 0
    missing: list[str] = field(default_factory=list)
    widened: int = 0


def learn(paths: Sequence[Path], *, patience: int = 3, progress: Progress = lambda items: items) -> Learned:
    """Bands and relations of healthy runs.

    Args:
        paths: what `open_run` takes.
        patience: steps in a row outside of its band before a metric counts.
        progress: wraps the list of what is worked on, for a progress bar.

    Raises:
        UsageError: nothing to learn from.
    """
    runs = [open_run(path) for path in paths]
    first, last, count = _steps_of(runs)
    if count < FEW:
        raise UsageError(f"{', '.join(map(str, paths))}: {count} monitored steps with numbers or tensors; learning needs at least {FEW}")
    knots = tuple(sorted({first + round(part * (last - first)) for part in KNOTS}))
    out = Learned(Bands(knots, patience), (first, last))
    for family in progress(_families(runs)):
        for op, metric, lines in _metrics(runs, family):
            label = f"{family} {op} {metric}" if op else metric
            band = _band(out, label, op, lines, knots, patience)
            if band is None:
                continue
            out.counts[f"{family} {op}".strip()] = out.counts.get(f"{family} {op}".strip(), 0) + 1
            if op:
                out.bands.samples.setdefault(family, {}).setdefault(op, {})[metric] = band
            else:
                out.bands.scalars[metric] = band
    learned_relations = relations(runs)
    out.bands.changing, out.bands.finite, out.bands.scale = learned_relations
    for run in runs:
        out.unread.update(run.problems)
        out.unread_count += run.left_out
        out.missing += missing_parts(run)
    out.bands.about = {"runs": [str(path) for path in paths], "steps": [first, last], "bands": out.bands.count}
    if not out.bands.count:
        raise UsageError(f"{', '.join(map(str, paths))}: no metric could be learned: {out.left_out}")
    return out


def alerts_of(path: Path) -> int:
    """How many alerts a run has, ends of lasting ones not counted: one with alerts may be no healthy one.

    Raises:
        UsageError: nothing of a monitor at `path`.
    """
    run = open_run(path)
    return sum(not (alert.get("extra") or {}).get("over") for rank in run.ranks for alert in run.alerts(rank))


def check(bands: Bands, path: Path, *, progress: Progress = lambda items: items) -> tuple[list[Alarm], int]:
    """Holds another run against bands, as rule ``learned`` would have done.

    Returns:
        False alarms by metric, and how many metrics of the run have a band.

    Raises:
        UsageError: nothing of a monitor at `path`.
    """
    run = open_run(path)
    alarms: list[Alarm] = []
    known = 0
    for family in progress(_families([run])):
        for op, metric, lines in _metrics([run], family):
            band = bands.samples.get(family, {}).get(op, {}).get(metric) if op else bands.scalars.get(metric)
            if band is None:
                continue
            known += 1
            limits = Limits([band], bands.knots, 1.0)
            steps = sorted({step for line in lines for step in _begins(line, limits, bands.patience)})
            if steps:
                alarms.append(Alarm(f"{family} {op} {_plain(metric)}" if op else metric, steps))
    return alarms, known


def _families(runs: Sequence[Run]) -> list[str]:
    return ["scalars", *dict.fromkeys(family for run in runs for rank in run.ranks for family in run.families(rank))]


def _metrics(runs: Sequence[Run], family: str) -> Iterator[tuple[str, str, list[_Line]]]:
    """Statistic (empty for numbers of the step), name and lines of every metric of a family."""
    if family == "scalars":
        numbers: dict[str, list[_Line]] = {}
        for run in runs:
            for rank in run.ranks:
                for name, series in run.scalars(rank).items():
                    numbers.setdefault(name, []).append(_Line(*series))
        for name, lines in numbers.items():
            yield "", name, lines
        return
    for op in OPS:
        keyed: dict[Key, list[_Line]] = {}
        for run in runs:
            for rank in run.ranks:
                for key, series in run.series(rank, family, op).items():
                    keyed.setdefault(key, []).append(_Line(*series))
        for key, lines in keyed.items():
            yield op, sample_key(key.vpp_stage, key.micro_step, key.phase, key.detail, key.name), lines


def _plain(metric: str) -> str:
    """`sample_key` for the eye: without what is as always (stage 0, no micro batch), the name first."""
    stage, micro, phase, detail, name = metric.split(" ", 4)
    words = [phase, detail, f"micro step {micro}" if micro != "-1" else "", f"virtual stage {stage}" if stage != "0" else ""]
    remark = ", ".join(word for word in words if word)
    return f"{name} ({remark})" if remark else name


def _steps_of(runs: Sequence[Run]) -> tuple[int, int, int]:
    steps: set[int] = set()
    for run in runs:
        for rank in run.ranks:
            for series in run.scalars(rank).values():
                steps.update(series.steps.tolist())
            for family in run.families(rank):
                steps.update(run.table(rank, family).steps.tolist())
    return (min(steps), max(steps), len(steps)) if steps else (0, 0, 0)


def _band(out: Learned, label: str, op: str, lines: list[_Line], knots: Sequence[int], patience: int) -> Band | None:
    """The band of a metric, None when it is left out."""
    reason = ""
    if not op and label.partition("_group_")[0] in SCHEDULES:
        reason = "a schedule, not a measurement"
    elif not op and label.endswith(_TIMES):
        reason = "depends on the machine"
    values = np.concatenate([line.values for line in lines])
    finite = np.isfinite(values)
    if not reason and int(finite.sum()) < FEW:
        reason = f"fewer than {FEW} values"
    log = op == "norm" or (not op and bool((values[finite] > 0.0).all()))
    if not reason and log and (np.abs(values[finite]) > 0.0).mean() < 0.95:
        reason = "often exactly zero"
    if not reason and finite.mean() < 0.95:
        reason = "often not finite"
    if reason:
        out.left_out.setdefault(reason, []).append(label)
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        shape = _Shape(lines, knots, log, "share" if op == "zeros" else "log" if log else "linear")
    factor = FACTOR
    for turn in range(ROUNDS):
        with np.errstate(over="ignore", invalid="ignore"):
            band = shape.band(factor)
        if not np.isfinite([*band.low, *band.high]).all():
            break
        limits = Limits([band], knots, 1.0)
        if not any(_begins(line, limits, patience) for line in lines):
            out.widened += turn > 0
            return band
        factor *= WIDER
    reason = "does not settle" if np.isfinite([*band.low, *band.high]).all() else "numbers that are too large"
    out.left_out.setdefault(reason, []).append(label)
    return None


class _Shape:
    """Median and scatter of a metric around every knot."""

    def __init__(self, lines: Sequence[_Line], knots: Sequence[int], log: bool, scale: str) -> None:
        steps = np.concatenate([line.steps for line in lines])
        values = np.concatenate([line.values for line in lines])
        good = np.isfinite(values) & ((values != 0.0) if log else True)
        steps, values = steps[good], values[good]
        heights = np.log(np.abs(values)) if log else values
        learned = ((steps - knots[0]) // BLOCK) % HELD_OUT != HELD_OUT - 1
        steps, heights = (steps[learned], heights[learned]) if int(learned.sum()) >= FEW // 2 else (steps, heights)
        self._log = log
        self._scale = scale
        order = np.argsort(steps, kind="stable")
        steps, heights = steps[order], heights[order]
        centers, scatters = [], []
        for i, knot in enumerate(knots):
            low, high = knots[max(i - 1, 0)], knots[min(i + 1, len(knots) - 1)]
            near = heights[np.searchsorted(steps, low) : np.searchsorted(steps, high, side="right")]
            if len(near) < 8:
                # The eight values that are nearest: few steps at the beginning of a run.
                near = heights[np.argsort(np.abs(steps - knot), kind="stable")[:8]]
            center = float(np.median(near))
            spread = 1.4826 * float(np.median(np.abs(near - center)))
            # A metric that moves around the knot reaches further to one side than its median deviation says.
            centers.append(center)
            scatters.append(max(spread, float(np.quantile(np.abs(near - center), 0.95)) / 2.0))
        self._centers, self._scatters = np.array(centers), np.array(scatters)

    def band(self, factor: float) -> Band:
        """The band of so many deviations."""
        half = factor * self._scatters
        if self._scale == "log":
            half = np.maximum(half, LOG_FLOOR * factor / FACTOR)
        elif self._scale == "share":
            half = np.maximum(half, SHARE_FLOOR * factor / FACTOR)
        else:
            half = np.maximum(half, LINEAR_FLOOR * np.maximum(np.abs(self._centers), np.abs(self._centers).mean()) * factor / FACTOR)
        return Band(tuple((self._centers - half).tolist()), tuple((self._centers + half).tolist()), self._log)


def _begins(line: _Line, limits: Limits, patience: int) -> list[int]:
    """Steps in which an alert would have begun: as `msprobe_engine.probe.rules.tracked_series.Episodes` over the steps that have a
    value."""
    finite = np.isfinite(line.values)
    steps, values = line.steps[finite], line.values[finite]
    bad = outside(limits, values, steps)
    if not bad.any():
        return []
    begins: list[int] = []
    row = fine = 0
    running = False
    for step, wrong in zip(steps.tolist(), bad.tolist()):
        row, fine = (row + 1, 0) if wrong else (0, fine + 1)
        if not running and row >= patience:
            running = True
            begins.append(step)
        elif running and fine >= RECOVERY:
            running = False
    return begins


def outside(limits: Limits, values: Floats, steps: Integers) -> npt.NDArray[np.bool_]:
    """`Limits.outside` of one metric over many steps, [n]."""
    low, high = limits.over(steps)
    with np.errstate(divide="ignore", invalid="ignore"):
        heights = np.log(np.abs(values)) if limits.log[0] else values
    out: npt.NDArray[np.bool_] = (heights < low) | (heights > high)
    return out


def describe(learned: Learned) -> list[str]:
    """The summary, line by line."""
    bands = learned.bands
    lines = [f"learned {bands.count} bands from steps {learned.steps[0]} to {learned.steps[1]}; {learned.widened} were widened"]
    lines += [f"  {family}: {count}" for family, count in learned.counts.items()]
    held = []
    if bands.changing:
        held.append(f"{len(bands.changing)} parameters change with every step")
    if bands.finite:
        held.append("gradients are finite")
    if bands.scale:
        held.append("the loss scale falls only when an update is skipped")
    lines.append("relations that hold: " + ("; ".join(held) or "none that could be seen"))
    for reason, metrics in learned.left_out.items():
        lines.append(f"left out ({reason}): {some(metrics, 3)}")
    return lines
