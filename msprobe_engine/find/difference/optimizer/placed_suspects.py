"""Suspects of runs that were put together from stages and experts: named as in the dump of the rank they are on."""

from __future__ import annotations

import dataclasses

from msprobe_engine.align.parallel.merge_records import origin_of
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find.difference.divergence import Divergence
from msprobe_engine.find.difference.origin import MISSING, DifferenceOrigin
from msprobe_engine.find.findings import Suspect
from msprobe_engine.formats.dump.dump_table import DumpTable


def placed(suspect: Suspect, found: Divergence, rank: int, origin: DifferenceOrigin) -> Suspect:
    """The suspect with record, tensor and partner as they are called where they were dumped; `module` is the path in the whole model.

    Args:
        suspect: as `explain.suspect` made it; its rank is the one replica that is off, or the lowest rank.
        rank: of the walk.
    """
    walker = found.walkers[rank]
    target, golden = walker.side, walker.golden.side
    shown, op = (golden, origin.partner) if origin.kind == MISSING else (target, origin.op)
    here = origin_of(target, origin.op)
    return dataclasses.replace(
        suspect,
        record=_name(shown, op),
        rank=suspect.rank if here is None else here[0] + suspect.rank - rank,  # pipelines are cut alike, rank by rank
        partner=_name(golden, origin.partner) if origin.partner >= 0 else "",
        tensor=_row(target, origin.row) if origin.row >= 0 else "",
        why=suspect.why
        if _name(shown, op) == shown.ops[op]
        else Sentence("{0} ({1} in the order of the whole model)", suspect.why, shown.ops[op]),
    )


def _name(side: DumpTable, op: int) -> str:
    here = origin_of(side, op)
    return side.ops[op] if here is None else here[1]


def _row(side: DumpTable, row: int) -> str:
    op = side.op[row]
    return _name(side, op) + side.name[row][len(side.ops[op]) :]
