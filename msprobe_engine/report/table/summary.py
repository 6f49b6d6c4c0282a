"""What a comparison came to: for the console (the finding first), for programs (json), and as an exit code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msprobe_engine.core.io.output_files import guard_writing, write_file
from msprobe_engine.core.log import one_line
from msprobe_engine.find.coverage import renames, two_frameworks
from msprobe_engine.find.findings import NONE, Diagnosis, beside_warnings, finite_json
from msprobe_engine.report.table.rank_table import MOST_NAMES, Result

MOST_PROBLEMS = 8
"""What could not be read, on the console."""

EQUAL, DIFFERENT, UNREAD = 0, 1, 3
"""Exit codes: nothing beyond round-off, differences found, something could not be read or compared."""

_ORDER = ("error", "No", "Different", "warning", "Warning", "unmatched", "Unmatched", "None", "N/A", "blank", "pass", "Yes")


@dataclass
class Comparison:
    """The outcome of `msprobe_engine.report.table.api.compare_dumps`.

    Attributes:
        target, golden: as given.
        compat: the existing tool's verdicts; then differences do not show in the exit code, only what could not be read does.
        results: one per pair of dump files, by step and rank.
        diagnosis: where the difference begins; None when it was not asked for or cannot be said.
        notes: what was left out on purpose, and why.
        problems: what could not be read or compared.
        summary: the json file; None before `write`.
        mapping: the names that differ as a cell mapping; None when there are none, and before `write`.
        other_steps: of the target and of the golden run, where two different steps were compared.
        functions: functions that are likely to be the same, of two frameworks, as an api mapping; likewise.
    """

    target: str
    golden: str
    generation: str
    compat: bool = False
    results: list[Result] = field(default_factory=list)
    diagnosis: Diagnosis | None = None
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    summary: Path | None = None
    mapping: Path | None = None
    functions: Path | None = None
    other_steps: tuple[int, int] | None = None

    @property
    def finding(self) -> str:
        """One of `msprobe_engine.find.findings.FINDINGS`, or ``unknown`` when there is no diagnosis."""
        return self.diagnosis.finding if self.diagnosis else "unknown"

    @property
    def files(self) -> list[str]:
        return [file for result in self.results for file in result.files]

    @property
    def verdicts(self) -> dict[str, int]:
        """Verdict -> rows, the worst first."""
        total: Counter[str] = Counter()
        for result in self.results:
            total.update(result.verdicts)
        return dict(sorted(total.items(), key=lambda item: (_ORDER.index(item[0]) if item[0] in _ORDER else -1, item[0])))

    @property
    def all_problems(self) -> list[str]:
        """Of the paths, of every task and of the diagnosis."""
        of_tasks = [problem for result in self.results for problem in result.problems]
        return list(dict.fromkeys([*self.problems, *of_tasks, *(self.diagnosis.problems if self.diagnosis else ())]))

    @property
    def exit_code(self) -> int:
        """`DIFFERENT` before `UNREAD`: numbers that differ are certain whatever else could not be read. With `compat` never `DIFFERENT`,
        as theirs."""
        if not self.compat and (self.finding not in (NONE, "unknown") or any(result.wrong for result in self.results)):
            return DIFFERENT
        return UNREAD if self.all_problems else EQUAL

    @property
    def _rows_alone(self) -> bool:
        """The exit code is that of rows, of which the diagnosis says nothing."""
        return self.exit_code == DIFFERENT and self.finding == NONE

    def as_json(self) -> dict[str, Any]:
        """JSON-ready, the finding first."""
        diagnosis = self.diagnosis.as_json() if self.diagnosis else {}
        return {
            "finding": self.finding,
            "headline": self.headline(),
            "first_suspect": diagnosis.get("first_suspect"),
            "exit_code": self.exit_code,
            "verdicts": self.verdicts,
            "rows": sum(result.rows for result in self.results),
            "only_target": sum(result.only_target for result in self.results),
            "only_golden": sum(result.only_golden for result in self.results),
            "target": self.target,
            "golden": self.golden,
            "columns": self.generation,
            "compat": self.compat,
            "files": self.files,
            "notes": self.notes,
            "problems": self.all_problems,
            "tasks": [result.as_json() for result in self.results],
            "diagnosis": diagnosis,
        }

    def headline(self) -> str:
        """The first line: what, and where."""
        if self.diagnosis is not None and not self._rows_alone:
            return self.diagnosis.headline()
        first = next((f"{result.key}: {result.first}" for result in self.results if result.first), "")
        if first:
            return one_line(f"Rows are off, the first in its table is {first}")
        if not self.files:
            return "Nothing could be compared"
        count = len(self.all_problems)
        if not count:
            return "No row is off"
        return beside_warnings("No row is off in what could be compared", count)

    def text(self) -> str:
        lines = [self.headline(), *(self.diagnosis.text().split("\n")[1:] if self.diagnosis else ())]
        verdicts = self.verdicts
        if verdicts:
            rows = sum(result.rows for result in self.results)
            lines.append(_line("rows", f"{rows:,}: " + ", ".join(f"{word} {number:,}" for word, number in verdicts.items())))
        for side in ("target", "golden"):
            number = sum(getattr(result, f"only_{side}") for result in self.results)
            if number:
                names = [name for result in self.results for name in result.names[side]][:MOST_NAMES]
                lines.append(_line("unmatched", f"{number:,} row{'s' * (number != 1)} only in the {side}: {_some(names, number, 3)}"))
        problems = self.all_problems
        if problems and self.diagnosis is None:  # else they stand there
            lines += [_line("warning", problem) for problem in problems[:MOST_PROBLEMS]]
        if len(problems) > MOST_PROBLEMS and self.diagnosis is None:
            lines.append(_line("warning", f"and {len(problems) - MOST_PROBLEMS:,} more that the summary names"))
        if self.files:
            lines.append(_line("files", _some(self.files, len(self.files), 4)))
        if self.mapping is not None:
            lines.append(_line("mapping", f"{self.mapping}; with -cm {self.mapping} these names are no difference"))
        if self.functions is not None:
            lines.append(_line("mapping", f"{self.functions}; functions that are likely to be the same, for -am"))
        if self.summary is not None:
            lines.append(_line("summary", str(self.summary)))
        return "\n".join(one_line(line) for line in lines)

    def write(self, path: Path) -> None:
        """Write the json (mode 0640).

        Raises:
            SinkError: it cannot be written.
        """
        with guard_writing(path):
            write_file(path, [finite_json(self.as_json())])
            if self.diagnosis is not None:
                self.mapping = renames.write(self.diagnosis, path.with_name(f"{path.stem.replace('compare_summary', 'cell_mapping')}.yaml"))
                place = path.with_name(f"{path.stem.replace('compare_summary', 'api_mapping')}.yaml")
                self.functions = two_frameworks.write(self.diagnosis, place)
        self.summary = path


def _line(word: str, text: str) -> str:
    return f"  {word:9}  {text}"


def _some(items: Sequence[str], number: int, most: int) -> str:
    shown = list(items[:most])
    return ", ".join(shown) + (f" and {number - len(shown):,} more" if number > len(shown) else "")
