"""The part of a diagnosis that one rank can do alone, in the process that made its table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from msprobe_engine.align.calls.alignment import align_sides
from msprobe_engine.align.calls.structure import Aligned
from msprobe_engine.find.difference.walk import DifferenceWalk, Walk
from msprobe_engine.formats.dump.dump_table import DumpTable
from msprobe_engine.measure.tensors.metrics import Figures


@dataclass
class RankWalk:
    """One rank of one step.

    Attributes:
        walker: of both sides.
        walk: as it is when nothing came before the step, other ranks put in nothing that differs, and the dtypes say what round-off is.
        sides: target and golden, as they were read.
    """

    walker: DifferenceWalk
    walk: Walk
    sides: tuple[DumpTable, DumpTable]


def walk_rank(
    target: DumpTable,
    golden: DumpTable,
    aligned: Aligned | None = None,
    measured: Mapping[tuple[int, int], Figures] | None = None,
) -> RankWalk:
    """Match two sides, unless that was done (`aligned`), and walk them; `measured`: pair of rows -> what was measured of its saved
    tensors, unless they are to be read here."""
    if aligned is None:
        aligned = align_sides(target, golden)
    walker = DifferenceWalk(aligned.target, aligned.golden, aligned.structure, measured)
    return RankWalk(walker, walker.walk(), (target, golden))


def reuse_walk(begun: Mapping[int, RankWalk], rank: int, target: DumpTable, golden: DumpTable) -> RankWalk | None:
    """What was begun with these very sides, if anything was."""
    walk = begun.get(rank)
    return walk if walk is not None and walk.sides[0] is target and walk.sides[1] is golden else None
