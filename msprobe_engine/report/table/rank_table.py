"""One rank of one step, compared: reads both sides, writes the table, and says in numbers what is in it. Runs in any process."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from msprobe_engine.align.mapping.user_mapping import Mappings
from msprobe_engine.align.tasks import Task
from msprobe_engine.core.errors import DumpFormatError, NothingCapturedError, ProbeError
from msprobe_engine.core.io.output_files import guard_writing, write_file
from msprobe_engine.core.process.garbage_collection import collection_paused
from msprobe_engine.find.difference.rank_walk import RankWalk, walk_rank
from msprobe_engine.find.findings import Suspect
from msprobe_engine.find.rank_findings import RankFindings
from msprobe_engine.find.verdicts.advisor import Advisor
from msprobe_engine.find.verdicts.colours import RED
from msprobe_engine.formats.dump.dump_table import DumpTable
from msprobe_engine.formats.dump.read_table import read_side
from msprobe_engine.measure import factorize
from msprobe_engine.measure.columns import ACCURACY, COLOUR, GOLDEN_NAME, RESULT, TARGET_NAME, UNMATCHED, Block
from msprobe_engine.measure.options import CompareOptions
from msprobe_engine.report.table_files import Table, open_table

MOST_NAMES = 20
"""Unmatched rows that the summary names, per side and rank."""


Place = tuple[str, str, str]
"""Record, kind and row of a place where a difference begins."""


@dataclass(frozen=True)
class DiagnosedTask(Task):
    """A task with what the diagnosis of all ranks says of its rank and step.

    Attributes:
        differs: something is off in this step, in this rank or another one.
    """

    begins: tuple[Suspect, ...] = ()
    differs: bool = False


def places_of(begins: Sequence[Suspect]) -> list[Place]:
    """Of what is known, what decides the verdicts."""
    return [(one.record, one.kind, one.tensor) for one in begins]


@dataclass
class Result:
    """What one task came to.

    Attributes:
        files: what was written.
        verdicts: verdict -> rows; the empty text is a verdict of 8.1.1, shown as ``blank``.
        wrong: rows where a difference begins or, with the existing tool's verdicts, that it fails; they make the exit code 1.
        only_target, only_golden: rows that the other side has not.
        names: the first of those, by side.
        first: name of the first row that is off, in table order, "" when there is none.
        problems: what went wrong; the other tasks go on.
        begun: both sides, for the diagnosis, and what has been done of it; None when that was not to be kept.
        begins: where the verdicts of the table say that differences begin; None: not known any more.
        same_as: key of the task whose table is that of this one, too; then it has no files.
    """

    key: str
    files: list[str] = field(default_factory=list)
    rows: int = 0
    verdicts: dict[str, int] = field(default_factory=dict)
    wrong: int = 0
    only_target: int = 0
    only_golden: int = 0
    names: dict[str, list[str]] = field(default_factory=lambda: {"target": [], "golden": []})
    first: str = ""
    problems: list[str] = field(default_factory=list)
    begun: RankWalk | None = None
    begins: list[Place] | None = None
    same_as: str = ""

    def as_json(self) -> dict[str, Any]:
        """All but what was begun and what was found."""
        found = asdict(Result(**{**self.__dict__, "begun": None}))
        del found["begun"], found["begins"]
        if not self.same_as:
            del found["same_as"]
        return found

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Result:
        """Back from `as_json`, with or without what was found."""
        begins = document.get("begins")
        return cls(**{**document, "begins": None if begins is None else [tuple(place) for place in begins]})


WRONG = frozenset(("error", "No", "Different"))
"""Verdicts of rows that are not explained by others."""

EXPLAINED = "pass"
"""Verdict of a row without a partner, where it needs none."""

OFF = frozenset(("error", "warning", "No", "Warning", "Different", "Unmatched", "unmatched"))
"""Verdicts of rows that are off, in the words of both generations."""


@np.errstate(all="ignore")  # the numbers of a dump may be anything
def compare_task(task: Task, options: CompareOptions, output: str, stamp: str, keep: bool) -> Result:
    """Compare one pair of files. Errors of the data are in the result; those of the caller or the disk are raised.

    Args:
        output: directory of the results; the task's folder is made below it.
        stamp: time in the names of the files.
        keep: hand back the sides and what was found, for the diagnosis.

    Raises:
        SinkError: a table cannot be written.
        UsageError: the options do not fit the data.
    """
    result = Result(task.key)
    if task.whole:
        return _compare_whole(result, task, options, Path(output), stamp)
    try:
        target, golden = read_side(task.target), read_side(task.golden)
        if task.stack is not None:
            target.stacks = _stacks(task.stack, target)
    except DumpFormatError as error:
        result.problems.append(str(error))
        return result
    if not (len(target) and len(golden)):
        bare = [side.path for side in (target, golden) if side.ops and not len(side)]
        result.problems += [f"{path}: no tensor and no argument in its records; nothing to compare" for path in bare]
        result.problems += [*target.problems, *golden.problems]
        return result
    Mappings.of(options).apply(target, golden)
    begun: RankWalk | None = None
    try:
        blocks, begun = _blocks(result, task, target, golden, options)
        _write(result, task, options, Path(output), stamp, blocks)
    except (DumpFormatError, NothingCapturedError) as error:
        result.problems.append(f"{task.place}: {error}")
    if keep and not task.calibration:  # what is begun counts in what the dtypes say
        result.begun = begun or walk_rank(target, golden)
    result.problems += [*target.problems, *golden.problems]
    return result


def _compare_whole(result: Result, task: Task, options: CompareOptions, output: Path, stamp: str) -> Result:
    """What all ranks of a step make together, of runs with different layouts."""
    from msprobe_engine.find.rank_findings import find_in_whole
    from msprobe_engine.report.table.layout_tables import read_whole
    from msprobe_engine.report.table.pairs import compare_pair

    try:
        whole, rank, matching = read_whole(task, Mappings.of(options), result.problems)
        shown = _select_findings(result, find_in_whole(whole, task.step or 0, rank), task)
        _write(result, task, options, output, stamp, compare_pair(whole.target, whole.golden, matching, options, shown))
    except (DumpFormatError, NothingCapturedError) as error:
        result.problems.append(f"{task.place}: {error}")
    return result


def _blocks(
    result: Result, task: Task, target: DumpTable, golden: DumpTable, options: CompareOptions
) -> tuple[Iterator[Block], RankWalk | None]:
    from msprobe_engine.align.calls.match import match
    from msprobe_engine.find.difference.noise.calibration import movements
    from msprobe_engine.find.rank_findings import find_in_rank
    from msprobe_engine.report.table.pairs import compare_pair, measure_tensors

    if options.consistent_check:
        from msprobe_engine.align.calls.training_and_inference import align

        return compare_pair(*align(target, golden, options.backend), options), None
    matching = match(target, golden, options)
    if options.compat:
        return compare_pair(target, golden, matching, options), None
    target_side, golden_side = matching.sides or (target, golden)
    tensors = measure_tensors(target_side, golden_side, matching, options)
    begun = walk_rank(target, golden, matching.aligned, None if tensors is None else tensors.figures)
    moved = movements(golden, [read_side(path) for path in task.calibration]) if task.calibration else None
    shown = _select_findings(result, find_in_rank(begun, task.step or 0, task.rank or 0, moved), task)
    return compare_pair(target_side, golden_side, matching, options, shown, tensors), begun


def _select_findings(found: Result, alone: RankFindings, task: Task) -> RankFindings:
    """What the table shows: what the diagnosis of all ranks says, else what this rank shows alone."""
    shown = replace(alone, begins=task.begins, differs=task.differs) if isinstance(task, DiagnosedTask) else alone
    found.begins = places_of(shown.begins)
    return shown


def _stacks(path: Path, target: DumpTable) -> dict[str, list[str]]:
    """Of a stack.json that lies elsewhere; what is wrong with it is a problem of `target`."""
    other = DumpTable(path)
    if path.name != "stack.json":
        raise DumpFormatError(f"{path}: is no stack.json")
    stacks = other.stacks
    for problem in other.problems:
        target.add_problem(problem)
    return stacks


def _write(result: Result, task: Task, options: CompareOptions, output: Path, stamp: str, blocks: Iterator[Block]) -> None:
    tables: list[Table] = []
    advisor = Advisor() if options.advisor else None
    try:
        for block in blocks:
            if not tables:
                columns = [name for name in block if name != COLOUR]
                path = output / task.folder / (f"{task.stem}_{stamp}" if task.stamped else task.stem)
                for mode in dict.fromkeys(options.formats):
                    tables.append(open_table(path, columns, mode, options.compat, f"{task.place}: {task.target}"))
            for table in tables:
                table.write(block)
            _count(result, block, not options.compat)
            if advisor is not None:
                advisor.add_block(block)
        for table in tables:
            table.close()
    except BaseException:
        for table in tables:
            table.abort()
        raise
    result.files = [os.fspath(path) for table in tables for path in table.files]
    if advisor is not None and tables:
        path = output / task.folder / f"{task.stem.replace('compare_result', 'advisor')}_{stamp}.txt"
        with guard_writing(path):
            write_file(path, [advisor.text().encode("utf-8", "backslashreplace")])
        result.files.append(os.fspath(path))
    if not tables:
        result.problems.append(f"{task.place}: no row of {task.target} could be put into a table")


def _count(result: Result, block: Block, explained: bool) -> None:
    """`explained`: rows without a partner that pass need none, and are not counted as rows of one side."""
    names, others = block[TARGET_NAME], block[GOLDEN_NAME]
    rows = len(names)
    result.rows += rows
    column: Any = block.get(RESULT, block.get(ACCURACY, ()))
    verdicts: list[Any] = column.tolist() if isinstance(column, np.ndarray) else list(column)
    for verdict, number in Counter(verdicts).items():
        word = str(verdict or "blank").split("\n")[0] if verdict is not None else "blank"
        result.verdicts[word] = result.verdicts.get(word, 0) + number
    # the words of 8.1.1 have one level, the colour of the row has both
    result.wrong += list(block[COLOUR]).count(RED) if COLOUR in block else sum(verdict in WRONG for verdict in verdicts)
    known = [verdict == EXPLAINED for verdict in verdicts] if explained else [False] * rows
    result.only_target += _alone(result.names["target"], names, others, known)
    result.only_golden += _alone(result.names["golden"], others, names, known)
    if not result.first and OFF & result.verdicts.keys():
        result.first = next((_name(names[i], others[i]) for i, verdict in enumerate(verdicts) if verdict in OFF), "")


def _alone(known: list[str], names: Sequence[Any], others: Sequence[Any], explained: Sequence[bool]) -> int:
    """Rows of `names` that have no partner and are not explained; the first few are added to `known`."""
    alone = [i for i, other in enumerate(others) if other == UNMATCHED and not explained[i]]
    if alone and len(known) < MOST_NAMES:
        known += [str(names[i]) for i in alone[: MOST_NAMES - len(known)]]
    return len(alone)


def _name(name: Any, other: Any) -> str:
    return str(other if name == UNMATCHED else name)


def compare_guarded(task: Task, options: CompareOptions, output: str, stamp: str, keep: bool) -> Result:
    """`compare_task`; a fault of this tool in one pair does not take the others with it."""
    try:
        with collection_paused(), factorize.cache_columns():  # the columns of a million rows are no garbage
            return compare_task(task, options, output, stamp, keep)
    except ProbeError:
        raise
    except Exception as error:
        return build_failed_result(task, error)


def build_failed_result(task: Task, error: BaseException) -> Result:
    """The result of a task that could not be done."""
    text = str(error) if isinstance(error, ProbeError) else f"unexpected {type(error).__name__}: {error}"
    return Result(task.key, problems=[f"{task.place}: {text}"])
