"""What a graph came to: for the console, and as an exit code."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from msprobe_engine.core.log import one_line
from msprobe_engine.core.text.words import size
from msprobe_engine.find.findings import NONE
from msprobe_engine.report.graph.nodes.model import Comparison, Graph

EQUAL, DIFFERENT, UNREAD = 0, 1, 3
"""Exit codes: nothing beyond round-off (one side: no NaN or Inf), something found, something could not be read."""

_MOST_PROBLEMS = 8
_MOST_OF_LINE = 5_000
_UNKNOWN = "unknown"


@dataclass
class Result:
    """The outcome of `msprobe_engine.report.graph.run.run`.

    Attributes:
        target, golden: as given; golden "" with one side.
        finding, headline, why: of the diagnosis (`msprobe_engine.report.graph.global_suspect`).
        files: what was written.
        notes: what was left out on purpose, and why.
        problems: what could not be read or compared.
        graphs: how many, of pairs of step and rank.
        steps, ranks: that were drawn.
        nodes: of the targets, the roots not counted.
        matched, unmatched, only_golden: of the nodes with a record, and of those of the golden run.
        by_structure: matched by their place.
        needless: without a partner on either side, which need none; not among the others.
        over: nodes with a record whose outputs differ by more than a unit of round-off.
        worst: step, rank, node name and units of the largest difference; None when nothing differs.
        overflows: nodes that were marked, by level.
        same: ranks that hold the same as one that was drawn, and have no graph of their own.
        other_steps: of the target and of the golden run, where two different steps were compared.
        by_names: graphs that were made of names, as construct.json says nothing.
    """

    target: str
    golden: str = ""
    finding: str = NONE
    headline: str = ""
    why: str = ""
    files: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    graphs: int = 0
    steps: set[int] = field(default_factory=set)
    ranks: set[int] = field(default_factory=set)
    nodes: int = 0
    matched: int = 0
    unmatched: int = 0
    only_golden: int = 0
    by_structure: int = 0
    needless: int = 0
    over: int = 0
    worst: tuple[int, int, str, float] | None = None
    overflows: dict[str, int] = field(default_factory=dict)
    same: int = 0
    by_names: int = 0
    other_steps: tuple[int, int] | None = None

    def count(self, key: tuple[int, int], made: Graph | Comparison) -> None:
        """Take up one graph."""
        graph = made.target if isinstance(made, Comparison) else made
        self.graphs += 1
        self.steps.add(key[0])
        self.ranks.add(key[1])
        self.nodes += len(graph) - 1
        self.by_names += graph.by_names
        for level in graph.overflow:
            if level is not None:
                self.overflows[level] = self.overflows.get(level, 0) + 1
        if isinstance(made, Comparison):
            self._count_comparison(key, made)

    def _count_comparison(self, key: tuple[int, int], made: Comparison) -> None:
        records = np.asarray(made.target.records) >= 0
        matched = np.asarray(made.partners) >= 0
        self.matched += int((records & matched).sum())
        target_needless, golden_needless = map(len, made.needless)
        self.unmatched += int((records & ~matched).sum()) - target_needless
        self.only_golden += int(((np.asarray(made.golden.records) >= 0) & (np.asarray(made.golden_partners) < 0)).sum()) - golden_needless
        self.needless += target_needless + golden_needless
        self.by_structure += len(made.by_structure)
        units = np.where(np.isnan(made.units) | ~records, 0.0, made.units)  # what encloses a node has the largest of what is in it
        self.over += int((units > 1).sum())
        if len(units):
            node = int(units.argmax())
            if units[node] > (self.worst[3] if self.worst else 0.0):
                self.worst = (*key, made.target.names[node], float(units[node]))

    @property
    def exit_code(self) -> int:
        """As those of ``msprobe compare``: what was found comes before what could not be read."""
        if self.finding not in (NONE, _UNKNOWN):
            return DIFFERENT
        return UNREAD if self.problems else EQUAL

    def text(self) -> str:
        """For the console; the first line is the finding."""
        lines = [self.headline or "Drawn"]
        if self.why:
            lines.append(_line("why", self.why))
        what = f"{len(self.steps):,} step{'s' * (len(self.steps) != 1)}, {len(self.ranks):,} rank{'s' * (len(self.ranks) != 1)}"
        same = f" (and {self.same:,} that hold the same)" if self.same else ""
        lines.append(_line("drawn", f"{what}{same}, {self.nodes:,} nodes"))
        if self.golden:
            said = f"{self.matched:,} calls, {self.unmatched:,} only in the target, {self.only_golden:,} only in the golden run"
            said += f"; {self.needless:,} have no counterpart in the other framework" if self.needless else ""
            lines.append(_line("matched", said + (f"; {self.by_structure:,} by their place" if self.by_structure else "")))
            if self.worst is not None:
                step, rank, name, units = self.worst
                lines.append(_line("worst", f"{_units(units)}: step {step}, rank {rank}, {name}; {self.over:,} nodes above one unit"))
        if self.overflows:
            counts = ", ".join(f"{level} {self.overflows[level]:,}" for level in ("critical", "high", "medium") if level in self.overflows)
            lines.append(_line("overflow", counts))
        if self.by_names:
            what = "modules are put together by their names, functions stand in order"
            lines.append(_line("note", f"construct.json says nothing of {self.by_names:,} of {self.graphs:,} graphs: {what}"))
        lines += [_line("warning", problem) for problem in self.problems[:_MOST_PROBLEMS]]
        if len(self.problems) > _MOST_PROBLEMS:
            lines.append(_line("warning", f"and {len(self.problems) - _MOST_PROBLEMS:,} more"))
        lines += [_line("file", f"{path} ({_size(path)})") for path in self.files]
        return "\n".join(_shorten_line(one_line(line)) for line in lines)


def _units(units: float) -> str:
    if np.isinf(units):
        return "NaN, Inf or another shape on one side only"
    if units >= 1e9:
        return f"{units:.1e} units of round-off"
    return f"{units:,.0f} units of round-off" if units >= 100 else f"{units:.2g} units of round-off"


def _size(path: Path) -> str:
    try:
        return size(path.stat().st_size)
    except OSError:
        return "?"


def _shorten_line(line: str) -> str:
    """A line that a terminal can show: of names and shapes without an end the middle is left out. The page has all of it."""
    return line if len(line) <= _MOST_OF_LINE else f"{line[: _MOST_OF_LINE - 500]} ... {line[-500:]}"


def _line(word: str, text: str) -> str:
    return f"  {word:9}  {text}"
