"""Do the collectives of one step give what was put into them? Statistics are enough to tell.

* what every rank gets must be the same on all of them (all_reduce, broadcast, all_gather);
* the mean of a sum is the sum of the means, of an average the average; of a maximum the maximum;
* what a rank receives is what the other one has sent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from msprobe_engine.core.operator_traits import normal_op
from msprobe_engine.core.text.sentences import Sentence, one_line_of
from msprobe_engine.core.text.source_line import source_of
from msprobe_engine.find.collectives.links import Link, Links
from msprobe_engine.find.difference import cross_rank
from msprobe_engine.find.difference.explain import module_around, stack_of
from msprobe_engine.find.findings import Suspect
from msprobe_engine.formats.dump.collective_record import is_asynchronous, reduction_of
from msprobe_engine.formats.dump.dump_table import INPUT, OUTPUT, DumpTable
from msprobe_engine.formats.dump.record_rows import is_number
from msprobe_engine.measure import distances, roundoff

_SAME_EVERYWHERE = frozenset(("allreduce", "broadcast", "allreducecoalesced"))
_SLACK = 64


@dataclass
class Wrong:
    """One collective that is not right on one rank."""

    side: DumpTable
    op: int
    rank: int
    why: str

    def suspect(self, step: int) -> Suspect:
        """For the diagnosis."""
        record = self.side.ops[self.op]
        stack = stack_of(self.side, record)
        module = module_around(self.side, record)
        return Suspect(record, module, self.rank, step, source_of(stack), "collective", self.why, stack=stack)


@dataclass
class Checked:
    """`count`: collectives whose parts could be held against each other; `wrong`: those that are not right, in order;
    `links`: all of them."""

    count: int = 0
    wrong: list[Wrong] = field(default_factory=list)
    links: Links = field(default_factory=Links)


def check(sides: Mapping[int, DumpTable]) -> Checked:
    """Check all collectives of a step."""
    found = Checked(links=cross_rank.linked(sides))
    for link in sorted(found.links.links, key=lambda link: min((op for _, op in link.members), default=0)):
        if link.missing or len(link.members) < 2 or any(rank not in sides for rank, _ in link.members):
            continue
        wrong = _check(link, sides)
        if wrong is not None:
            found.count += 1
            found.wrong += wrong
    return found


def _check(link: Link, sides: Mapping[int, DumpTable]) -> list[Wrong] | None:
    """None: nothing about it can be checked."""
    op = normal_op(link.op)
    if op not in _SAME_EVERYWHERE:
        return None
    outs = {rank: _tensors(sides[rank], index, OUTPUT) for rank, index in link.members}
    ins = {rank: _tensors(sides[rank], index, INPUT) for rank, index in link.members}
    if not all(outs.values()):
        return None
    if not all(is_number(value) for rank, rows in outs.items() for row in rows for value in sides[rank].stats_of(row)):
        return None  # `load_rank` says it
    if any(is_asynchronous(sides[rank].collectives.get(index, {})) for rank, index in link.members):
        return None
    reference = _expected(link, sides, ins) if op == "allreduce" else None
    wrong: list[Wrong] = []
    groups: dict[tuple[object, ...], list[int]] = {}
    for rank, rows in outs.items():
        groups.setdefault(tuple(sides[rank].stats_of(row) for row in rows), []).append(rank)
    places = dict(link.members)
    if len(groups) > 1:
        right = _right(groups, reference, sides, outs)
        for key, ranks in groups.items():
            if key != right:
                others = Sentence("the other ranks") if right is None else Sentence("rank {0}", groups[right][0])
                wrong += [
                    Wrong(
                        sides[r],
                        places[r],
                        r,
                        one_line_of(
                            Sentence("{0}: rank {1} gets another result than {2}, of one collective", sides[r].ops[places[r]], r, others)
                        ),
                    )
                    for r in ranks
                ]
    elif reference is not None:
        rank, rows = next(iter(outs.items()))
        if not _agrees(sides[rank], rows[0], reference):
            text = Sentence(
                "the mean of the result is {0}, of what the ranks put in {1}", sides[rank].stats_of(rows[0])[2], f"{reference[0]:.6g}"
            )
            wrong.append(Wrong(sides[rank], places[rank], rank, one_line_of(Sentence("{0}: {1}", sides[rank].ops[places[rank]], text))))
    return wrong


def _tensors(side: DumpTable, op: int, role: int) -> list[int]:
    return [r for r in side.rows(op) if side.role[r] == role and isinstance(side.shape[r], list) and r not in side.values and side.dtype[r]]


def _expected(link: Link, sides: Mapping[int, DumpTable], ins: Mapping[int, Sequence[int]]) -> tuple[float, float] | None:
    """(mean of the result, tolerance); None when the dump does not say enough."""
    rank, op = link.members[0]
    how = reduction_of(sides[rank].collectives.get(op, {}))
    if how not in ("sum", "avg") or not all(ins.values()):
        return None
    means, spread, eps = 0.0, 0.0, 0.0
    for r, rows in ins.items():
        side, row = sides[r], rows[0]
        mean, norm = side.stats_of(row)[2:]
        if not isinstance(mean, float) or not isinstance(norm, float) or not math.isfinite(mean) or not math.isfinite(norm):
            return None
        means += mean
        spread += norm / math.sqrt(max(1, distances.elements(side.shape[row])))
        eps = max(eps, roundoff.eps(side.dtype[row]))
    share = len(ins) if how == "avg" else 1
    return means / share, _SLACK * eps * spread / share


def _agrees(side: DumpTable, row: int, reference: tuple[float, float]) -> bool:
    mean = side.stats_of(row)[2]
    return not isinstance(mean, float) or not math.isfinite(mean) or abs(mean - reference[0]) <= reference[1]


def _right(
    groups: Mapping[tuple[object, ...], list[int]],
    reference: tuple[float, float] | None,
    sides: Mapping[int, DumpTable],
    outs: Mapping[int, Sequence[int]],
) -> tuple[object, ...] | None:
    """The result that agrees with what was put in, else that of the majority; None when nothing tells."""
    if reference is not None:
        fitting = [key for key, ranks in groups.items() if _agrees(sides[ranks[0]], outs[ranks[0]][0], reference)]
        if len(fitting) == 1:
            return fitting[0]
    most = max(groups, key=lambda key: len(groups[key]))
    return most if 2 * len(groups[most]) > sum(map(len, groups.values())) else None
