"""One side of a comparison that is a directory of tensor files of a MindSpore static graph, instead of a dump.json.

Kernels (`msprobe_engine.formats.tensors.kernel_files`) become records ``{op type}.{op name}.{n}.forward`` in order of execution; a kernel
that runs several times in an iteration counts them in n. Single points, files ``{name}_{dtype}_{number}.npy`` as ``TensorDump`` writes
them, become records ``{name}.{n}.debug``, where n counts the files of one name in the order of their numbers. Statistics are taken from
the files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from msprobe_engine.core.errors import DumpFormatError, UsageError
from msprobe_engine.core.statistics import host_kernel, rows
from msprobe_engine.formats.dump.dump_table import DumpTable
from msprobe_engine.formats.dump.record_rows import RowReader
from msprobe_engine.formats.tensors.blocks import open_file
from msprobe_engine.formats.tensors.kernel_files import STATISTIC, KernelFile, in_order, kernel_calls, kernel_files, read_rows
from msprobe_engine.formats.tensors.reader import NPY, TensorFiles, TensorSource

_POINT = re.compile(r"(.+)_([a-z]+[0-9]*(?:e[0-9]m[0-9][a-z]*)?)_([0-9]{1,18})\.npy", re.ASCII)
_BLOCK = 1 << 20
_STATISTICS = {"max": "max value", "min": "min value", "mean": "avg value", "norm": "l2norm value"}
_LEAF = {"type": "mindspore.Tensor", "requires_grad": None, "md5": None}
_STANDS_FOR = "*.npy"


class Point(NamedTuple):
    """A saved single point: its name, number and file."""

    name: str
    number: int
    path: Path


class _FilesOf(TensorFiles):
    """Tensor files by their names, wherever they lie."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.places: dict[str, Path] = {}

    def source(self, name: str) -> TensorSource:
        path = self.places.get(name)
        if path is None:
            raise UsageError(f"{self.directory.parent}: there is no tensor '{name[:200]}' here")
        return TensorSource(name, path, NPY, 0, path.stat().st_size)


ANY = "*"
"""In place of the directory of a graph: all graphs."""


def is_graph_side(path: Path) -> bool:
    """Directories are read as static-graph dumps, ``Net/*/7`` as iteration 7 of all graphs of ``Net``."""
    return path.is_dir() or (path.parent.name == ANY and path.parent.parent.is_dir())


def points_of(directory: Path) -> list[Point]:
    """Single points of a directory, in the order of their numbers; files with other names are none."""
    found = [
        Point(match[1], int(match[3]), Path(entry.path))
        for entry in os.scandir(directory)
        if os.path.isfile(entry.path) and (match := _POINT.fullmatch(entry.name))
    ]
    return sorted(found, key=lambda point: (point.number, point.name))


def read_graph_side(directory: Path) -> DumpTable:
    """The kernels of one iteration, or the single points, of a directory (see `is_graph_side`).

    Raises:
        DumpFormatError: there is neither, or ``statistic.csv`` or ``mapping.csv`` is damaged.
    """
    where = [directory] if directory.name == ANY or directory.parent.name != ANY else _of_all_graphs(directory)
    side = DumpTable(directory / _STANDS_FOR)
    side.files = _FilesOf(directory)
    side.header = {"task": "tensor", "level": "L2", "framework": "mindspore"}
    reader = RowReader(side)
    kernels = in_order(file for path in where for file in kernel_files(path)[0])
    tables = [path / STATISTIC for path in where if (path / STATISTIC).is_file()]
    if kernels:
        for name, record, files in _calls(kernels):
            _add(side, reader, name, record, files)
    elif tables:
        side.path = directory / STATISTIC
        side.header["task"] = "statistics"
        for name, record in _statistics(tables):
            reader.record(name, record)
    elif len(where) == 1 and (points := points_of(directory)):
        side.header["level"] = "debug"
        counts: dict[str, int] = {}
        for point in points:
            number = counts[point.name] = counts.get(point.name, -1) + 1
            _add(side, reader, f"{point.name}.{number}.debug", None, [point.path])
    else:
        raise DumpFormatError(f"{directory}: has no tensor file of a MindSpore graph in it")
    return side


def _of_all_graphs(pattern: Path) -> list[Path]:
    return sorted(graph / pattern.name for graph in pattern.parent.parent.iterdir() if (graph / pattern.name).is_dir())


_Record = dict[str, list[Any]]


def _calls(kernels: list[KernelFile]) -> Iterator[tuple[str, _Record, list[Path]]]:
    """Records with the files of their rows, inputs first."""
    for call in kernel_calls(kernels):
        sections = (("input_args", call.inputs), ("output", call.outputs))
        record: _Record = {section: [file and file.path for file in files] for section, files in sections if files}
        yield call.name, record, [path for paths in record.values() for path in paths if path is not None]


