"""Ranks whose copies of the parameters agree and whose modules took in and gave the same in every step: each must have a part of the data.

With dropout the modules give numbers of their own on each rank, and nothing is said.
"""

from __future__ import annotations

from msprobe_engine.find.collectives.same_batch import describe_same_batch
from msprobe_engine.find.findings import Suspect
from msprobe_engine.find.monitor.replicas import columns_of, groups_of_copies, unequal_names
from msprobe_engine.formats.monitor.reader import Run

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
    tables = [columns_of(run, rank, _FAMILY) for rank in ranks]
    if unequal_names(tables):
        return None
    known = [(key.name, series) for column in tables[0] for key, series in column.items()]
    name = next((name for name, series in known if len(set(series.values.tolist())) > 1), None)
    if name is None:
        return None
    cause, why = describe_same_batch(ranks)
    module = name.partition(".input")[0].partition(".output")[0]
    step = int(known[0][1].steps[0])
    return Suspect(f"{_FAMILY}/{name}", module, ranks[0], step, kind="data", why=why, cause=cause, ranks=list(ranks))
