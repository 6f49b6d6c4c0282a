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
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np

from msprobe_engine.core.io.safe_cells import plain_name
from msprobe_engine.formats.monitor.run_layout import open_file
from msprobe_engine.formats.monitor.series import Builder, Floats, Ids, Integers, Key, Part, Series, floats, integers, whole

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
INTERRUPTED = "interrupted"
"""The number of a step that was cut off: 1."""
_CHUNK = 20_000
_LINE = 4_000_000
"""Characters of the longest line that is read in one piece."""
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
    rows_of = _Rows(path.name, builder_of, problems)
    try:
        for header, rows in _chunks(path, problems):
            rows_of.add(header, rows)
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


class _Rows:
    """Rows of one file on their way to the builders: what their keys are is worked out once."""

    def __init__(self, name: str, builder_of: Callable[[str], Builder], problems: Problems) -> None:
        match = _V2_FILE.fullmatch(name)
        self._monitor = match[1] if match else ""
        self._family = "" if match else (families_of(name) or ("",))[0]
        self._builder_of = builder_of
        self._problems = problems
        self._keys = Ids()
        """The cells that make a key, to their number in this file."""
        self._homes: list[int] = []
        """Family of every key, as an index into `_families`; -1: the row is none."""
        self._numbers: list[int] = []
        """Number of every key in the builder of its family."""
        self._families = Ids()
        self._key_of: list[Key] = []
        self._kinds: set[tuple[int, str, str]] = set()

    def add(self, header: Sequence[str], rows: list[list[str]]) -> None:
        columns = dict(zip(reversed(header), reversed(list(zip(*rows)))))  # of two columns with one name the first counts
        name = "name" if "name" in columns else "module_name"
        if name not in columns or "step" not in columns or (self._monitor and "scope" not in columns):
            self._problems["header without name and step"] += 1
            return
        steps, good = integers(columns["step"])
        _count(self._problems, "row whose step is no whole number", int((~good).sum()))
        nothing = ("",) * len(rows)
        detail = {"opt_state": "state", "other": "tag"}.get(self._family, "")
        parts = [columns.get(word, nothing) for word in ("vpp_stage", name, "micro_step", "phase", detail, "scope")]
        ids = np.fromiter(map(self._keys.__getitem__, zip(*parts)), np.int64, len(rows))
        for cells in islice(self._keys, len(self._homes), None):
            self._place(*cells)
        values = {}
        for op in header:
            if op not in _NOT_NUMBERS and op not in values:
                values[op], wrong = floats(columns[op])
                _count(self._problems, f"cell of {op} that is no number", wrong)
        if "shape" in columns or "dtype" in columns:
            self._add_kinds(ids.tolist(), columns.get("shape", nothing), columns.get("dtype", nothing))
        homes = np.array(self._homes)[ids]
        homes[~good] = -1
        _count(self._problems, "row whose vpp_stage, micro_step or scope is unknown", int((homes[good] < 0).sum()))
        numbers = np.array(self._numbers)[ids]
        for family, home in self._families.items():
            mine = homes == home
            if mine.all():
                self._builder_of(family).add(Part(numbers, steps, values), self)
            elif mine.any():
                self._builder_of(family).add(Part(numbers[mine], steps[mine], {op: v[mine] for op, v in values.items()}), self)

    def _add_kinds(self, ids: list[int], shapes: Sequence[str], dtypes: Sequence[str]) -> None:
        new = set(zip(ids, shapes, dtypes)) - self._kinds
        self._kinds |= new
        names = {home: family for family, home in self._families.items()}
        for i, shape, dtype in new:
            if self._homes[i] >= 0 and (shape or dtype):
                builder = self._builder_of(names[self._homes[i]])
                builder.add_kind(self._key_of[i], shape, dtype)

    def _place(self, vpp: str, name: str, micro: str, phase: str, detail: str, scope: str) -> None:
        family = _V2_FAMILIES.get((self._monitor, scope), "") if self._monitor else self._family
        stage, micro_step = _stage(vpp), whole(micro) if micro != "" else -1
        if not family or stage is None or micro_step is None:
            self._homes.append(-1)
            self._numbers.append(-1)
            self._key_of.append(Key(0, ""))
            return
        key = Key(stage, plain_name(name), micro_step, phase, detail)
        self._homes.append(self._families[family])
        self._numbers.append(self._builder_of(family).keys[key])
        self._key_of.append(key)


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
        # A longer line comes in pieces, none of which is a row.
        reader = csv.reader(iter(partial(text.readline, _LINE), ""))
        header = (_rows(reader, 1, problems) or [[]])[0]
        if not 2 <= len(header) <= _WIDTH:
            if size:
                problems["no header"] += 1
            return
        chunk = _rows(reader, _CHUNK, problems)
        while chunk:
            following = _rows(reader, _CHUNK, problems)
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


def _rows(reader: Iterator[list[str]], count: int, problems: Problems) -> list[list[str]]:
    """The next rows, at most `count`; fewer only at the end."""
    rows: list[list[str]] = []
    while len(rows) < count:
        try:
            before = len(rows)
            rows.extend(islice(reader, count - before))  # keeps what came before an error
            if len(rows) < count:
                return rows
        except csv.Error as error:  # a field without end, NUL: the reader goes on with the next line
            problems[f"line that is no CSV ({error})"] += 1
    return rows


def _count(problems: Problems, what: str, count: int) -> None:
    if count:
        problems[sys.intern(what)] += count
