"""What the ranks of one run say beside each other: collectives that give something else than was put in, copies that are not equal.

Copies of a tensor that are the same on all ranks of a group, because they are the sum of what these ranks have put in, and that a call
makes other ones of: the ranks draw other random numbers where each has to draw those of the others (dropout outside of the region in which
tensor-parallel ranks hold parts).

Statistics are enough to tell whether collectives give what was put into them:

* what every rank gets must be the same on all of them (all_reduce, broadcast, all_gather);
* the mean of a sum is the sum of the means, of an average the average; of a maximum the maximum;
* what a rank receives is what the other one has sent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from msprobe_engine.align.calls.call_tree import Tree, calls_function
from msprobe_engine.align.parameters import parameter_kinds
from msprobe_engine.core.operator_traits import RANDOM_MASKS, normal_op
from msprobe_engine.core.text.ranges import ranks_text
from msprobe_engine.core.text.sentences import Sentence, one_line_of
from msprobe_engine.core.text.source_line import source_of
from msprobe_engine.find import findings
from msprobe_engine.find.collectives import replicas
from msprobe_engine.find.collectives.links import Link, Links
from msprobe_engine.find.collectives.same_batch import SameBatch
from msprobe_engine.find.difference import cross_rank
from msprobe_engine.find.difference.explain import module_around, stack_of
from msprobe_engine.find.findings import Suspect
from msprobe_engine.find.nonfinite.trace import module_path
from msprobe_engine.formats.dump.collective_record import is_asynchronous, reduction_of
from msprobe_engine.formats.dump.dump_table import INPUT, OUTPUT, PARAMETERS, DumpTable, is_number
from msprobe_engine.measure import distances, roundoff

_WHOLE = Sentence("the golden run has one rank, and this is all of the parameter: the ranks hold copies")
_TIED = Sentence("the golden run has one weight there: the stages that hold it sum its gradients")
_COPIES = Sentence("the other run has moved it from the same numbers to the same numbers on all of these ranks: they hold copies")
_BEGAN = Sentence(
    "the ranks began with the same numbers of all parameters, and an update has moved some to the same numbers everywhere: they hold"
    " copies, or parts that all ranks have drawn with one seed"
)
_SUMMING = Sentence("these ranks sum the gradients of all their parameters: they hold the same ones")


@dataclass
class RankChecks:
    """What the ranks of a step say beside each other; of the first step in which something is off.

    Attributes:
        collectives: how many could be held against each other; None before a step was seen.
        several: a step has more than one rank.
        equal: parameters of several ranks were seen, and none of them differs; None before any were seen.
        parted: first step in which parameters differ that were all the same in a step before, or one whose elements are not all the same;
            or ranks that began with the same numbers of all parameters (those that hold one shard) no longer have them.
    """

    collectives: int | None = None
    several: bool = False
    equal: bool | None = None
    parted: int | None = None
    finding: str = ""
    suspects: list[Suspect] = field(default_factory=list)
    evidence: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    _batches: SameBatch = field(default_factory=SameBatch)
    _alike: set[str] = field(default_factory=set)  # parameters that were the same on their ranks in a step
    _copied: set[str] = field(default_factory=set)  # those whose elements were not all the same: parts of a tensor are not so alike
    _began: dict[str, dict[int, replicas.Row]] = field(default_factory=dict)  # the parameters that the other run begins with
    _last: dict[str, replicas.Row] = field(default_factory=dict)  # those of the step before, where all ranks had the same
    _together: list[tuple[int, ...]] | None = None  # ranks that began with the same numbers of all parameters
    _moved: bool = False  # an update has moved some of them to the same numbers on all ranks

    def check_step(self, step: int, sides: Mapping[int, DumpTable]) -> None:
        """Check the collectives and the replicas of one step."""
        self.several = self.several or len(sides) > 1
        if self.finding:
            return
        checked = check(sides)
        self.collectives = (self.collectives or 0) + checked.count
        if checked.wrong:
            self.finding = findings.COLLECTIVE
            self.suspects = [wrong.suspect(step) for wrong in checked.wrong]
            self.evidence += [wrong.why for wrong in checked.wrong[:5]]
        elif parted := parted_by_random_numbers(step, sides, checked.links):
            self.finding, self.suspects = findings.DESYNC, parted
        else:
            self.hold_replicas(step, sides)
            self._batches.add_step(step, sides, all_equal=bool(self.equal))
        self.problems += [problem for side in sides.values() for problem in side.problems]

    def finish(self) -> None:
        """Say what only all steps together tell: the ranks share no data."""
        if not self.finding and (suspects := self._batches.suspects()):
            self.finding, self.suspects = findings.DATA, suspects
        elif not self.finding:
            self.problems += self._batches.problems()

    def hold_replicas(self, step: int, sides: Mapping[int, DumpTable], whole: Mapping[int, DumpTable] | None = None) -> None:
        """Parameters of ranks that hold copies; where that is not known, whether they have parted. `whole`: the same step of another run,
        which says what a parameter is where it has one rank, or where its ranks have moved it alike."""
        table = replicas.parameters(sides)
        odd: list[replicas.Odd] = []
        if whole is not None:
            other = replicas.parameters(whole)
            self._began = self._began or other
            if len(whole) == 1:
                odd = replicas.find_differing_copies(step, replicas.of_the_whole(table, other), _WHOLE)
                odd += replicas.find_differing_copies(step, replicas.of_tied(table, other), _TIED)
            else:
                odd = replicas.find_differing_copies(step, replicas.of_moved_copies(table, self._began, other), _COPIES)
            if odd:
                self._part(odd)
                return
        for group in replicas.summing_groups(sides):
            odd = replicas.find_differing_copies(step, replicas.of_same_shape(table, group), _SUMMING)
            if odd:
                self.evidence.append(Sentence("{0} parameters that are copies of each other differ.", len(odd)))
                break
        if not odd and self.equal and (self._moved or replicas.moved_alike(table, self._last)):
            # a rank has experts of its own
            shared = {name: rows for name, rows in table.items() if parameter_kinds.kind_of(name) != parameter_kinds.EXPERT}
            odd = replicas.find_differing_copies(step, shared, _BEGAN, self._last)
            self.evidence += [Sentence("{0} parameters that are copies of each other differ.", len(odd))] if odd else []
        if not odd:
            odd = replicas.odd_ones(step, table, self._alike.__contains__)
            template = "{0} parameters that are copies of each other differ; others of their kind are equal on all ranks."
            self.evidence += [Sentence(template, len(odd))] if odd else []
        if odd:
            self._part(odd)
            return
        self._alike |= {name for name, rows in table.items() if len(rows) > 1 and replicas.is_equal(rows.values())}
        if self.parted is None and any(not replicas.is_equal(table[name].values()) for name in self._copied & table.keys()):
            self.parted = step
        self._copied |= {name for name in self._alike & table.keys() if any(row[1] != row[2] for row in table[name].values())}
        if self._together is None and table:
            self._together = replicas.ranks_alike(table)
        elif self._together and self.parted is None and set(self._together) - set(replicas.ranks_alike(table)):
            self.parted = step
        held = [rows for rows in table.values() if len(rows) > 1]
        if held:
            equal = all(replicas.is_equal(rows.values()) for rows in held)
            if self.equal and not equal and self.parted is None:
                self.parted = step
            self._moved = self._moved or (equal and bool(self._last) and replicas.moved_alike(table, self._last))
            self._last = {name: next(iter(rows.values())) for name, rows in table.items()} if equal else {}
            self.equal = equal if self.equal is None else self.equal and equal

    def _part(self, odd: list[replicas.Odd]) -> None:
        self.finding = findings.DESYNC
        self.suspects = [_of_odd(copy) for copy in odd]


def _of_odd(odd: replicas.Odd) -> Suspect:
    record, _, _ = odd.name.rpartition(".parameters.")
    return Suspect(record, module_path(record), odd.rank, odd.step, kind="desync", why=odd.why, tensor=odd.name, numbers=odd.numbers)


def parted_by_random_numbers(step: int, sides: Mapping[int, DumpTable], links: Links) -> list[Suspect]:
    """The first call of each group of ranks that parts such copies, in the forward pass."""
    sums: dict[tuple[int, ...], set[str]] = {}
    for link in links.links:
        ranks = tuple(sorted(rank for rank, _ in link.members))
        names = {sides[rank].ops[op] for rank, op in link.members if rank in sides}
        if normal_op(link.op) == "allreduce" and not link.missing and len(ranks) > 1 and sides.keys() >= set(ranks) and len(names) == 1:
            sums.setdefault(ranks, set()).update(names)
    parted = (_first_parted([sides[rank] for rank in ranks], names) for ranks, names in sums.items())
    return [_suspect(step, ranks, sides[ranks[-1]], name) for ranks, name in zip(sums, parted) if name is not None]


def _first_parted(sides: Sequence[DumpTable], sums: set[str]) -> str | None:
    """Name of the record; `sums`: those of the collectives that sum up over just these ranks."""
    tree = Tree(sides[0])
    if not any(calls_function(kind) and kind[2] in RANDOM_MASKS for kind in tree.kinds):
        return None
    places = [{name: op for op, name in enumerate(side.ops)} for side in sides]
    copies: set[int] = set()  # records that give the same on all ranks, of such a sum
    for op, name in enumerate(sides[0].ops[: tree.first_backward]):
        calls = [(side, place[name]) for side, place in zip(sides, places) if name in place]
        if len(calls) < len(sides):
            continue
        if name in sums:
            copies |= {op} if _is_same(calls, (OUTPUT,)) else set()
        elif calls_function(tree.kinds[op]) and any(tree.producers.get(row) in copies for row in tree.tensors_in(op)):
            if not _is_same(calls, (INPUT, PARAMETERS)):
                continue
            if _is_same(calls, (OUTPUT,)):
                copies.add(op)
            elif tree.kinds[op][2] in RANDOM_MASKS:
                return name
    return None


def _is_same(calls: Sequence[tuple[DumpTable, int]], roles: Sequence[int]) -> bool:
    return len({tuple(_rows(side, op, roles)) for side, op in calls}) == 1


def _rows(side: DumpTable, op: int, roles: Sequence[int]) -> Iterator[tuple[object, ...]]:
    """What is known of each tensor and argument of a record."""
    for row in side.rows(op):
        if side.role[row] in roles:
            digest = side.extra.get(row, {}).get("digest")
            yield side.name[row], str(side.shape[row]), side.stats[row].tobytes(), side.md5[row], digest, str(side.values.get(row))


def _suspect(step: int, ranks: Sequence[int], side: DumpTable, name: str) -> Suspect:
    template = "{0} take in the same sum of what they have put in, and what comes out is not the same: they draw other random numbers"
    why = Sentence(template, ranks_text(ranks))
    stack = stack_of(side, name)
    return Suspect(name, module_around(side, name), ranks[-1], step, source_of(stack), "desync", why, stack=stack, ranks=list(ranks))


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
    checked = Checked(links=cross_rank.match_links(sides))
    for link in sorted(checked.links.links, key=lambda link: min((op for _, op in link.members), default=0)):
        if link.missing or len(link.members) < 2 or any(rank not in sides for rank, _ in link.members):
            continue
        wrong = _check(link, sides)
        if wrong is not None:
            checked.count += 1
            checked.wrong += wrong
    return checked


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
    reference = _compute_expected_mean(link, sides, ins) if op == "allreduce" else None
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


def _compute_expected_mean(link: Link, sides: Mapping[int, DumpTable], ins: Mapping[int, Sequence[int]]) -> tuple[float, float] | None:
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
