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
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.io.safe_cells import plain_name
from msprobe_engine.formats.monitor import run_layout
from msprobe_engine.formats.monitor.losses import FILE as LOSSES
from msprobe_engine.formats.monitor.losses import read_losses
from msprobe_engine.formats.monitor.reader_json import CUT, read_alerts
from msprobe_engine.formats.monitor.run_layout import (
    Launch,
    RankDirectory,
    describe_skipped_launch,
    launch_of,
    of_other_runs,
    open_file,
    scan,
)
from msprobe_engine.formats.monitor.series import (
    EMPTY,
    Builder,
    Floats,
    Ids,
    Integers,
    Key,
    Part,
    Series,
    Table,
    floats,
    integers,
    whole,
)  # fmt: skip

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
    "vpp_stage", "name", "module_name", "step", "micro_step", "phase", "state", "tag", "scope", "shape", "dtype", "digest", "id",
)  # fmt: skip
ALERTS_FILE, SCALARS = "alerts.jsonl", "scalars"
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
                own_rows = (ids == i) & good
                into.setdefault(plain_name(name), []).append((steps[own_rows], values[own_rows]))
    except OSError as error:
        problems[f"cannot be read: {error.strerror or error}"] += 1
    return problems


def merge_series(parts: Sequence[tuple[Integers, Floats]]) -> Series:
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
            in_family = homes == home
            if in_family.all():
                self._builder_of(family).add(Part(numbers, steps, values), self)
            elif in_family.any():
                self._builder_of(family).add(
                    Part(numbers[in_family], steps[in_family], {op: column[in_family] for op, column in values.items()}), self
                )

    def _add_kinds(self, ids: list[int], shapes: Sequence[str], dtypes: Sequence[str]) -> None:
        new = [kind for kind in dict.fromkeys(zip(ids, shapes, dtypes)) if kind not in self._kinds]  # in the order of the file
        self._kinds.update(new)
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


class CsvSource:
    """CSV directories, several per rank after a resume: later ones replace what they write again."""

    def __init__(self, directories: Sequence[RankDirectory]) -> None:
        self.problems: dict[str, Problems] = {}
        self._directories: dict[int, list[RankDirectory]] = {}
        for directory in sorted(directories, key=lambda d: (d.began, d.path.name)):
            self._directories.setdefault(directory.rank, []).append(directory)
            if not directory.info and os.path.lexists(file := directory.path / run_layout.RUN_FILE):
                self.problems[str(file)] = Counter(["no object of JSON that can be used"])
        self._files: dict[int, list[Path]] = {}
        self._others: dict[int, list[Launch]] = {}
        for rank, of_rank in self._directories.items():
            if len(of_rank) > 1:
                self._directories[rank] = self._of_one_run(rank, of_rank)

    def _of_one_run(self, rank: int, of_rank: list[RankDirectory]) -> list[RankDirectory]:
        """Without directories of other runs."""
        launches = [launch_of(directory.info) for directory in of_rank]
        others = of_other_runs(launches)
        for other, directory in zip(others, of_rank):
            self.problems[str(directory.path)] = Counter([describe_skipped_launch(other, launches[-1])])
        self._others[rank] = others
        return of_rank[len(others) :]

    def other_runs(self, rank: int) -> list[Launch]:
        return self._others.get(rank, [])

    def ranks(self) -> list[int]:
        return sorted(self._directories)

    def info(self, rank: int) -> dict[str, Any]:
        return next((dict(d.info) for d in reversed(self._directories.get(rank, [])) if d.info), {})

    def paths(self, rank: int) -> list[Path]:
        return [d.path for d in self._directories.get(rank, [])]

    def families(self, rank: int) -> list[str]:
        found = dict.fromkeys(family for path in self._list(rank) for family in families_of(path.name))
        found.pop(SCALARS, None)
        # What a file of the second monitor holds is known when it has been read.
        return [family for family in found if not self._shares_file(rank, family) or len(self.read(rank, family).get(family, EMPTY).ids)]

    def read(self, rank: int, family: str) -> dict[str, Table]:
        builders: dict[str, Builder] = {}
        for path in self._list(rank):
            if family in families_of(path.name):
                self._add_problems(path, read_tables(path, lambda home: builders.setdefault(home, Builder(home))))
        return {home: builder.table() for home, builder in builders.items() if home == family or not self._has_other_files(rank, home)}

    def scalars(self, rank: int) -> dict[str, Series]:
        found: dict[str, list[tuple[Integers, Floats]]] = {}
        for path in self._list(rank):
            if families_of(path.name) == (SCALARS,):
                read: dict[str, list[tuple[Integers, Floats]]] = {}
                self._add_problems(path, read_scalars(path, read))
                if INTERRUPTED in found:  # a step that was done again after a resume was not cut off
                    again = np.concatenate([steps for parts in read.values() for steps, _ in parts] or [EMPTY.steps])
                    kept = [(steps, values, ~np.isin(steps, again)) for steps, values in found[INTERRUPTED]]
                    found[INTERRUPTED] = [(steps[keep], values[keep]) for steps, values, keep in kept]
                for name, parts in read.items():
                    found.setdefault(name, []).extend(parts)
        return {name: merge_series(parts) for name, parts in found.items()}

    def alerts(self, rank: int) -> list[dict[str, Any]]:
        out: list[dict[str, Any]] = []
        for directory in self._directories.get(rank, []):
            path = directory.path / ALERTS_FILE
            problems: Problems = Counter()
            found = read_alerts(path, problems) if os.path.lexists(path) else []
            kept = read_losses(directory.path / LOSSES)
            counts = {run_layout.RUN_FILE: directory.info.get("alerts"), LOSSES: 0 if kept is None else kept.alerts}
            file, raised = max(((name, n) for name, n in counts.items() if isinstance(n, int)), key=lambda one: one[1])
            damaged = sum(count for what, count in problems.items() if what != CUT)
            if len(found) + damaged < raised:
                problems[f"{len(found)} alerts are in it, and {file} says that {raised} were raised"] += 1
            self._add_problems(path, problems)
            out += found
        return out

    def _shares_file(self, rank: int, family: str) -> bool:
        return any(family in families_of(p.name) and len(families_of(p.name)) > 1 for p in self._list(rank))

    def _has_other_files(self, rank: int, family: str) -> bool:
        # Files of other names hold this family, too: it is not complete yet.
        return len({families_of(p.name) for p in self._list(rank) if family in families_of(p.name)}) > 1

    def _list(self, rank: int) -> list[Path]:
        if rank not in self._files:
            files: list[Path] = []
            for directory in self._directories.get(rank, []):
                try:
                    entries = scan(directory.path)
                except UsageError as error:
                    self.problems[str(directory.path)] = Counter([str(error)])
                    continue
                own_files = [Path(each.path) for each in entries if families_of(each.name) and each.is_file(follow_symlinks=False)]
                for entry in entries:
                    if families_of(entry.name) and not entry.is_file(follow_symlinks=False):
                        self.problems[entry.path] = Counter(["is no regular file (links are not followed)"])
                files += sorted(own_files, key=lambda path: (first_step(path.name), path.name))
            self._files[rank] = files
        return self._files[rank]

    def _add_problems(self, path: Path, problems: Mapping[str, int]) -> None:
        if problems:
            self.problems[str(path)] = Counter(problems)
