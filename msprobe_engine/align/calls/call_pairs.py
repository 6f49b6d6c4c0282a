"""Calls of two sides while they are matched: which belong together so far."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from msprobe_engine.align.calls.call_tree import Tree


class CallPairs:
    """The records of two sides.

    Args:
        target, golden: their trees.

    Attributes:
        found: record of the target -> that of the golden side.
        used: records of the golden side that have a partner.
        forms: one number per record of each side, equal where dtypes and shapes are.
    """

    def __init__(self, target: Tree, golden: Tree) -> None:
        self.target, self.golden = target, golden
        self.found: dict[int, int] = {}
        self.used: set[int] = set()
        self._numbers: dict[Hashable, int] = {}
        self.forms = (target.forms(self._numbers), golden.forms(self._numbers))

    def pair(self, i: int, j: int) -> None:
        """Match two records."""
        self.found[i] = j
        self.used.add(j)

    def drop(self, i: int) -> None:
        """Part a record of the target from its partner."""
        self.used.discard(self.found.pop(i))

    def drop_with_twins(self, i: int, j: int, back: Mapping[int, int]) -> None:
        """Part two forward calls, and their backward calls from whatever these are matched with.

        Args:
            back: record of the golden side -> its partner.
        """
        target_twin, golden_twin = self.target.twin(i), self.golden.twin(j)
        self.drop(i)
        for twin in (target_twin, None if golden_twin is None else back.get(golden_twin)):
            if twin is not None and twin in self.found:
                self.drop(twin)
