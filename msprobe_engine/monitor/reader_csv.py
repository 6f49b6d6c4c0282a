"""Tables from CSV files: ours and those of the existing tool (8.1.1, 26.2.0 and its second monitor).

The header says what a file has; columns that are none of the known words are statistics. A row that does not fit costs itself only.
"""

from __future__ import annotations

import csv
import io
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TextIO

import numpy as np

from msprobe_engine.monitor.places import open_file
from msprobe_engine.monitor.series import Builder, Floats, Ids, Integers, Key, Part, Series, floats, integers, whole
from msprobe_engine.sinks.names import plain_name

Problems = Counter[str]

_FILE = re.compile(r"(\w+?)_(\d{1,18})-(\d{1,18})\.csv", re.ASCII)
_V2_FILE = re.compile(r"(module|weight_grad|optimizer|param|cc)_step(\d{1,18})-(\d{1,18})\.csv", re.ASCII)
_V2_FAMILIES = {
    ("module", "forward"): "actv", ("module", "backward"): "actv_grad", ("weight_grad", "unreduced"): "grad_unreduced",
    ("weight_grad", "reduced"): "grad_reduced", ("optimizer", "exp_avg"): "exp_avg", ("optimizer", "exp_avg_sq"): "exp_avg_sq",
    ("param", "param_origin"): "param_origin", ("param", "param_updated"): "param_updated", ("cc", "comm"): "other",
}  # fmt: skip
"""Monitor and scope of the second monitor's files, and the family of the same numbers."""
_NOT_NUMBERS = (
    "vpp_stage",
    "name",
    "module_name",
    "step",
    "micro_step",
    "phase",
    "state",
    "tag",
    "scope",
    "shape",
    "dtype",
    "digest",
    "id",
)
SCALARS = "scalars"
_CHUNK = 20_000
_LINE = 4_000_000
"""Characters of the longest line that is read."""
_WIDTH = 4096
"""Columns of the widest file that is read."""


def families_of(name: str) -> tuple[str, ...]:
    """Families that a file of this name may hold, () when it is no table."""
    if (match := _V2_FILE.fullmatch(name)) is not None:
        return tuple(family for (monitor, _), family in _V2_FAMILIES.items() if monitor == match[1])
    match = _FILE.fullmatch(name)
    return (match[1],) if match else ()


def first_step(name: str) -> int:
    """First step of the file's block: the order in which files were written."""
    match = _V2_FILE.fullmatch(name) or _FILE.fullmatch(name)
    return int(match[2]) if match else 0


def read_tables(path: Path, builder_of: Callable[[str], Builder]) -> Problems:
    """Read one file into the builders of its families; says what could not be read and how often. Never raises."""
    problems: Problems = Counter()
    match = _V2_FILE.fullmatch(path.name)
    monitor = match[1] if match else ""
    family = "" if match else (families_of(path.name) or ("",))[0]
    try:
        for header, rows in _chunks(path, problems):
            _read(header, rows, monitor, family, builder_of, problems)
    except OSError as error:
        problems[f"cannot be read: {error.strerror or error}"] += 1
    return problems


def read_scalars(path: Path, into: dict[str, list[tuple[Integers, Floats]]]) -> Problems:
    """Read a file of numbers per step; as `read_tables`."""
    problems: Problems = Counter()
    try:
        for header, rows in _chunks(path, problems):
            columns = list(zip(*rows))
            if not {"step", "name", "value"} <= set(header):
                problems["header without step, name and value"] += 1
                return problems
            steps, good = integers(columns[header.index("step")])
            values, wrong = floats(columns[header.index("value")])
            _count(problems, "row whose step is no whole number", int((~good).sum()))
            _count(problems, "cell that is no number", wrong)
            numbers = Ids()
            ids = np.fromiter(map(numbers.__getitem__, columns[header.index("name")]), np.int64, len(rows))
            for name, i in numbers.items():
                mine = (ids == i) & good
                into.setdefault(plain_name(name), []).append((steps[mine], values[mine]))
    except OSError as error:
        problems[f"cannot be read: {error.strerror or error}"] += 1
    return problems


def joined(parts: Sequence[tuple[Integers, Floats]]) -> Series:
    """One series of the parts; of equal steps the last one stays."""
    steps, values = np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])
    order = np.argsort(steps, kind="stable")
    steps = steps[order]
    last = np.ones(len(steps), bool)
    last[:-1] = steps[1:] != steps[:-1]
    return Series(steps[last], values[order][last])


