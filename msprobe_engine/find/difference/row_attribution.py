"""What the diagnosis says of one rank of one step, for the table of it.

Between two frameworks nothing is ever bit-equal, and from the second step on not even the parameters are. Where a difference begins takes
the step before into account: gradients that came to nothing in it, and how far its optimizer has moved what.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.find.difference.divergence import Divergence, settle_origins
from msprobe_engine.find.difference.rank_walk import RankWalk, walk_rank
from msprobe_engine.formats.dump import layout
from msprobe_engine.formats.dump.dump_table import DumpTable, read_side
from msprobe_engine.measure.distances import Bools, Floats
from msprobe_engine.measure.factorize import Integers


@dataclass
class RowAttribution:
    """Of the rows of a table.

    Attributes:
        distance: float64 (n,), how far they are apart as the diagnosis takes it (gradients that cancel are measured against their terms);
            NaN where it has not measured.
        begins: bool (n,), rows of records where a difference begins.
    """

    distance: Floats
    begins: Bools


def settled(begun: RankWalk, rows: Integers, others: Integers) -> RowAttribution:
    """What is known of the rows of a table.

    Args:
        begun: of the sides that the rows are of.
        rows, others: int64 (n,), row of the target and of the golden side, -1 where there is none.
    """
    walker = begun.walker
    walked = settle_origins(Divergence(walkers={0: walker}), _before(*begun.sides))
    known = dict(zip(walker.rows, walker.measured.distance.tolist()))
    records = np.array([(origin.op, origin.partner) for _, origin in walked.origins], np.int64).reshape(-1, 2)
    begins = np.zeros(len(rows), bool)
    for side, numbers, mine in zip((walker.side, walker.golden.side), records.T, (rows, others)):
        record = np.array(side.op, np.int64)[mine] if len(side) else np.zeros(len(mine), np.int64)
        begins |= (mine >= 0) & np.isin(record, numbers)
    distance = np.array([known.get(pair, np.nan) for pair in zip(rows.tolist(), others.tolist())], np.float64)
    return RowAttribution(distance, begins)


def _before(target: DumpTable, golden: DumpTable) -> Divergence | None:
    """The step before of the same rank, where both runs have dumped it."""
    paths = [_step_before(side.path) for side in (target, golden)]
    if paths[0] is None or paths[1] is None:
        return None
    try:
        sides = read_side(paths[0]), read_side(paths[1])
    except DumpFormatError:
        return None  # its own table says so
    if not all(len(side) for side in sides):
        return None
    for side, known in zip(sides, (target, golden)):
        _named_alike(side, known)
    return settle_origins(Divergence(walkers={0: walk_rank(*sides).walker}), None)


def _named_alike(side: DumpTable, known: DumpTable) -> None:
    """What a mapping has said of one step holds for another one."""
    if known.aliases is not known.ops:
        names = dict(zip(known.ops, known.aliases))
        places = {known.name[row]: place for row, place in known.positions.items()}
        side.aliases = [names.get(op, op) for op in side.ops]
        side.positions = {row: places[name] for row, name in enumerate(side.name) if name in places}


def _step_before(path: Path) -> Path | None:
    rank = path.parent
    number = layout.step_of(rank.parent.name)
    if not number:
        return None
    found = rank.parent.parent / rank.parent.name.replace(str(number), str(number - 1)) / rank.name / path.name
    return found if found.exists() else None
