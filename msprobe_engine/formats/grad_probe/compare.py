"""Compares the gradient directions of two runs: how many elements have the same sign, per parameter and step.

From our files zero, positive, negative and NaN are told apart (`signs.Agreement`). The files of the existing tool say only
``gradient > 0``; where one side has no more than that, the comparison is of that.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from msprobe_engine.core.errors import MissingExtraError, UsageError, needs_extra
from msprobe_engine.core.io.csv_text import format_rows
from msprobe_engine.core.io.output_files import make_directory, replace_file
from msprobe_engine.core.log import get_logger
from msprobe_engine.core.text.words import some
from msprobe_engine.formats.grad_probe import layout, signs
from msprobe_engine.formats.grad_probe.layout import file_stem
from msprobe_engine.formats.grad_probe.read import Direction, RankFiles

LOWEST_FIRST = 0.97
"""A parameter is suspect when its similarity is below this in the first step both runs have, ..."""
LARGEST_FALL = 0.03
"""... or falls by more than this from one step to the next. Rule of thumb of the existing tool's manual."""
SUMMARY = "summary"
SIMILARITIES, SUSPECTS, PICTURES = "similarities.csv", "suspects.csv", "similarities_picture"

Progress = Callable[[Iterable[Any], str], Iterable[Any]]
_log = get_logger()


class Suspect(NamedTuple):
    """A parameter whose gradient went another way in one of the runs, or is NaN."""

    rank: int | None
    step: int
    parameter: str
    similarity: float
    why: str


class RankResult(NamedTuple):
    """The comparison of one rank.

    Attributes:
        steps: that both runs have.
        agreements: parameter to one value per step; None: not in both runs.
        problems: what could not be compared, one line each.
        notes: steps that one run alone has.
    """

    steps: list[int]
    agreements: dict[str, list[signs.Agreement | None]]
    problems: list[str]
    notes: Sequence[str] = ()

    def summary(self) -> list[float]:
        """Per step: share of all elements with the same sign."""
        columns = [[agreement for agreement in column if agreement is not None] for column in zip(*self.agreements.values())]
        return [
            sum(agreement.same for agreement in column_agreements) / n
            if (n := sum(agreement.count for agreement in column_agreements))
            else 0.0
            for column_agreements in columns
        ]


@dataclass
class Compared:
    """What a comparison of two runs came to.

    Attributes:
        suspects: by rank and step.
        ranks, steps, parameters: how many were compared; of steps and parameters those of the rank that has most.
        notes: steps that one run alone has.
        problems: what both runs should have and could not be compared, one line each.
    """

    suspects: list[Suspect] = field(default_factory=list)
    ranks: int = 0
    steps: int = 0
    parameters: int = 0
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, result: RankResult, suspects: Sequence[Suspect], rank: int | None) -> None:
        """Take up the result of a rank."""
        place = "" if rank is None else f"rank {rank}: "
        self.suspects += suspects
        self.ranks += 1
        self.steps = max(self.steps, len(result.steps))
        compared = sum(any(value is not None for value in values) for values in result.agreements.values())
        self.parameters = max(self.parameters, compared)
        self.notes += [f"{place}{note}" for note in result.notes]
        self.problems += [f"{place}{problem}" for problem in result.problems]


class GradComparator:
    """Compares runs of task grad_probe, under the name of the existing tool."""

    @staticmethod
    def compare_distributed(path1: str | Path, path2: str | Path, output_dir: str | Path, *, plots: bool = True) -> list[Suspect]:
        """Compare all ranks that both runs have; writes ``{output_dir}/rank{R}/``, see `compare`.

        Args:
            path1, path2: ``dump_path`` of the runs.

        Raises:
            UsageError: they have no rank or step in common.
            DumpFormatError: a file is damaged.
        """
        return _log_remarks(compare_runs(Path(path1), Path(path2), Path(output_dir), plots=plots)).suspects

    @staticmethod
    def compare(path1: str | Path, path2: str | Path, output_dir: str | Path, *, plots: bool = True) -> list[Suspect]:
        """Compare one rank; writes ``similarities.csv``, ``suspects.csv`` and, where matplotlib is installed, pictures.

        Args:
            path1, path2: ``dump_path/rank{R}`` of the runs.

        Returns:
            what is suspect, by step.

        Raises:
            UsageError: they have no step in common.
            DumpFormatError: a file is damaged.
        """
        return _log_remarks(compare_one(Path(path1), Path(path2), Path(output_dir), plots=plots)).suspects