def _add(side: DumpTable, reader: RowReader, name: str, record: _Record | None, files: list[Path]) -> None:
    """A record, and which file each of its rows is; `record` None: one row of the record's own name."""
    first = len(side)
    leaves = {path: _leaf(side, path) for path in files}
    files = [path for path in files if leaves[path] is not None]
    if record is None:
        reader.record(name, next(iter(leaves.values())))
    else:
        reader.record(name, {section: [leaves.get(path) for path in paths] for section, paths in record.items()})
    filled = iter(files)
    for row in range(first, len(side)):
        if side.dtype[row] is not None:
            path = next(filled)
            side.data_name[row] = path.name
            side.files.places[path.name] = path  # type: ignore[attr-defined]


def _leaf(side: DumpTable, path: Path) -> dict[str, Any] | None:
    """What dump.json would have of the tensor; None with a problem when the file cannot be read."""
    try:
        with open_file(path) as tensor:
            row = rows.empty(1)
            memory = bytearray()
            for start in range(0, tensor.size, _BLOCK):
                part = rows.empty(1)
                host_kernel.reduce_into(part, 0, np.asarray(tensor.read(start, min(_BLOCK, tensor.size - start), memory)), index0=start)
                row = rows.merge(row, part)
            found = rows.read_row(row[0])
            leaf: dict[str, Any] = {**_LEAF, "dtype": _dtype(tensor.dtype, path.name), "shape": list(tensor.shape)}
    except DumpFormatError as error:
        side.add_problem(f"{error}. Compared without it")
        return None
    leaf |= {"Max": found.max, "Min": found.min, "Mean": found.mean, "Norm": found.norm}
    return leaf | {"nan_count": found.nans, "inf_count": found.infs} if found.nonfinite else leaf


def _dtype(name: str, file: str = "") -> str:
    """As MindSpore prints a type: ``Float32``. A file of bfloat16 holds float32, and only its name says it."""
    if name == "bfloat16" or (name == "float32" and "bfloat16" in file.lower()):
        return "BFloat16"
    return name[:1].upper() + name[1:]


def _table(path: Path) -> Iterator[dict[str, str]]:
    """Rows by column, in lower case; `Input/Output` of later versions is `io`."""
    lines = read_rows(path)
    header = [cell.strip().lower().replace("input/output", "io") for cell in next(lines, [])]
    missing = [name for name in ("op type", "op name", "io", "slot") if name not in header]
    if missing:
        raise DumpFormatError(f"{path}: has no column {', '.join(missing)}; give the {STATISTIC} of a kernel dump of MindSpore")
    for cells in lines:
        yield dict(zip(header, (cell.strip() for cell in cells)))


def _statistics(tables: Iterable[Path]) -> Iterator[tuple[str, _Record]]:
    calls: dict[str, _Record] = {}
    again: dict[tuple[str, ...], int] = {}
    for row in (row for path in tables for row in _table(path)):
        kind, name, place, slot = (row.get(key, "") for key in ("op type", "op name", "io", "slot"))
        key = (kind, name.replace("/", "_"), place, slot)
        number = again[key] = again.get(key, -1) + 1
        record = calls.setdefault(f"{kind}.{key[1]}.{number}.forward", {"input_args": [], "output": []})
        section = record["output" if place == "output" else "input_args"]
        at = int(slot) if slot.isascii() and slot.isdecimal() and len(slot) < 5 else len(section)
        section.extend([None] * (at + 1 - len(section)))
        section[at] = _statistic_leaf(row)
    yield from calls.items()


def _statistic_leaf(row: dict[str, str]) -> dict[str, Any]:
    leaf: dict[str, Any] = {**_LEAF, "dtype": _dtype(row.get("data type", "")) or "unknown"}
    shape = row.get("shape", "").strip("()[] ")
    sizes = [part.strip() for part in shape.split(",") if part.strip()]
    leaf["shape"] = (
        [int(part) for part in sizes] if all(part.isascii() and part.isdecimal() and len(part) < 19 for part in sizes) else shape
    )
    for key, column in _STATISTICS.items():
        leaf[key.capitalize()] = _number(row.get(column, ""))
    if row.get("md5"):
        leaf["md5"] = row["md5"]
    for key, columns in (("nan_count", ("nan count",)), ("inf_count", ("negative inf count", "positive inf count"))):
        count = sum(int(number) for column in columns if (number := _number(row.get(column, ""))) is not None and number == number)
        if 0 < count < 1 << 62:
            leaf[key] = count
    return leaf


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return {"true": 1.0, "false": 0.0}.get(text.lower())
