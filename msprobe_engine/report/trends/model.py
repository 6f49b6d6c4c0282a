"""What a trends page is made of: the numbers of one or two runs in one grid, and what stands out in them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from msprobe_engine.report.trends.alerts import Raised
from msprobe_engine.report.trends.bins import Extremes, Sums
from msprobe_engine.report.trends.facts import Facts
from msprobe_engine.report.trends.plan import Plan
from msprobe_engine.report.trends.sources.source import Target


@dataclass
class Metric:
    """One metric over all runs.

    Attributes:
        name: as the files have it.
        targets: rows of its heat map, in the order of the model.
        statistics: in the order in which they are offered.
    """

    name: str
    targets: list[Target] = field(default_factory=list)
    statistics: list[str] = field(default_factory=list)


class Grid(NamedTuple):
    """One statistic of a metric of one run.

    Attributes:
        overview: extremes over the ranks, [targets, fine columns]; None where the cube is as fine.
        cube: [targets, groups of ranks, coarse columns].
        sums: of two runs, over the ranks that both have, [targets, fine columns].
    """

    overview: Extremes | None
    cube: Extremes
    sums: Sums | None = None


class NonFinite(NamedTuple):
    """A target with NaN or Inf, on the ranks on which that began in this step.

    Attributes:
        step: the first.
        ranks: ascending.
        last: the last.
        steps: how many, of the rank with most.
        kind: ``NaN`` or ``Inf``, at the first step.
        order: when in the step it was made, see `msprobe_engine.report.trends.sources.source.Part`; -1: the metric alone says.
    """

    step: int
    ranks: tuple[int, ...]
    metric: str
    target: int
    kind: str
    statistics: tuple[str, ...]
    last: int
    steps: int
    order: int = -1


class StandOut(NamedTuple):
    """A target that leaves its own median, or, with two runs, the other run.

    Attributes:
        what: ``jump``, ``fall``, ``ranks`` (further apart than usual), ``rank`` and ``rank_low`` (one above or below the others), or
            ``runs`` (runs apart).
        step: first step of the column.
        factor: how many times.
        rank: the one that is farthest from the others; of a group of ranks the first; -1: all of them.
    """

    what: str
    step: int
    metric: str
    statistic: str
    target: int
    factor: float
    rank: int = -1


@dataclass
class RunTrend:
    """One run in the grid.

    Attributes:
        path: as given.
        kinds: what was read: csv, jsonl, sqlite, dump.
        steps: how many of the steps it has, first and last.
        grids: metric and statistic to numbers.
        nonfinite: earliest first; at most `findings.KEPT`, `nonfinite_count` says of how many.
        unwrapped: whether ``module.`` was taken off the front of its names.
        raised: alerts, as the files have their steps.
        facts: what it says of itself.
        names: metric and row in its files to the row in the grid, where that has another name.
        problems: what of it does not match the other run, and what could not be read, to how often.
    """

    name: str
    path: str
    kinds: tuple[str, ...]
    ranks: list[int]
    steps: tuple[int, int, int] = (0, 0, 0)
    rows: int = 0
    grids: dict[tuple[str, str], Grid] = field(default_factory=dict)
    nonfinite: list[NonFinite] = field(default_factory=list)
    nonfinite_count: int = 0
    stand_out: list[StandOut] = field(default_factory=list)
    problems: dict[str, int] = field(default_factory=dict)
    raised: Raised = field(default_factory=Raised)
    facts: Facts = field(default_factory=Facts)
    names: dict[tuple[str, Target], Target] = field(default_factory=dict)
    unwrapped: bool = False


@dataclass
class Trends:
    """One or two runs in one grid.

    Attributes:
        metrics: by name, in the order in which they are offered.
        shift: steps that the second run is moved by.
        apart: where two runs go apart, and `limit`, the relative difference from which they do.
        compared: how many rows of two runs have a step in common.
        left_alone: something that only one of two runs has, and that was not compared: rows, steps, ranks, statistics.
    """

    plan: Plan
    metrics: dict[str, Metric]
    runs: list[RunTrend]
    shift: int = 0
    apart: list[StandOut] = field(default_factory=list)
    limit: float = 0.0
    compared: int = 0
    left_alone: bool = False