def _each(items: Iterable[Any], _what: str) -> Iterable[Any]:
    return items


def _log_remarks(found: Compared) -> Compared:
    for line in (*found.notes, *found.problems):
        _log.warning("%s", line)
    return found


def compare_runs(target: Path, golden: Path, output: Path, *, plots: bool = True, progress: Progress = _each) -> Compared:
    """See `GradComparator.compare_distributed`; `progress` is handed what takes long."""
    target_ranks, golden_ranks = _ranks(target), _ranks(golden)
    if not target_ranks & golden_ranks:
        raise UsageError(f"{target} and {golden} have no directory rank{{R}} in common; give dump_path of two runs of task grad_probe")
    compared = Compared()
    for root, alone in ((target, target_ranks - golden_ranks), (golden, golden_ranks - target_ranks)):
        if alone:
            compared.problems.append(f"ranks only in {root}: {some(sorted(alone))}")
    for rank in sorted(target_ranks & golden_ranks):
        result = compare_rank(target / f"rank{rank}", golden / f"rank{rank}", progress)
        compared.add(result, write_result(result, output / f"rank{rank}", rank, plots=plots, progress=progress), rank)
    return compared


def compare_one(target: Path, golden: Path, output: Path, *, plots: bool = True, progress: Progress = _each) -> Compared:
    """See `GradComparator.compare`."""
    compared, result = Compared(), compare_rank(target, golden, progress)
    compared.add(result, write_result(result, output, None, plots=plots, progress=progress), None)
    return compared


def _ranks(path: Path) -> set[int]:
    try:
        return {int(m[1]) for e in os.listdir(path) if (m := layout.RANK.fullmatch(e)) and (path / e).is_dir()}
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}); give dump_path of a run of task grad_probe") from None


def compare_rank(target: Path, golden: Path, progress: Progress = _each) -> RankResult:
    """Compare two rank directories.

    Raises:
        UsageError: there is no step with signs in both, or no parameter in both.
        DumpFormatError: a file is damaged.
    """
    target_files, golden_files = RankFiles(target), RankFiles(golden)
    steps = sorted(set(target_files.steps) & set(golden_files.steps))
    if not steps:
        hint = (
            "level L0 keeps no signs, collect with L1"
            if target_files.tables or golden_files.tables
            else "are they rank directories of task grad_probe?"
        )
        raise UsageError(f"{target} and {golden} have no step with gradient directions in common; {hint}")
    tables = [step for step in target_files.tables if step in golden_files.tables]
    if not tables:
        raise UsageError(f"{target} and {golden} have no grad_summary_{{step}}.csv in common; it names the parameters")
    names = list(dict.fromkeys(name for step in tables for side in (target_files, golden_files) for name in side.parameters(step)))
    agreements: dict[str, list[signs.Agreement | None]] = {name: [] for name in names}
    problems: dict[str, int] = {}
    for step in progress(steps, f"comparing {target.name}"):
        target_step, golden_step = target_files.step(step), golden_files.step(step)
        for name in names:
            agreements[name].append(_agreement(name, target_step.get(name), golden_step.get(name), problems))
    if not any(v is not None for values in agreements.values() for v in values):
        raise UsageError(f"{target} and {golden}: no parameter can be compared: {'; '.join(problems)}")
    alone = ((path, sorted({*side.steps} - {*steps})) for path, side in ((target, target_files), (golden, golden_files)))
    notes = [f"steps only in {path}: {some(only)}" for path, only in alone if only]
    return RankResult(steps, agreements, [f"{text} ({n} of {len(steps)} steps)" for text, n in problems.items()], notes)


def _agreement(name: str, target: Direction | None, golden: Direction | None, problems: dict[str, int]) -> signs.Agreement | None:
    problem = ""
    if target is None or golden is None:
        which = "both runs" if target is golden else "the first run" if target is None else "the second run"
        problem = f"{name}: {which} has no direction of it"
    elif target.shape != golden.shape:
        problem = f"{name}: shapes differ, {list(target.shape)} and {list(golden.shape)}"
    if problem or target is None or golden is None:
        problems[problem] = problems.get(problem, 0) + 1
        return None
    if target.packed is not None and golden.packed is not None:
        return signs.compare(target.packed, golden.packed, _size(target))
    return signs.compare_bool(_positive(target), _positive(golden))


def _size(direction: Direction) -> int:
    size = 1
    for n in direction.shape:
        size *= n
    return size


