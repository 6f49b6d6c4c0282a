"""One cell compared: how many records match, which rules explain the others, what is left without a reason.

    PYTHONPATH=tests/compat python tests/mindspore/compat/ms_results.py [8.1.1] [26.2.0]

prints the table of all cells (the variables of ms_cells.py name the environments).
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import ms_cells
import numpy as np
import pytest
from matching import Difference, RankDump, differences, load, owner
from ms_cells import Cell
from ms_rules import Context, explain
from rules import Rule

CELLS = [(version, cell) for version in ms_cells.VERSIONS for cell in ms_cells.cells(version)]
EVERY = tuple(dict.fromkeys(cell for _, cell in CELLS))
"""The cells of all versions, each once: ours are the same for both."""


@dataclass
class Result:
    """Figures of one cell, over all its steps.

    Attributes:
        records: of theirs.
        equal: without any difference but the frames of their stacks.
        explained: with differences that all have a rule.
        rules: id -> how many differences it explains.
        unexplained: differences without a reason, as text.
        tensors: saved tensors compared bit by bit.
    """

    records: int = 0
    equal: int = 0
    explained: int = 0
    rules: Counter[str] = field(default_factory=Counter)
    unexplained: list[str] = field(default_factory=list)
    tensors: int = 0

    def add(self, ours: RankDump, theirs: RankDump, context: Context) -> None:
        """Compare one rank directory."""
        reasons: dict[str, list[Rule | None]] = {}
        for difference in [*differences(ours, theirs), *self._contents(ours, theirs)]:
            rule = explain(difference, context)
            if rule is None or rule.id != "ms-stack-frames":  # every record's stack has some
                reasons.setdefault(difference.record, []).append(rule)
            if rule is None:
                self.unexplained.append(str(difference))
            else:
                self.rules[rule.id] += 1
        names = list(theirs.data) or list(theirs.construct)  # task structure has no records, only nodes
        self.records += len(names)
        self.equal += sum(name not in reasons for name in names)
        self.explained += sum(None not in reasons[name] for name in names if name in reasons)

    def _contents(self, ours: RankDump, theirs: RankDump) -> list[Difference]:
        """Saved tensors that both have, bit by bit."""
        found = []
        assert ours.directory is not None
        assert theirs.directory is not None
        for name in sorted(set(ours.tensors) & set(theirs.tensors)):
            a, b = (np.load(d.directory / "dump_tensor_data" / name) for d in (ours, theirs))  # type: ignore[operator]
            self.tensors += 1
            if a.dtype != b.dtype or a.shape != b.shape or a.tobytes() != b.tobytes():
                record = owner(name, theirs.data)
                found.append(Difference("content", record, name.removeprefix(f"{record}.").removesuffix(".npy"), str(a), str(b)))
        return found


def pairs(out: Path, other: Path, cell: Cell) -> list[tuple[Path, Path]]:
    """The directories of both sides, step after step.

    Raises:
        AssertionError: the sides have other steps.
    """
    found: list[tuple[Path, Path]] = []
    for step in range(ms_cells.STEPS + 1):
        ours, theirs = ms_cells.rank_directories(out, cell, step), ms_cells.rank_directories(other, cell, step)
        assert len(ours) == len(theirs), f"{cell} step {step}: {ours}, {theirs}"
        found += zip(ours, theirs)
    return found


@cache
def result(version: str, cell: Cell) -> Result:
    """The comparison of one cell with an existing version; skips the test where that version is not there."""
    variable = ms_cells.VERSIONS[version]
    venv = ms_cells.environment(version)
    if venv is None:
        pytest.skip(f"{variable} does not name a virtual environment with mindspore and version {version}")
    ours, theirs = ms_cells.ours(EVERY), ms_cells.existing(version, venv)
    made = Result()
    for a, b in pairs(ours, theirs, cell):
        mine, other = load(a), load(b)
        made.add(mine, other, Context(cell, version, mine, other))
    return made


def table(version: str) -> str:
    """All cells of a version as Markdown: records, how many are equal, how many differ by a rule, and which rules."""
    lines = ["| cell | records | equal | by a rule | without a reason | tensors | rules |", "| --- | --- | --- | --- | --- | --- | --- |"]
    for cell in ms_cells.cells(version):
        found = result(version, cell)
        used = ", ".join(f"{rule} {count}" for rule, count in sorted(found.rules.items()))
        left = len(found.unexplained)
        lines.append(f"| {cell} | {found.records} | {found.equal} | {found.explained} | {left} | {found.tensors} | {used} |")
    return "\n".join(lines)


if __name__ == "__main__":
    for one in sys.argv[1:] or ms_cells.VERSIONS:
        print(f"{one}\n\n{table(one)}\n")
