"""Reads what `nan_analyze` is pointed at, by the project's dump reader: a dump root, a step or rank directory, or an incident."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from msprobe_engine.align.parallel import stages
from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.core.io.damaged_files import guard_reading
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find.nonfinite import trace
from msprobe_engine.find.nonfinite.flags import Trace
from msprobe_engine.formats.dump import layout
from msprobe_engine.formats.dump.completeness import missing_ranks
from msprobe_engine.formats.dump.dump_table import DumpTable
from msprobe_engine.formats.dump.frame_log import why_unfinished
from msprobe_engine.formats.dump.read_table import read_side
from msprobe_engine.formats.dump.reader import DumpDirectory
from msprobe_engine.formats.dump.replicas.reader import ReplicaReader
from msprobe_engine.formats.dump.replicas.shared_columns import SharedColumns
from msprobe_engine.formats.dump.ring_file import has_step_file
from msprobe_engine.measure.missing_statistics import UNSEARCHED


def number_ranks(dump: DumpDirectory, step: int) -> Iterator[tuple[int, Path]]:
    """(rank, its directory) of a step. Directories without a rank get the free numbers from 0."""
    ranks = dump.ranks(step)
    taken = {rank for rank in ranks if isinstance(rank, int)}
    for key in ranks:
        rank = key if isinstance(key, int) else next(n for n in range(len(ranks) + 1) if n not in taken)
        taken.add(rank)
        yield rank, dump.path(step, key)


def read_step(dump: DumpDirectory, step: int, problems: list[str], reader: ReplicaReader | None = None) -> dict[int, DumpTable]:
    """All ranks of a step that can be read and hold something; what does not is said in `problems`. Directories without a rank get free
    numbers. `reader`: of tables with columns that others may have, too, for who changes none."""
    sides: dict[int, DumpTable] = {}
    problems += missing_ranks(dump, step)
    files = {
        rank: directory / (layout.DEBUG if (directory / layout.DEBUG).exists() else layout.DUMP)
        for rank, directory in number_ranks(dump, step)
    }
    if reader is not None:
        reader.expect(list(files.values()))
    for rank, file in files.items():
        try:
            side = read_side(file) if reader is None else reader.read(file)
        except DumpFormatError as error:
            problems.append(str(error))
            continue
        if len(side):
            sides[rank] = side
        else:
            problems += side.problems
    return sides


def load_step(
    dump: DumpDirectory, step: int, sides: dict[int, DumpTable] | None = None, reader: ReplicaReader | None = None
) -> tuple[dict[int, Trace], list[str]]:
    """All ranks of one step, and what could not be read. Directories without a rank get the free numbers from 0.

    Args:
        sides: takes up the ranks as columns too.
        reader: knows what was read before.
    """
    traces: dict[int, Trace] = {}
    problems = missing_ranks(dump, step)
    replicas = ReplicaTraces(reader or ReplicaReader(SharedColumns()))
    places = list(number_ranks(dump, step))
    replicas.reader.expect([file for _, path in places if has_step_file(file := path / layout.DUMP)])
    for rank, path in places:
        try:
            traces[rank] = load_rank(step, rank, path, problems, sides, replicas)
        except DumpFormatError as error:
            problems.append(str(error))
    return traces, problems


def without_passes_for_shapes(traces: Mapping[int, Trace], notes: list[str]) -> dict[int, Trace] | None:
    """The ranks of a step without the passes in which torch finds the shapes of what stages exchange, of memory that nobody has written;
    None: there are none. `notes`: a sentence about what was left out is added."""
    tables = {rank: one.dump for rank, one in traces.items()}
    trained = stages.without_passes_for_shapes(tables, tables, notes) if len(tables) > 1 else tables
    if all(trained[rank] is table for rank, table in tables.items()):
        return None
    return {
        rank: one if trained[rank] is one.dump else trace.trace(trained[rank], step=one.step, rank=rank, complete=one.complete)
        for rank, one in traces.items()
    }


class ReplicaTraces:
    """Traces of the ranks of a step; ranks whose tables have one template have the calls of one trace (`formats.dump.replicas`)."""

    def __init__(self, reader: ReplicaReader) -> None:
        self.reader = reader
        self._known: dict[int, Trace] = {}

    def add(self, made: Trace) -> None:
        """Keep a trace of which nothing had to be said, for the ranks that say the same."""
        if made.dump.template is not None:
            self._known[id(made.dump.template)] = made

    def find_equal_trace(self, dump: DumpTable, step: int, rank: int, complete: bool) -> Trace | None:
        """The trace of a rank that says what an earlier one has said."""
        same = None if dump.template is None else self._known.get(id(dump.template))
        return None if same is None else Trace(step, rank, same.calls, dump, complete, str(dump.path.parent), same.parents)


def load_rank(
    step: int,
    rank: int,
    path: Path,
    problems: list[str],
    sides: dict[int, DumpTable] | None = None,
    replicas: ReplicaTraces | None = None,
) -> Trace:
    """The trace of one rank directory; of a killed process from its frame log. What is missing or damaged is said in `problems`.

    Raises:
        DumpFormatError: a file is damaged, or there is nothing yet in the directory.
    """
    file = path / layout.DUMP
    if not has_step_file(file) and not (path / layout.FRAME_LOG).exists():
        why = why_unfinished(path)
        reason = f"the run could not write the step on this rank: {why}" if why else "the step was never finished on this rank (killed?)"
        raise DumpFormatError(f"{path}: {reason}; nothing of it can be read")
    dump = read_side(file) if replicas is None else replicas.reader.read(file)
    if replicas is not None and dump.template is None:
        replicas.reader.shared.share_construct(dump)
    complete = dump.header.get("complete", True) is not False and (dump.recovered or not (path / layout.MARKER).exists())
    known = None if replicas is None else replicas.find_equal_trace(dump, step, rank, complete)
    if known is not None:
        problems += dump.problems
        if sides is not None:
            sides[rank] = dump
        return known
    said = len(dump.problems)
    with guard_reading(path, "a dump"):
        made = trace.trace(dump, step=step, rank=rank, complete=complete)
        dump.stacks  # noqa: B018 - what is wrong with them is said now
        del dump.stacks  # and they are read again where a finding asks for them: those of all ranks are larger than all else
    odd = dict.fromkeys(dump.op[row] for row, shape in enumerate(dump.shape) if type(shape) is str and row not in dump.values)
    if odd:
        dump.add_problem(
            f"{file}: {len(odd):,} records have a shape that is no list of integers, the first is {dump.ops[next(iter(odd))][:120]!r}"
        )
    if unsearched := made.unsearched:
        dump.add_problem(Sentence(UNSEARCHED, file, f"{len(unsearched):,}", unsearched[0][:120]))
    problems += dump.problems
    if sides is not None:
        sides[rank] = dump
    if replicas is not None and len(dump.problems) == said:
        replicas.add(made)
    return made
