"""Calls of two sides while they are matched: which belong together so far."""

from __future__ import annotations

from collections.abc import Hashable

from msprobe_engine.align.calls.call_tree import Tree


class CallPairs:
    """The records of two sides.

    Args:
        target, golden: their trees.

    Attributes:
        found: record of the target -> that of the golden side.
        back: the same the other way round.
        forms: one number per record of each side, equal where dtypes and shapes are.
    """

    def __init__(self, target: Tree, golden: Tree) -> None:
        self.target, self.golden = target, golden
        self.found: dict[int, int] = {}
        self.back: dict[int, int] = {}
        self._numbers: dict[Hashable, int] = {}
        self.forms = (target.forms(self._numbers), golden.forms(self._numbers))

    def pair(self, i: int, j: int) -> None:
        """Match two records, in place of those that they were matched with."""
        if self.found.get(i) != j:
            self.drop(i)
            self.drop(self.back.get(j))
            self.found[i], self.back[j] = j, i

    def drop(self, i: int | None) -> None:
        """Part a record of the target from its partner, where it has one."""
        if i in self.found:
            del self.back[self.found.pop(i)]

    def drop_with_twins(self, i: int, j: int) -> None:
        """Part two forward calls, and their backward calls from whatever these are matched with."""
        self.drop_target_with_twin(i)
        self.drop_golden_with_twin(j)

    def drop_target_with_twin(self, i: int) -> None:
        """Part a call of the target, and its backward call, from whatever they are matched with."""
        self.drop(i)
        self.drop(self.target.twin(i))

    def drop_golden_with_twin(self, j: int) -> None:
        """The same of a call of the golden side."""
        twin = self.golden.twin(j)
        self.drop(self.back.get(j))
        self.drop(None if twin is None else self.back.get(twin))
