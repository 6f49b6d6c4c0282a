"""Reads what `nan_analyze` is pointed at, by the project's dump reader: a dump root, a step or rank directory, or an incident."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.core.io.damaged_files import guard_reading
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find.nonfinite import trace
from msprobe_engine.find.nonfinite.flags import Trace
from msprobe_engine.formats.dump import frame_log, layout
from msprobe_engine.formats.dump.completeness import missing_ranks, missing_records
from msprobe_engine.formats.dump.dump_table import DumpTable, read_side, side_of
from msprobe_engine.formats.dump.reader import DumpDirectory, parse_json, read_bytes, read_json
from msprobe_engine.formats.dump.stream import open_records
from msprobe_engine.measure.missing_statistics import UNSEARCHED


def numbered(dump: DumpDirectory, step: int) -> Iterator[tuple[int, Path]]:
    """(rank, its directory) of a step. Directories without a rank get the free numbers from 0."""
    ranks = dump.ranks(step)
    taken = {rank for rank in ranks if isinstance(rank, int)}
    for key in ranks:
        rank = key if isinstance(key, int) else next(n for n in range(len(ranks) + 1) if n not in taken)
        taken.add(rank)
        yield rank, dump.path(step, key)


def read_step(dump: DumpDirectory, step: int, problems: list[str]) -> dict[int, DumpTable]:
    """All ranks of a step that can be read and hold something; what does not is said in `problems`. Directories without a rank get free
    numbers."""
    sides: dict[int, DumpTable] = {}
    problems += missing_ranks(dump, step)
    for rank, directory in numbered(dump, step):
        try:
            side = read_side(directory / (layout.DUMP if not (directory / layout.DEBUG).exists() else layout.DEBUG))
        except DumpFormatError as error:
            problems.append(str(error))
            continue
        if len(side):
            sides[rank] = side
        else:
            problems += side.problems
    return sides


def load_step(dump: DumpDirectory, step: int, sides: dict[int, DumpTable] | None = None) -> tuple[dict[int, Trace], list[str]]:
    """All ranks of one step, and what could not be read. Directories without a rank get the free numbers from 0.

    Args:
        sides: takes up the ranks as columns too.
    """
    traces: dict[int, Trace] = {}
    problems = missing_ranks(dump, step)
    for rank, path in numbered(dump, step):
        try:
            traces[rank] = load_rank(step, rank, path, problems, sides)
        except DumpFormatError as error:
            problems.append(str(error))
    return traces, problems


def load_rank(step: int, rank: int, path: Path, problems: list[str], sides: dict[int, DumpTable] | None = None) -> Trace:
    """The trace of one rank directory; of a killed process from its frame log.

    The JSON is taken as it is, without the reader's typed objects: most calls are clean and are looked at once. What is missing is said
    in `problems`; so is a damaged stack.json or construct.json, without which the calls are looked at.

    Raises:
        DumpFormatError: a file is damaged, or there is nothing yet in the directory.
    """
    file = path / layout.DUMP
    if not file.exists() and not (path / layout.FRAME_LOG).exists():
        raise DumpFormatError(f"{path}: the step was never finished on this rank (killed?); nothing of it can be read")
    data: dict[str, Any] = {}
    repeated = 0
    with open_records(file) as records:
        for block in records:
            repeated += len(block) + len(data)
            data.update(block)
            repeated -= len(data)
    header, repeated = records.header, repeated + records.repeated
    if records.recovered:
        logged = frame_log.decode(read_bytes(path / layout.FRAME_LOG), str(path / layout.FRAME_LOG))
        stack, construct = (parse_json(text or b"{}", path / layout.FRAME_LOG) for text in (logged.stack, logged.construct))
    else:
        stack, construct = (_optional(path / name, problems) for name in (layout.STACK, layout.CONSTRUCT))
    problems += missing_records(file, header, len(data), recovered=records.recovered, repeated=repeated)
    odd = [name for name, record in data.items() if not isinstance(record, dict) and not name.endswith(".debug")]
    if odd:
        problems.append(f"{file}: {len(odd):,} records are no JSON objects and are left out, the first is {odd[0][:120]!r}")
    complete = header.get("complete", True) is not False and (records.recovered or not (path / layout.MARKER).exists())
    if sides is not None:
        sides[rank] = side_of(file, header | {"data": data}, recovered=records.recovered)
    with guard_reading(path, "a dump"):
        made = trace.trace(
            data,
            construct if isinstance(construct, dict) else {},
            stack if isinstance(stack, dict) else {},
            step=step, rank=rank, complete=complete, path=str(path),
        )  # fmt: skip
    if made.left_out:
        count, first = f"{len(made.left_out):,}", made.left_out[0][:120]
        problems.append(f"{file}: {count} records with a shape that is no list of integers are left out, the first is {first!r}")
    if made.unsearched:
        problems.append(Sentence(UNSEARCHED, file, f"{len(made.unsearched):,}", made.unsearched[0][:120]))
    if made.odd_stacks:
        problems.append(f"{path / layout.STACK}: {made.odd_stacks:,} stacks are no lists of lines of text and are left out")
    return made


def _optional(path: Path, problems: list[str]) -> Any:
    if not os.path.lexists(path):
        return {}
    try:
        found = read_json(path)
        if isinstance(found, dict):
            return found
        problems.append(f"{path}: holds a {type(found).__name__}; a JSON object is needed. Looked at without it")
    except DumpFormatError as error:
        problems.append(f"{error}. Looked at without it")
    return {}


@contextmanager
def no_gc() -> Iterator[None]:
    """Building millions of small dicts is much slower while the cycle collector looks at them again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
