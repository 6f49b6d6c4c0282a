"""Rows of two sides in the order of a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from msprobe_engine.measure.factorize import Integers


@dataclass
class Pairs:
    """Rows of the target and of the golden side, -1 for none; `messages` by position."""

    target: list[int] = field(default_factory=list)
    golden: list[int] = field(default_factory=list)
    messages: dict[int, str] = field(default_factory=dict)

    def add(self, target: int, golden: int, message: str = "") -> None:
        """Append one row of the table."""
        if message:
            self.messages[len(self.target)] = message
        self.target.append(target)
        self.golden.append(golden)

    def extend(self, target: Integers, golden: Integers) -> None:
        """Append rows, int64 each."""
        self.target += target.tolist()
        self.golden += golden.tolist()

    def with_rest(self, rows: Sequence[int] | Integers) -> Pairs:
        """The same, with those of `rows` (all rows of the golden side, in their order) that are not in it, each behind its predecessor."""
        golden = np.array(self.golden, np.int64)
        used = np.zeros(len(rows), bool)
        used[golden[golden >= 0]] = True
        if used.all():
            return self
        after: dict[int, list[int]] = {}
        last = -1
        for j in np.asarray(rows, np.int64).tolist():
            if used[j]:
                last = j
            else:
                after.setdefault(last, []).append(j)
        whole = Pairs()
        for j in after.pop(-1, ()):
            whole.add(-1, j)
        for position, (i, j) in enumerate(zip(self.target, self.golden)):
            whole.add(i, j, self.messages.get(position, ""))
            for rest in after.pop(j, ()) if j >= 0 else ():
                whole.add(-1, rest)
        return whole
