"""A training that both tools dump, and the comparison of what they write: cell by cell, record by record.

Our side is run in every session. Theirs is kept for some cells (`tests/fixtures/existing`, made by `Suite.make`); all cells are compared
where the existing tool is installed. Another machine than that of the kept dumps may round otherwise, so there numbers of floating point
tensors need agree only as far as `rounds_otherwise` says, and their checksums only in form.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from existing_environment import environment_of, existing_tool
from matching import Context, Difference, RankDump, Rule, differences, load, neutral, owner, rounds_otherwise

OURS = "ours"
STEPS = 2


class Cell(Protocol):
    """One run: its text is the name of its directory."""

    @property
    def ranks(self) -> int: ...

    def job(self, out: Path, tool: str) -> dict[str, Any]:
        """What the training script is told."""


@dataclass
class Result:
    """Figures of one cell, over all its steps and ranks.

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


@dataclass(frozen=True, eq=False)
class Suite:
    """The comparison beside one framework.

    Attributes:
        name: of the archive with kept dumps.
        script: takes a file with jobs, and runs each in a directory of its own; see training.py.
        cells: all cells that a version has.
        kept: version -> cells with the step and the place of the rank directory that is kept.
        rules: the reasoned differences.
        stack_rule: the rule of the frames of stacks, of which every record has some.
        read: dtype, shape and bytes of a saved tensor.
        floating: regular expression of the dtypes that are rounded.
    """

    name: str
    framework: str
    script: Path
    cells: Callable[[str], Sequence[Any]]
    kept: Mapping[str, Sequence[tuple[Any, int, int]]]
    rules: Sequence[Rule]
    stack_rule: str
    read: Callable[[Path], tuple[object, object, bytes]]
    floating: str

    def explain(self, difference: Difference, context: Context) -> Rule | None:
        """The first rule that applies, None when the difference has no reason."""
        return next((rule for rule in self.rules if rule.applies(difference, context)), None)

    def run(self, tool: str, python: str | Path, wanted: Sequence[Cell], out: Path, limit: float = 1700.0) -> Path:
        """Run cells under the tool of an interpreter; returns ``out``.

        Raises:
            AssertionError: a rank did not end with 0.
        """
        out.mkdir(parents=True, exist_ok=True)
        jobs = out / "jobs.json"
        jobs.write_text(json.dumps([cell.job(out, tool) for cell in wanted]))
        env = environment_of(python) | {"GLOG_v": "3"}
        env |= {} if tool == OURS else {"MSPROBE_COMPAT_NORM": "1"}
        command = [str(python), str(self.script), str(jobs)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False, env=env, cwd=out)
        assert ran.returncode == 0, ran.stderr[-3000:]
        for cell in wanted:
            ended = (out / str(cell) / "codes.json").read_text()
            log = "\n".join(path.read_text()[-2000:] for path in sorted((out / str(cell)).glob("log*")))
            assert json.loads(ended) == [0] * cell.ranks, f"{tool} {cell}: ranks ended with {ended}:\n{log}"
        return out

    def ours(self, wanted: Sequence[Any] = ()) -> Path:
        """The dumps of cells made by this project, of all when none are named; once in a session."""
        every = [cell for version in self.kept for cell in self.cells(version)]
        return _run_once(self, OURS, Path(sys.executable), tuple(dict.fromkeys(wanted or every)))

    def theirs(self, version: str) -> Path:
        """The dumps of all cells made by an existing version, once in a session; skips the test where that is not installed."""
        return _run_once(self, version, existing_tool(version, self.framework).python, tuple(self.cells(version)))

    def make(self, out: Path) -> None:
        """Run the kept cells under the existing versions: raw rank directories, whose tensor files are empty and whose texts do not name
        the machine. To be made again when the training changes, because call stacks name its lines."""
        for version, cases in self.kept.items():
            with tempfile.TemporaryDirectory() as directory:
                python = existing_tool(version, self.framework).python
                made = self.run(version, python, [cell for cell, _, _ in cases], Path(directory))
                for cell, step, rank in cases:
                    place = kept_directory(out / version, cell, step, rank)
                    shutil.copytree(rank_directories(made, cell, step)[rank], place)
                    for path in place.rglob("*.*"):
                        text = "" if path.parent != place else neutral(path.read_text())
                        path.write_text(re.sub(r'(?<="dump_data_dir": ")[^"]*?/(?=dump/step)', "", text))

    def result(self, version: str, cell: Any) -> Result:
        """The comparison of one cell with an installed existing version."""
        made = Result()
        for ours, theirs in pairs(self.ours(), self.theirs(version), cell):
            self._add(made, load(ours), load(theirs), cell, version)
        return made

    def total(self, version: str) -> Result:
        """All cells of an installed existing version together; differences without a reason name their cell. The figures of
        docs/reference/compatibility*.md are these."""
        whole = Result()
        for cell in self.cells(version):
            found = self.result(version, cell)
            assert found.records > 0 or cell.variant == "one_step", (version, cell)  # a rank that is not dumped has no directory
            assert (found.tensors > 0) == (cell.task == "tensor" or cell.variant == "tensor_list"), (version, cell)
            whole.records += found.records
            whole.equal += found.equal
            whole.explained += found.explained
            whole.tensors += found.tensors
            whole.rules.update(found.rules)
            whole.unexplained += [f"{version} {cell}: {difference}" for difference in found.unexplained]
        print(f"{version}: {whole.records} records, {whole.equal} equal, {whole.explained} by a rule, {whole.tensors} tensors")
        return whole

    def kept_faults(self, ours: Path, kept: Path) -> list[str]:
        """Differences of our dumps from all kept ones that have no rule and do not come from another processor."""
        faults = []
        for version, cases in self.kept.items():
            for cell, step, rank in cases:
                theirs = kept_directory(kept / version, cell, step, rank)
                found = self.unexplained(rank_directories(ours, cell, step)[rank], theirs, version, cell)
                faults += [f"{version} {cell}: {difference}" for difference in found]
                assert len(load(theirs).data) > 5 or cell.task == "structure"
        return faults

    def unexplained(self, ours: Path, theirs: Path, version: str, cell: Any) -> list[str]:
        """Differences from a kept dump that have no rule and do not come from another processor."""
        mine, other = load(ours), load(theirs)
        context = Context(cell, version, mine, other, other_machine=True)
        found = [d for d in differences(mine, other) if not rounds_otherwise(d, other, self.floating)]
        return [str(d) for d in found if self.explain(d, context) is None]

    def _add(self, result: Result, ours: RankDump, theirs: RankDump, cell: Any, version: str) -> None:
        context = Context(cell, version, ours, theirs)
        reasons: dict[str, list[Rule | None]] = {}
        for difference in [*differences(ours, theirs), *self._contents(result, ours, theirs)]:
            rule = self.explain(difference, context)
            if rule is None or rule.id != self.stack_rule:
                reasons.setdefault(difference.record, []).append(rule)
            if rule is None:
                result.unexplained.append(str(difference))
            else:
                result.rules[rule.id] += 1
        names = list(theirs.data) or list(theirs.construct)  # task structure has no records, only nodes
        result.records += len(names)
        result.equal += sum(name not in reasons for name in names)
        result.explained += sum(None not in reasons[name] for name in names if name in reasons)

    def _contents(self, result: Result, ours: RankDump, theirs: RankDump) -> list[Difference]:
        """Saved tensors that both have, bit by bit."""
        found = []
        assert ours.directory is not None
        assert theirs.directory is not None
        for name in sorted(set(ours.tensors) & set(theirs.tensors)):
            a, b = (self.read(directory / "dump_tensor_data" / name) for directory in (ours.directory, theirs.directory))
            result.tensors += 1
            if a != b:
                record = owner(name, theirs.data)
                found.append(Difference("content", record, name.removeprefix(f"{record}.").rpartition(".")[0], str(a[:2]), str(b[:2])))
        return found