def _positive(direction: Direction) -> Any:
    if direction.positive is not None:
        return direction.positive
    assert direction.packed is not None
    return signs.positive(direction.packed, _size(direction))


def find_suspects(result: RankResult, rank: int | None = None) -> list[Suspect]:
    """What the rule of thumb (`LOWEST_FIRST`, `LARGEST_FALL`) says, and every NaN; by step, the largest change first."""
    found: list[tuple[int, float, Suspect]] = []
    for name, values in result.agreements.items():
        there = [(step, value) for step, value in zip(result.steps, values) if value is not None and value.count]
        if not there:
            continue
        step, value = there[0]
        if value.similarity < LOWEST_FIRST:
            found.append(_suspect(rank, step, name, value, 1 - value.similarity, f"below {LOWEST_FIRST} in the first step"))
        for (_, before), (step, value) in pairwise(there):
            if (fall := before.similarity - value.similarity) > LARGEST_FALL:
                found.append(_suspect(rank, step, name, value, fall, f"fell by {fall:.4f} since the step before"))
        known = {s.step for _, _, s in found if s.parameter == name}
        # NaN stays: the step it came in says all
        first = next(((step, value) for step, value in there if any(value.nans)), None)
        if first is not None and first[0] not in known:
            found.append(_suspect(rank, *first[:1], name, first[1], 0.0, "first NaN"))
    found.sort(key=lambda f: f[:2])
    return [suspect for _, _, suspect in found]


def _suspect(rank: int | None, step: int, name: str, value: signs.Agreement, change: float, why: str) -> tuple[int, float, Suspect]:
    if any(value.nans):
        shares = [f"{n / value.count:.2%}" for n in value.nans]
        why += f"; NaN in {shares[0]} of the first and {shares[1]} of the second run's elements"
    return step, -change, Suspect(rank, step, name, value.similarity, why)


def write_result(result: RankResult, output: Path, rank: int | None, *, plots: bool = True, progress: Progress = _each) -> list[Suspect]:
    """Write the tables and pictures of one rank; returns what is suspect.

    Raises:
        SinkError: they cannot be written.
    """
    make_directory(output, "similarities")
    curves: dict[str, Sequence[float]] = {
        name: [float("nan") if v is None else v.similarity for v in values] for name, values in result.agreements.items()
    }
    curves[SUMMARY] = result.summary()
    _write_csv(output / SIMILARITIES, [["step", *map(str, result.steps)], *([name, *values] for name, values in curves.items())])
    suspects = find_suspects(result, rank)
    lines = [[s.step, s.parameter, s.similarity, s.why] for s in suspects]
    _write_csv(output / SUSPECTS, [["step", "param_name", "similarity", "why"], *lines])
    if plots:
        try:
            write_plots(result.steps, curves, output / PICTURES, progress)
        except MissingExtraError as error:
            _log.warning("no pictures: %s", error)
    return suspects


def _write_csv(path: Path, lines: Iterable[Iterable[Any]]) -> None:
    replace_file(path, format_rows(lines, "\r\n").encode("utf-8-sig"))


def is_rank_directory(path: Path) -> bool:
    """Has this directory the files of one rank (and not directories of ranks)?

    Raises:
        DumpFormatError: it cannot be read.
    """
    files = RankFiles(path)
    return bool(files.steps or files.tables)


def write_plots(
    steps: Sequence[int],
    curves: Mapping[str, Sequence[float]],
    directory: Path,
    progress: Callable[[Iterable[Any], str], Iterable[Any]],
) -> None:
    """Write ``{name}_similarities.png`` of each curve.

    Args:
        steps: x axis.
        curves: name to one value per step.

    Raises:
        MissingExtraError: matplotlib is not installed.
        SinkError: a file cannot be written.
    """
    with needs_extra("matplotlib", "plots", "a picture of similarities"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    make_directory(directory, "pictures of similarities")
    figure = Figure()
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    (line,) = axes.plot(steps, [0.0] * len(steps), marker="." if len(steps) < 50 else "")
    axes.set_xlabel("steps")
    axes.set_ylabel("similarities")
    for name, values in progress(list(curves.items()), "drawing"):
        line.set_ydata(values)
        axes.relim()
        axes.autoscale_view()
        axes.set_title(f"{name}_similarities", parse_math=False)
        picture = io.BytesIO()
        figure.savefig(picture, format="png")
        replace_file(directory / f"{file_stem(name)}_similarities.png", picture.getvalue())
