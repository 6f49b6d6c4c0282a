"""What two dumps have in common: records that one of them leaves out, because it was made at another level or of other modules, are no
difference of the runs; and runs with next to nothing in common have no place where their numbers part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from msprobe_engine.align.calls.structure import match_structure
from msprobe_engine.align.parallel.micro_batches import subset
from msprobe_engine.core import names
from msprobe_engine.core.names import is_collective
from msprobe_engine.core.text.ranges import steps_text
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find.coverage.one_sided_calls import unseen_results
from msprobe_engine.find.difference.divergence import Divergence
from msprobe_engine.find.difference.harmless import left_out, memory
from msprobe_engine.find.difference.walk import DifferenceWalk
from msprobe_engine.find.findings import Diagnosis
from msprobe_engine.formats.dump.dump_table import DumpTable
from msprobe_engine.measure import missing_statistics
from msprobe_engine.measure.dump_dialects import say_contradictions

Sides = Mapping[int, DumpTable]
Rows = tuple[list[int], list[int]]

_FEWEST = 3
"""Of so many calls at least one has a partner in two runs of one program."""

_MODULE, _FUNCTION, _COLLECTIVE = "modules", "functions", "collectives"


def restrict_to_common(target: Sides, golden: Sides, evidence: list[str]) -> tuple[Sides, Sides]:
    """The sides without what the other one leaves out; the same objects where nothing is left out.

    Args:
        target, golden: the ranks of one step; not changed.
        evidence: where to say what was left out.
    """
    levels = _of(target, "level"), _of(golden, "level")
    if levels[0] != levels[1]:
        target, golden = _families(target, golden)
        _add_evidence(
            evidence,
            Sentence("The dumps are of levels {0} and {1}: only kinds of records that both have are compared.", levels[0], levels[1]),
        )
    chosen = _of(target, "selection"), _of(golden, "selection")
    if chosen[0] != chosen[1] and target.keys() == golden.keys():
        pairs = {rank: _restrict_to_matches(side, golden[rank]) for rank, side in target.items()}
        target, golden = {rank: pair[0] for rank, pair in pairs.items()}, {rank: pair[1] for rank, pair in pairs.items()}
        _add_evidence(
            evidence,
            Sentence(
                "The dumps hold other selections of records ({0}, in the golden run {1}): what only one of them holds is left out.",
                chosen[0] or "all",
                chosen[1] or "all",
            ),
        )
    return target, golden


def are_unrelated(divergence: Divergence, diagnosis: Diagnosis) -> bool:
    """The runs are of different programs: most calls have no partner, and what has one differs. Says so in the evidence, and how much
    differs."""
    matched = sum(len(structure.pairs) for structure in divergence.structures.values())
    target_records, golden_records = (
        sum(len(side.ops) for side in sides) for sides in zip(*((w.side, w.golden.side) for w in divergence.walkers.values()))
    )
    if _FEWEST * matched >= min(target_records, golden_records):
        return False
    diagnosis.differences = sum(walk.differing for walk in divergence.walks.values()) or len(divergence.origins)
    diagnosis.evidence.append(
        Sentence(
            "Only {0} of {1} records have a partner among the {2} of the golden run, and {3} of them differ. Are they "
            "dumps of the same training?",
            f"{matched:,}",
            f"{target_records:,}",
            f"{golden_records:,}",
            f"{diagnosis.differences:,}",
        )
    )
    return True


def count_not_compared(divergence: Divergence) -> int:
    """Pairs of rows of a step with NaN or Inf on both sides and nothing finite beside them that could be compared. Calls that only move
    numbers are not counted: what computes with these numbers shows them, too, and a buffer that is written into part by part has NaN where
    nobody has written yet."""
    return sum(divergence.of_each(_count_not_finite).values())


def _count_not_finite(walker: DifferenceWalk) -> int:
    m = walker.measured
    hidden = np.flatnonzero(m.bad_target & m.bad_golden & ~m.known).tolist()
    return sum(not memory.is_moved_or_written_over(walker, walker.rows[pair][0]) for pair in hidden)


@dataclass
class OneSided:
    """What only one side of a walk has, or what one of them cannot have.

    Attributes:
        accepted: bool (pairs of rows,): what one of the pair has needs no partner.
        alone: rows of matched records without a partner, of the target and of the golden side.
        not_compared: those of them that need one, and results of unmatched records that nothing compared tells of; all other rows of one
            side need no partner.
    """

    accepted: npt.NDArray[np.bool_]
    alone: Rows
    not_compared: Rows


def find_one_sided(walker: DifferenceWalk) -> OneSided:
    """For all commands: which rows of one side are a loss."""
    alone = missing_statistics.alone(walker.side, walker.golden.side, walker.structure.pairs, walker.rows)
    given, unpaired = left_out.given_by_one_side(walker, left_out.without_effect(walker, alone))
    target_results, golden_results = unseen_results(walker)
    return OneSided(given, alone, (unpaired[0] + target_results, unpaired[1] + golden_results))


def say_one_sided(divergence: Divergence) -> tuple[bool, list[str]]:
    """Say on the sides of a step what only one side has, or what one of them cannot have; those of wholes, which are made of many, are not
    counted.

    Returns:
        whether there is something; names of the rows of matched records that need no partner, which are no warning (`AcceptedRows`).
    """
    said, accepted = False, list[str]()
    for rank, walker in divergence.different().walkers.items():
        if rank in divergence.wholes or not walker.structure.pairs:  # with no record in common there is no one side
            continue
        sides, found = (walker.side, walker.golden.side), find_one_sided(walker)
        for sentence in missing_statistics.sentences(*sides, walker.measured.one_sided & ~found.accepted[:, None], *found.not_compared):
            said = True
            walker.side.add_problem(sentence)
        accepted += _names_without_need(walker, found)
        said = say_contradictions(*sides, walker.rows) or said
    return said or bool(accepted), accepted


class AcceptedRows:
    """Rows of a run that only one side has and that need no partner: one sentence, however many steps have them."""

    def __init__(self) -> None:
        self._count = 0
        self._first = ""
        self._steps: list[int] = []

    def add(self, step: int, names_of_rows: Sequence[str]) -> None:
        """Those of another step."""
        if names_of_rows:
            self._count += len(names_of_rows)
            self._first = self._first or names_of_rows[0]
            self._steps.append(step)

    def sentences(self) -> list[Sentence]:
        """None where there is no such row."""
        if not self._count:
            return []
        template = (
            "In {0}, {1} values that only one of the runs has were not compared: what is made of them was compared. The first is {2}."
        )
        if self._count == 1:
            template = "In {0}, {1} value that only one of the runs has was not compared: what is made of it was compared. It is {2}."
        return [Sentence(template, steps_text(self._steps), f"{self._count:,}", self._first)]


def _names_without_need(walker: DifferenceWalk, found: OneSided) -> list[str]:
    """Names of rows of matched records that only one side has and that need no partner."""
    sides = walker.side, walker.golden.side
    without = [sorted(set(rows).difference(remaining)) for rows, remaining in zip(found.alone, found.not_compared)]
    names_of_rows = [side.name[row] for side, rows in zip(sides, without) for row in rows]
    pairs = (walker.rows[pair] for pair in sorted(set(np.flatnonzero(found.accepted).tolist()).difference(walker.so_far)))
    return names_of_rows + [sides[0].name[row] if isinstance(sides[0].shape[row], list) else sides[1].name[other] for row, other in pairs]


def _add_evidence(evidence: list[str], sentence: str) -> None:
    if sentence not in evidence:
        evidence.append(sentence)


def _of(sides: Sides, key: str) -> str:
    """The values of a key of the headers, as one text; "" without the key."""
    return ", ".join(sorted({str(side.header[key]) for side in sides.values() if key in side.header}))


def _families(target: Sides, golden: Sides) -> tuple[Sides, Sides]:
    kinds = [{rank: [_family(name) for name in side.ops] for rank, side in sides.items()} for sides in (target, golden)]
    common = set.intersection(*({kind for of_rank in of_side.values() for kind in of_rank} for of_side in kinds))
    if not common:
        return target, golden
    cut = [
        {rank: subset(side, (op for op, kind in enumerate(of_side[rank]) if kind in common)) for rank, side in sides.items()}
        for sides, of_side in zip((target, golden), kinds)
    ]
    return cut[0], cut[1]


def _family(name: str) -> str:
    parsed = names.parse(name)
    if isinstance(parsed, (names.ModuleName, names.ParametersGradName)):
        return _MODULE
    return _COLLECTIVE if is_collective(name) else _FUNCTION


def _restrict_to_matches(target: DumpTable, golden: DumpTable) -> tuple[DumpTable, DumpTable]:
    pairs = match_structure(target, golden).pairs
    return subset(target, sorted(i for i, _ in pairs)), subset(golden, sorted(j for _, j in pairs))
