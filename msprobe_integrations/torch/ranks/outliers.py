"""Numbers of the ranks beside each other, for rule ``outlier_rank``: a few hundred bytes per step, in the background, some steps late.

Each rank puts its numbers into rows of its own and leaves those of the others empty; the merge of all is the table.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch.distributed as dist

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.guard import raise_of_training
from msprobe_engine.core.log import get_logger
from msprobe_engine.core.records import Frame, Sample
from msprobe_engine.core.statistics import rows as _rows
from msprobe_engine.probe.rules.base import Rule
from msprobe_engine.probe.rules.builtin.ranks.outlier_rank import OutlierRankRule, RankNumbers, outlier_rule
from msprobe_engine.probe.rules.layout import LayoutCache
from msprobe_engine.probe.rules.tracked_series import Watch
from msprobe_integrations.torch.ranks.merge import RowExchange, RowMerge

_log = get_logger()

BLOCK = 64
"""Ranks that are compared with each other: neighbours. More would cost more and say no more."""
LIMIT = 80
"""Exchanges that may be under way, more than wait in the line of the exchange; more mean that a rank is silent."""
LOCAL_NORM = "grad_norm_local"


class RankWatch:
    """A frame listener that exchanges the numbers of each frame.

    Args:
        rule: gets the numbers of all ranks of the block.
        ranks: global ranks of the block.

    Raises:
        RuntimeError: this process may not open so many files.
    """

    def __init__(self, rule: OutlierRankRule, ranks: Sequence[int], rank: int) -> None:
        self._rule = rule
        self._names = rule.args.scalars
        self._ranks = list(ranks)
        self._place = self._ranks.index(rank)
        self._exchange = RowExchange(ranks=self._ranks, purpose="outliers")
        self._pending: deque[tuple[int, RowMerge]] = deque()
        self._all = range(len(self._ranks) * len(self._names))
        self._told: set[str] = set()
        self._gradients = Watch(LayoutCache(), _select_unreduced)
        self.failed = ""

    def on_frame(self, frame: Frame, _alerts: Sequence[Alert]) -> None:
        """Send the numbers of a frame; take over what has arrived. Never waits and never raises."""
        if self.failed:
            return
        try:
            self._collect()
            if len(self._pending) >= LIMIT:
                raise RuntimeError(f"ranks {self._ranks} did not all send their numbers in {LIMIT} steps: is the probe off on one of them?")
            merge = self._exchange.merge(frame.step, self._names, self._all)
            merge.start(self._rows(frame))
            self._pending.append((frame.step, merge))
        except Exception as error:
            raise_of_training(error)
            self.failed = str(error) or type(error).__name__
            self._exchange.close("a fault has switched its rule outlier_rank off")
            _log.warning("rule outlier_rank: numbers of the ranks are not compared any more, training goes on: %s", self.failed)

    def close(self) -> None:
        """Take the group apart."""
        self.failed = self.failed or "closed"
        self._pending.clear()
        self._exchange.close()

    def _collect(self) -> None:
        if self._exchange.failed:
            raise RuntimeError(self._exchange.failed)
        while self._pending and ((merge := self._pending[0][1]).merged is not None or merge.apart):
            step, merge = self._pending.popleft()
            if merge.merged is None:
                if merge.apart not in self._told:
                    self._told.add(merge.apart)
                    _log.warning(
                        "rule outlier_rank: numbers of ranks %s are not compared in step %d and others like it: %s; said once",
                        self._ranks,
                        step,
                        merge.apart,
                    )
                continue
            merged = merge.merged
            sums = np.where(_rows.as_int64(merged)[:, _rows.NANS] > 0, np.nan, merged[:, _rows.SUM])
            sums = np.where(_rows.as_int64(merged)[:, _rows.POS_INF] > 0, np.inf, sums)
            self._rule.submit(RankNumbers(step, self._ranks, self._names, sums.reshape(len(self._ranks), len(self._names))))

    def _rows(self, frame: Frame) -> _rows.Rows:
        """One row per rank and number; those of the other ranks are empty. A number that the frame lacks is NaN."""
        width = len(self._names)
        rows = _rows.empty(len(self._ranks) * width)
        ints = _rows.as_int64(rows)
        for i, name in enumerate(self._names, self._place * width):
            value = self._local_norm(frame) if name == LOCAL_NORM and name not in frame.scalars else frame.scalars.get(name, math.nan)
            ints[i, _rows.COUNT] = 1
            if math.isfinite(value):
                rows[i, _rows.SUM] = value
            else:
                ints[i, _rows.NANS if math.isnan(value) else _rows.POS_INF] = 1
        return rows

    def _local_norm(self, frame: Frame) -> float:
        """Norm of the gradients that this rank has before the reduction; NaN where they are not monitored."""
        view = self._gradients.of(frame)
        return math.nan if view is None else math.sqrt(float(view.table.squares[view.places].sum()))


def _select_unreduced(sample: Sample) -> str | None:
    return sample.family if sample.family == "grad_unreduced" and sample.micro_step < 0 else None


def watch_ranks(rules: Sequence[Rule], watched: Sequence[int] = ()) -> RankWatch | None:
    """The watch that the rules ask for; None when they do not, or there are fewer than three ranks to compare.

    Args:
        watched: ranks that monitor, empty is all.
    """
    rule = outlier_rule(rules)
    if rule is None or not dist.is_initialized():
        return None
    ranks = sorted(watched) if watched else list(range(dist.get_world_size()))
    rank = dist.get_rank()
    if rank not in ranks:
        return None
    first = ranks.index(rank) // BLOCK * BLOCK
    block = ranks[first : first + BLOCK]
    return RankWatch(rule, block, rank) if len(block) >= 3 else None
