"""Ranks whose copies of the parameters agree and whose modules took in and gave the same in every step: each must have a part of the data.

With dropout the modules give numbers of their own on each rank, and nothing is said.
"""

from __future__ import annotations

import numpy as np

from msprobe_engine.core.text.ranges import ranks_text
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find.collectives.same_batch import NO_PART
from msprobe_engine.find.findings import Suspect
from msprobe_engine.find.monitor.number_pairs import COMPARED
from msprobe_engine.find.monitor.replicas import groups_of_copies
from msprobe_engine.formats.monitor.reader import Run
from msprobe_engine.formats.monitor.series import Key, Series

_FAMILY = "actv"


def of_copies(run: Run) -> list[Suspect]:
    """The first activation of ranks that hold copies, where all activations are the same on all of them and not in all steps. Nothing of
    ranks that differ, that have none, or of which one batch is all there is.

    Args:
        run: `check_replicas` has found that its copies of parameters agree.
    """
    shared = (_of_group(run, ranks) for ranks in groups_of_copies(run) if len(ranks) > 1)
    return [suspect for suspect in shared if suspect is not None]


def _of_group(run: Run, ranks: tuple[int, ...]) -> Suspect | None:
    first, *others = ranks
    tables = {rank: _activations(run, rank) for rank in ranks}
    if any(tables[rank].keys() != tables[first].keys() for rank in others):
        return None
    changes: str | None = None
    for place, series in tables[first].items():
        if not all(_is_same(series, tables[rank][place]) for rank in others):
            return None
        if changes is None and len(set(series.values.tolist())) > 1:
            changes = place[1].name
    if changes is None:
        return None
    module = changes.partition(".input")[0].partition(".output")[0]
    cause = Sentence("{0} were given the same batch", ranks_text(ranks))
    step = int(next(iter(tables[first].values())).steps[0])
    why = Sentence(NO_PART, ranks_text(ranks))
    return Suspect(f"{_FAMILY}/{changes}", module, first, step, kind="data", why=why, cause=cause, ranks=list(ranks))


def _activations(run: Run, rank: int) -> dict[tuple[str, Key], Series]:
    if _FAMILY not in run.families(rank):
        return {}
    return {(op, key): series for op in COMPARED if op in run.ops(rank, _FAMILY) for key, series in run.series(rank, _FAMILY, op).items()}


def _is_same(series: Series, other: Series) -> bool:
    return np.array_equal(series.steps, other.steps) and np.array_equal(series.values, other.values, equal_nan=True)