def _read(
    header: Sequence[str], rows: list[list[str]], monitor: str, family: str, builder_of: Callable[[str], Builder], problems: Problems
) -> None:
    columns = dict(zip(reversed(header), reversed(list(zip(*rows)))))  # of two columns with one name the first counts
    name = "name" if "name" in columns else "module_name"
    if name not in columns or "step" not in columns or (monitor and "scope" not in columns):
        problems["header without name and step"] += 1
        return
    steps, good = integers(columns["step"])
    _count(problems, "row whose step is no whole number", int((~good).sum()))
    detail = {"opt_state": "state", "other": "tag"}.get(family, "")
    nothing = ("",) * len(rows)
    parts = [columns.get(word, nothing) for word in ("vpp_stage", name, "micro_step", "phase", detail, "scope")]
    local = Ids()
    ids = np.fromiter(map(local.__getitem__, zip(*parts)), np.int64, len(rows))
    values = {}
    for op in header:
        if op not in _NOT_NUMBERS and op not in values:
            values[op], wrong = floats(columns[op])
            _count(problems, f"cell of {op} that is no number", wrong)
    # Where each key of this file belongs; a file of the second monitor holds several families.
    homes: dict[str, Integers] = {}
    wrong_rows = np.zeros(len(local), bool)
    for (vpp, text, micro, phase, tag, scope), i in local.items():
        home = _V2_FAMILIES.get((monitor, scope), "") if monitor else family
        stage, micro_step = _stage(vpp), whole(micro) if micro != "" else -1
        if not home or stage is None or micro_step is None:
            wrong_rows[i] = True
            continue
        if home not in homes:
            homes[home] = np.full(len(local), -1, np.int64)
        homes[home][i] = builder_of(home).keys[Key(stage, plain_name(text), micro_step, phase, tag)]
    _count(problems, "row whose vpp_stage, micro_step or scope is unknown", int(wrong_rows[ids].sum()))
    for home, translation in homes.items():
        mine = translation[ids]
        mine[~good] = -1
        if len(homes) == 1:
            builder_of(home).add(Part(mine, steps, values))
        else:
            chosen = mine >= 0
            builder_of(home).add(Part(mine[chosen], steps[chosen], {op: v[chosen] for op, v in values.items()}))


def _stage(text: str) -> int | None:
    # The second monitor writes -1 for a model without chunks and nothing for collectives.
    stage = whole(text) if text != "" else 0
    return None if stage is None else max(stage, 0)


def _chunks(path: Path, problems: Problems) -> Iterator[tuple[list[str], list[list[str]]]]:
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        cut = False
        if size:
            file.seek(size - 1)
            cut = file.read(1) != b"\n"
            file.seek(0)
        text = io.TextIOWrapper(file, encoding="utf-8", errors="backslashreplace", newline="")
        reader = csv.reader(_lines(text, problems))
        header = next(_rows(reader, problems), [])
        if not 2 <= len(header) <= _WIDTH:
            if size:
                problems["no header"] += 1
            return
        rows = _rows(reader, problems)
        chunk = list(islice(rows, _CHUNK))
        while chunk:
            following = list(islice(rows, _CHUNK))
            if cut and not following:
                chunk.pop()
                problems["last line is cut"] += 1
            width = len(header)
            if set(map(len, chunk)) - {width}:
                fitting = [row for row in chunk if len(row) == width]
                _count(problems, "row with another number of cells than the header", len(chunk) - len(fitting))
                chunk = fitting
            if chunk:
                yield header, chunk
            chunk = following


def _rows(reader: Iterator[list[str]], problems: Problems) -> Iterator[list[str]]:
    while True:
        try:
            yield from reader
            return
        except csv.Error as error:  # a field without end, NUL: the reader goes on with the next line
            problems[f"line that is no CSV ({error})"] += 1


def _lines(file: TextIO, problems: Problems) -> Iterator[str]:
    while line := file.readline(_LINE):
        if len(line) < _LINE or line.endswith(("\n", "\r")):
            yield line
            continue
        problems[f"line longer than {_LINE} characters"] += 1
        while (more := file.readline(_LINE)) and not more.endswith("\n"):
            pass


def _count(problems: Problems, what: str, count: int) -> None:
    if count:
        problems[sys.intern(what)] += count
