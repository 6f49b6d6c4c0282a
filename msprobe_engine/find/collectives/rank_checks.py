"""What the ranks of one run say beside each other: collectives that give something else than was put in, copies that are not equal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find import findings
from msprobe_engine.find.collectives import replicas, sums
from msprobe_engine.find.collectives.parted_copies import parted_by_random_numbers
from msprobe_engine.find.findings import Suspect
from msprobe_engine.find.nonfinite.trace import module_path
from msprobe_engine.formats.dump.dump_table import DumpTable

_WHOLE = Sentence("the golden run has one rank, and this is all of the parameter: the ranks hold copies")
_TIED = Sentence("the golden run has one weight there: the stages that hold it sum its gradients")
_COPIES = Sentence("the other run has moved it from the same numbers to the same numbers on all of these ranks: they hold copies")
_SUMMING = Sentence("these ranks sum the gradients of all their parameters: they hold the same ones")


@dataclass
class RankChecks:
    """What the ranks of a step say beside each other; of the first step in which something is off.

    Attributes:
        collectives: how many could be held against each other; None before a step was seen.
        several: a step has more than one rank.
        equal: parameters of several ranks were seen, and none of them differs; None before any were seen.
        parted: first step in which parameters differ that were all the same in a step before.
    """

    collectives: int | None = None
    several: bool = False
    equal: bool | None = None
    parted: int | None = None
    finding: str = ""
    suspects: list[Suspect] = field(default_factory=list)
    evidence: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    _alike: set[str] = field(default_factory=set)  # parameters that were the same on their ranks in a step
    _began: dict[str, dict[int, replicas.Row]] = field(default_factory=dict)  # the parameters that the other run begins with

    def look(self, step: int, sides: Mapping[int, DumpTable]) -> None:
        """Check the collectives and the replicas of one step."""
        self.several = self.several or len(sides) > 1
        if self.finding:
            return
        checked = sums.check(sides)
        self.collectives = (self.collectives or 0) + checked.count
        if checked.wrong:
            self.finding = findings.COLLECTIVE
            self.suspects = [wrong.suspect(step) for wrong in checked.wrong]
            self.evidence += [wrong.why for wrong in checked.wrong[:5]]
        elif parted := parted_by_random_numbers(step, sides, checked.links):
            self.finding, self.suspects = findings.DESYNC, parted
        else:
            self.hold_replicas(step, sides)
        self.problems += [problem for side in sides.values() for problem in side.problems]

    def hold_replicas(self, step: int, sides: Mapping[int, DumpTable], whole: Mapping[int, DumpTable] | None = None) -> None:
        """Parameters of ranks that hold copies; where that is not known, whether they have parted. `whole`: the same step of another run,
        which says what a parameter is where it has one rank, or where its ranks have moved it alike."""
        table = replicas.parameters(sides)
        odd: list[replicas.Odd] = []
        if whole is not None:
            other = replicas.parameters(whole)
            self._began = self._began or other
            if len(whole) == 1:
                odd = replicas.differing(step, replicas.of_the_whole(table, other), _WHOLE)
                odd += replicas.differing(step, replicas.of_tied(table, other), _TIED)
            else:
                odd = replicas.differing(step, replicas.of_moved_copies(table, self._began, other), _COPIES)
            if odd:
                self._part(odd)
                return
        for group in replicas.summing_groups(sides):
            odd = replicas.differing(step, replicas.of_same_shape(table, group), _SUMMING)
            if odd:
                self.evidence.append(Sentence("{0} parameters that are copies of each other differ.", len(odd)))
                break
        if not odd:
            odd = replicas.odd_ones(step, table, self._alike.__contains__)
            template = "{0} parameters that are copies of each other differ; others of their kind are equal on all ranks."
            self.evidence += [Sentence(template, len(odd))] if odd else []
        if odd:
            self._part(odd)
            return
        self._alike |= {name for name, rows in table.items() if len(rows) > 1 and replicas.is_equal(rows.values())}
        held = [rows for rows in table.values() if len(rows) > 1]
        if held:
            equal = all(replicas.is_equal(rows.values()) for rows in held)
            if self.equal and not equal:
                self.parted = step
            self.equal = equal if self.equal is None else self.equal and equal

    def _part(self, odd: list[replicas.Odd]) -> None:
        self.finding = findings.DESYNC
        self.suspects = [_of_odd(one) for one in odd]


def _of_odd(odd: replicas.Odd) -> Suspect:
    record, _, _ = odd.name.rpartition(".parameters.")
    return Suspect(record, module_path(record), odd.rank, odd.step, kind="desync", why=odd.why, tensor=odd.name, numbers=odd.numbers)
