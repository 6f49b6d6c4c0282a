"""What is found in one rank of one step when it is looked at alone: for its table, before the ranks are held against each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from msprobe_engine.align.calls.alignment import are_of_different_frameworks
from msprobe_engine.align.parallel.unshard.global_tensors import GlobalTensors
from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.find.coverage.common_records import OneSided, find_one_sided
from msprobe_engine.find.difference import suspects
from msprobe_engine.find.difference.divergence import Divergence, diverge, settle_origins
from msprobe_engine.find.difference.layouts import diverge_whole
from msprobe_engine.find.difference.noise.calibration import Floats
from msprobe_engine.find.difference.rank_walk import RankWalk, walk_rank
from msprobe_engine.find.difference.walk import DifferenceWalk
from msprobe_engine.find.findings import Suspect
from msprobe_engine.formats.dump import layout
from msprobe_engine.formats.dump.dump_table import DumpTable
from msprobe_engine.formats.dump.read_table import read_side


@dataclass(frozen=True)
class RankFindings:
    """Of one rank of one step.

    Attributes:
        walker: both sides, with their distances; the rows of a table are rows of its sides.
        begins: where differences begin in this rank, the most likely first; records are named as in the sides of `walker`.
        differs: something is off in this step, in this rank or another one.
        one_sided: which rows of one side are a loss; None of what was put together of several ranks.
    """

    walker: DifferenceWalk
    begins: Sequence[Suspect]
    differs: bool
    one_sided: OneSided | None


def find_in_rank(begun: RankWalk, step: int, rank: int, moved: Floats | None = None) -> RankFindings:
    """Look at one rank alone.

    Args:
        begun: its walk.
        step, rank: for what is said.
        moved: float64 (rows of the golden side), what round-off moves each row (`find.difference.noise.calibration`); None: dtypes tell.
    """
    target, golden = begun.sides
    before = _before(target, golden, rank) if are_of_different_frameworks(target, golden) and moved is None else None
    units = None if moved is None else {rank: moved}
    return _collect_findings(diverge({rank: target}, {rank: golden}, before, units, {rank: begun}), step, rank)


def find_in_whole(whole: GlobalTensors, step: int, rank: int) -> RankFindings:
    """Look at what all ranks of a step make together."""
    return _collect_findings(diverge_whole(whole, rank), step, rank)


def _collect_findings(walked: Divergence, step: int, rank: int) -> RankFindings:
    begins = suspects.of_origins(step, walked) or suspects.of_facts(step, walked)
    walker = walked.walkers[rank]
    return RankFindings(walker, begins, bool(begins), None if rank in walked.wholes else find_one_sided(walker))


def _before(target: DumpTable, golden: DumpTable, rank: int) -> Divergence | None:
    """The step before of the same rank, where both runs have dumped it. Between two frameworks nothing is ever bit-equal, and from the
    second step on not even the parameters are: where a difference begins takes into account how far the optimizer has moved what."""
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
        # What a mapping has said of one step holds for another one
        if known.aliases is not known.ops:
            names = dict(zip(known.ops, known.aliases))
            places = {known.name[row]: place for row, place in known.positions.items()}
            side.aliases = [names.get(op, op) for op in side.ops]
            side.positions = {row: places[name] for row, name in enumerate(side.name) if name in places}
    return settle_origins(Divergence(walkers={rank: walk_rank(*sides).walker}), None)


def _step_before(path: Path) -> Path | None:
    rank = path.parent
    number = layout.step_of(rank.parent.name)
    if not number:
        return None
    earlier = rank.parent.parent / rank.parent.name.replace(str(number), str(number - 1)) / rank.name / path.name
    return earlier if earlier.exists() else None
