"""How finely a page shows a run: as many columns as a number of cells allows, the same rule for every run.

A page holds, for every statistic of a metric, an overview (largest and smallest over the ranks; targets x steps) and a cube (targets x
ranks x steps). With few numbers both have every step and rank. With more, neighbouring steps, then neighbouring ranks of the cube are put
together, and a cell keeps its largest and its smallest number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from msprobe_engine.report.trends.bins import Bins

COLUMNS = 1024
"""Most steps beside each other; a window shows no more."""
FEW = 64
"""Columns of the cube below which ranks are put together first."""


@dataclass(frozen=True)
class Plan:
    """How finely.

    Attributes:
        fine: columns of the overview.
        coarse: columns of the cube: groups of `factor` fine ones.
        factor: fine columns in a coarse one.
        ranks: ranks of the cube.
        overview: the overview is there; else the cube has every column of it, and the page makes it from the cube.
        numbers: how many numbers the page holds by this.
        wanted: how many it would hold with every step and rank.
        spread: the smallest of a cell may differ from its largest in the cube.
    """

    fine: Bins
    coarse: Bins
    factor: int
    ranks: Bins
    overview: bool
    numbers: int
    wanted: int
    spread: bool

    def rank_text(self, rank: int) -> str:
        """The rank, or the group of ranks that it is in here, for people."""
        group = int(self.ranks.place(np.array([rank]))[0])
        first, last = int(self.ranks.first[group]), int(self.ranks.last[group])
        return f"rank {first}" if first == last else f"one of the ranks {first}-{last}"

    def to_json(self) -> dict[str, Any]:
        return {
            "fine": [self.fine.first.tolist(), self.fine.last.tolist()],
            "factor": self.factor,
            "ranks": [self.ranks.first.tolist(), self.ranks.last.tolist()],
            "steps": self.fine.of,
            "rankCount": self.ranks.of,
            "overview": self.overview,
            "spread": self.spread,
        }


def plan(steps: npt.NDArray[np.int64], ranks: npt.NDArray[np.int64], rows: int, budget: int, doubled: bool) -> Plan:
    """The finest columns for which the page holds at most `budget` numbers (one column and one group of ranks at least).

    Args:
        steps, ranks: that occur, ascending.
        rows: targets times statistics, over all metrics and runs.
        doubled: a target may have several numbers in a step.
    """
    full = Bins.even(steps, COLUMNS)
    every = Bins.even(ranks, len(ranks))
    rows = max(rows, 1)
    wanted = rows * len(ranks) * len(steps)

    def planes(of_steps: Bins, of_ranks: Bins) -> int:
        return 1 if of_steps.single and of_ranks.single and not doubled else 2

    count = rows * len(every) * len(full) * planes(full, every)
    if count <= budget:
        return Plan(full, full, 1, every, False, count, wanted, planes(full, every) == 2)
    if len(ranks) < 2:
        fine = full
        while len(fine) > 1 and rows * len(fine) * planes(fine, every) > budget:
            fine = Bins.even(steps, len(fine) // 2)
        return Plan(fine, fine, 1, every, False, rows * len(fine) * planes(fine, every), wanted, planes(fine, every) == 2)
    fine = full
    while len(fine) > 1 and rows * len(fine) * 2 > budget // 3:
        fine = Bins.even(steps, (len(fine) + 1) // 2)
    rest = budget - rows * len(fine) * 2
    factor, grouped = 1, 1
    coarse, of_ranks = fine, every

    def size() -> int:
        return rows * len(coarse) * len(of_ranks) * planes(coarse, of_ranks)

    while size() > rest and (len(coarse) > 1 or len(of_ranks) > 1):
        if len(coarse) > FEW or len(of_ranks) <= 8:
            if len(coarse) == 1:
                grouped *= 2
            factor *= 2
            coarse = fine.every(factor)
        else:
            grouped *= 2
        of_ranks = every.every(grouped)
    return Plan(fine, coarse, factor, of_ranks, True, rows * len(fine) * 2 + size(), wanted, planes(coarse, of_ranks) == 2)