@cache
def _run_once(suite: Suite, tool: str, python: Path, wanted: tuple[Any, ...]) -> Path:
    return suite.run(tool, python, wanted, Path(tempfile.mkdtemp(prefix="compat")) / tool)


def rank_directories(out: Path, cell: Cell, step: int) -> list[Path]:
    """The rank directories of one step, by name; a run of one process has one, whatever its name. Empty: the step was not dumped."""
    step_directory = out / str(cell) / "dump" / f"step{step}"
    return sorted(step_directory.iterdir()) if step_directory.is_dir() else []


def kept_directory(out: Path, cell: Cell, step: int, rank: int) -> Path:
    """Where a rank directory is kept."""
    return out / str(cell) / "dump" / f"step{step}" / f"rank{rank}"


def pairs(out: Path, other: Path, cell: Cell) -> list[tuple[Path, Path]]:
    """The rank directories of both sides, step after step.

    Raises:
        AssertionError: the sides have other steps, or another number of ranks.
    """
    found: list[tuple[Path, Path]] = []
    for step in range(STEPS + 1):
        ours, theirs = rank_directories(out, cell, step), rank_directories(other, cell, step)
        assert len(ours) == len(theirs), f"{cell} step {step}: {ours}, {theirs}"
        found += zip(ours, theirs)
    return found
