"""Reads one side of a comparison from its files: a dump.json, a debug.json, or a directory of a MindSpore static graph."""

from __future__ import annotations

from pathlib import Path

from msprobe_engine.core.io.damaged_files import guard_reading
from msprobe_engine.core.process.garbage_collection import collection_paused
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.formats.dump.dump_table import DumpTable
from msprobe_engine.formats.dump.rank_files import missing_companions, missing_records
from msprobe_engine.formats.dump.record_rows import RowReader
from msprobe_engine.formats.dump.static_graph import is_graph_side, read_graph_side
from msprobe_engine.formats.dump.stream import Records, open_records

_TASKS = frozenset(("statistics", "tensor", "structure", "overflow_check", "free_benchmark", "exception_dump"))
"""Of the existing tool and of this one."""


def read_side(path: Path | str) -> DumpTable:
    """Read one ``dump.json`` or ``debug.json`` (or what a killed process left of it), or a directory of a MindSpore static graph.

    Raises:
        DumpFormatError: the file is damaged, or is none; what and where is said.
    """
    if Path(path).suffix != ".json" and is_graph_side(Path(path)):
        return read_graph_side(Path(path))
    side = DumpTable(Path(path))
    with guard_reading(path, "a dump"), collection_paused(), open_records(side.path) as records:
        reader = fill(side, records)
    if reader.left_out:
        side.add_problem(
            Sentence(
                "{0}: {1} records or values are damaged and left out, the first is {2}",
                side.path,
                f"{reader.left_out:,}",
                reader.first_left_out,
            )
        )
    say_missing(side, records.repeated + len(side.ops) - len(set(side.ops)))
    return side


def fill(side: DumpTable, records: Records) -> RowReader:
    """Append all records of a file to a table without any; the reader knows what is damaged."""
    reader = RowReader(side)
    for block in records:
        reader.block(block)
    side.header = records.header
    side.recovered = records.recovered
    return reader


def say_missing(side: DumpTable, repeated: int, whole: bool = False) -> None:
    """Say what is not there of a rank; `repeated`: records of which there are several under one name; `whole`: what lies beside it was
    read to its end."""
    if side.task not in _TASKS:
        template = "{0}: the task {1} is not known, and what its records hold is a guess; they are read as those of task statistics"
        side.add_problem(Sentence(template, side.path, repr(side.task)))
    for problem in missing_records(side.path, side.header, len(side.ops), recovered=side.recovered, repeated=repeated):
        side.add_problem(problem)
    for problem in () if side.recovered or whole else missing_companions(side.path, side.header):
        side.add_problem(problem)
