"""Tables that give every tensor or statistic of a kernel dump the source lines its operator comes from.

``code_mapping_{time}.csv`` has the existing tool's columns ``File Path, Code Stack, Scope Name``, a row per tensor file, in order of
execution. A ``statistic.csv`` is copied with ``Code Stack, Scope Name`` behind its own columns; 8.1.1 writes into the user's file instead.

From the name of an operator in a kernel dump to the nodes of the graph that it is.

A dump has the full name of a node with ``_`` for ``/``. Names of kernels that a device has changed contain it; ``Add-op1`` is not part of
``Add-op10``. Graphs that were written before their nodes had names are looked up by path and kind of operator.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from msprobe_engine.core.errors import DumpFormatError, UsageError
from msprobe_engine.core.io.output_files import guard_writing
from msprobe_engine.core.io.regular_files import make_directories
from msprobe_engine.core.io.safe_cells import plain_name, safe_cell, utf8
from msprobe_engine.formats.tensors.kernel_files import (
    MAPPING,
    STATISTIC,
    KernelFile,
    in_order,
    kernel_directories,
    kernel_files,
    parse_name,
    read_mapping,
    read_rows,
)
from msprobe_engine.report.code_mapping.ir import Node, read_nodes
from msprobe_engine.report.table_files.tablefile import TableFile

COLUMNS = ("File Path", "Code Stack", "Scope Name")
TRACES = "trace_code_graph_"
"""MindSpore's own name of the graphs it runs, written last."""
_NUMBER = re.compile(r"[+-]?(?:\d{1,40}(?:\.\d{0,40})?(?:[eE][+-]?\d{1,5})?|inf|nan)", re.ASCII)
_LONGEST_CELL = 32_000
"""A spreadsheet takes 32,767 characters."""


@dataclass
class Mapped:
    """What came of it.

    Attributes:
        graphs: IR files that were read.
        rows: of all tables.
        located: rows with source lines of the operator itself.
        near: rows with lines of something near, which the first line says.
        without: rows whose operator is in the graph without any line.
        parameters: rows that are no operator's.
        unknown: operators that no graph knows, each once.
        notes: sentences about what was left out.
    """

    files: list[Path] = field(default_factory=list)
    graphs: list[Path] = field(default_factory=list)
    rows: int = 0
    located: int = 0
    near: int = 0
    without: int = 0
    parameters: int = 0
    unknown: dict[str, None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def text(self) -> str:
        """A few lines for the terminal."""
        lines = [f"{self.rows} rows: {self.located} with source lines, {self.near} with those of a neighbour in the graph"]
        if self.without:
            lines.append(f"{self.without} rows are of operators that the graph has no line for")
        if self.parameters:
            lines.append(f"{self.parameters} rows are parameters and inputs, which no line makes")
        if self.unknown:
            first = ", ".join(list(self.unknown)[:3])
            lines.append(
                f"{len(self.unknown)} operators are not in the graph ({first}{', ...' if len(self.unknown) > 3 else ''}); "
                f"{TRACES}* of the same run has all that ran"
            )
        return "\n".join([*lines, *(f"Written: {path}" for path in self.files)])


def map_code(ir: Sequence[Path], dump: Path, output: Path, in_place: bool = False) -> Mapped:
    """Map a dump to source lines.

    Args:
        ir: IR files of the run, or directories of them (then its ``trace_code_graph_*``).
        dump: a ``.npy`` file, a ``statistic.csv``, or a directory at any level above them.
        output: directory of the tables; made when it is not there.
        in_place: put the columns into ``statistic.csv`` itself, as 8.1.1 does.

    Raises:
        DumpFormatError: an input cannot be read, or nothing of the dump is in the graph.
        SinkError: a table cannot be written.
        UsageError: there is nothing at a path.
    """
    mapped = Mapped(graphs=_graphs(ir))
    lookup = Lookup(_all_nodes(mapped.graphs))
    tensors, tables = _data(dump, mapped)
    with guard_writing(output):
        make_directories(os.fspath(output))
    stamp = time.strftime("%Y%m%d%H%M%S")
    if tensors:
        _write(mapped, output / f"code_mapping_{stamp}.csv", (COLUMNS, *_tensor_rows(tensors, lookup, mapped)))
    for table in tables:
        rows = _statistic_rows(table, lookup, mapped)
        below = table.parent.relative_to(dump) if dump.is_dir() else Path()
        target = table if in_place else output / below / f"statistic_code_mapping_{stamp}.csv"
        make_directories(os.fspath(target.parent))
        _write(mapped, target, rows)
    if mapped.unknown and not mapped.located and not mapped.near:
        raise DumpFormatError(
            f"{', '.join(map(str, mapped.graphs))}: knows none of the {len(mapped.unknown)} operators of {dump}; give {TRACES}* of the run "
            "that wrote the dump (save_graphs=2), not of an earlier stage of the compiler or of another graph"
        )
    return mapped


def _graphs(given: Sequence[Path]) -> list[Path]:
    graphs: list[Path] = []
    for path in given:
        if path.is_dir():
            inside = sorted(entry for entry in path.rglob(f"{TRACES}*") if entry.is_file())
            if not inside:
                raise UsageError(f"{path}: has no file {TRACES}*; save_graphs=2 makes MindSpore write it. Or name an IR file")
            graphs += inside
        elif path.is_file():
            graphs.append(path)
        else:
            raise UsageError(f"{path}: there is no such file or directory; give an IR file that MindSpore wrote (save_graphs)")
    return graphs


def _all_nodes(graphs: Iterable[Path]) -> Iterator[Node]:
    for path in graphs:
        yield from read_nodes(path)


def _data(dump: Path, mapped: Mapped) -> tuple[list[tuple[Path, str, str]], list[Path]]:
    """Tensor files with op name and type, and statistic tables."""
    if dump.is_file():
        if dump.suffix == ".csv":
            return [], [dump]
        parsed = parse_name(dump, read_mapping(dump.parent / MAPPING).get(dump.stem)) if dump.suffix == ".npy" else None
        if parsed is None:
            raise UsageError(f"{dump}: is no tensor file of a kernel dump (type.name.task.stream.time.input.0...npy) and no {STATISTIC}")
        return [(dump, parsed.op_name, parsed.op_type)], []
    if not dump.is_dir():
        raise UsageError(f"{dump}: there is no such file or directory; give a .npy file, a {STATISTIC}, or a directory of a kernel dump")
    iterations: dict[tuple[str, int, str], list[KernelFile]] = {}
    tables: list[Path] = []
    for directory in kernel_directories(dump):
        files, others = kernel_files(directory)
        iterations.setdefault(_iteration(directory), []).extend(files)
        if others:
            mapped.notes.append(f"{directory}: {len(others)} .npy files are no kernel's ({others[0]}); left out")
        if (directory / STATISTIC).is_file():
            tables.append(directory / STATISTIC)
    tensors = [(file.path, file.op_name, file.op_type) for _, files in sorted(iterations.items()) for file in in_order(files)]
    if not tensors and not tables:
        raise UsageError(f"{dump}: has no tensor file of a kernel dump and no {STATISTIC} in it; give what MINDSPORE_DUMP_CONFIG wrote")
    return tensors, tables


def _iteration(directory: Path) -> tuple[str, int, str]:
    """What orders directories: the graphs of one iteration (``Net/{graph}/{iteration}``) run one among the other."""
    graph, number = directory.parent.name, directory.name
    if all(name.isascii() and name.isdecimal() and len(name) < 19 for name in (graph, number)):
        return str(directory.parent.parent), int(number), ""
    return str(directory.parent), -1, number


def _tensor_rows(tensors: Iterable[tuple[Path, str, str]], lookup: Lookup, found: Mapped) -> Iterator[Sequence[str]]:
    for path, name, kind in tensors:
        yield (os.fspath(path), *_cells(lookup.find(name, kind), name, kind, found))


def _statistic_rows(path: Path, lookup: Lookup, mapped: Mapped) -> Iterator[Sequence[str]]:
    """The table with two columns more. MindSpore ends rows with a comma that the header has not."""
    rows = read_rows(path)
    header = [cell.strip() for cell in next(rows, [])]
    names = [cell for cell in header if cell and cell not in COLUMNS[1:]]
    plain = {cell.lower(): number for number, cell in enumerate(header)}
    if "op name" not in plain:
        raise DumpFormatError(f"{path}: has no column 'Op Name' ({', '.join(header[:6])}); give the {STATISTIC} of a kernel dump")
    kept = [plain[name.lower()] for name in names]
    yield (*names, *COLUMNS[1:])
    for row in rows:
        row += [""] * (len(header) - len(row))
        name, kind = row[plain["op name"]], row[plain["op type"]] if "op type" in plain else ""
        yield (*(row[number] for number in kept), *_cells(lookup.find(name, kind), name, kind, mapped))


def _cells(nodes: Found, name: str, kind: str, mapped: Mapped) -> tuple[str, str]:
    """Code stack and scope; counts the row."""
    mapped.rows += 1
    if kind == "Parameter":
        mapped.parameters += 1
        return "", name
    if not nodes.nodes:
        mapped.unknown[name] = None
        return "", ""
    lines = [line for node in nodes.nodes for line in node.lines]
    own = any(node.has_source and not node.lines[0].startswith("No line") for node in nodes.nodes)
    mapped.located += own
    mapped.near += bool(lines) and not own
    mapped.without += not lines
    scopes = "\n".join(dict.fromkeys(node.scope for node in nodes.nodes))
    return "\n".join(lines)[:_LONGEST_CELL], scopes[:_LONGEST_CELL]


def _cell(text: str) -> str:
    """A negative number is no formula; a text that was made safe before is not made so twice."""
    return text if _NUMBER.fullmatch(text) else safe_cell(plain_name(utf8(text)))


def _write(found: Mapped, path: Path, rows: Iterable[Sequence[str]]) -> None:
    with guard_writing(path):
        file = TableFile(path)
    try:
        for row in rows:
            file.write((",".join(map(_cell, row)) + "\n").encode())
    except BaseException:
        file.abort()
        raise
    file.close()
    found.files.append(path)


_END = re.compile(r"-op\d+(?!\d)", re.ASCII)
_LONGEST_NAME = 4096
_MOST_STARTS = 512


class Found(NamedTuple):
    """The nodes of an operator, and whether its name is theirs (else it only contains it, or only path and kind are the same)."""

    nodes: tuple[Node, ...]
    exact: bool


class Lookup:
    """Nodes of one or more IR files of a program, by the names of a dump."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self._named: dict[str, list[Node]] = {}
        self._placed: dict[tuple[str, str], list[Node]] = {}
        for node in nodes:
            if not node.scope:
                continue
            key = node.scope.replace("/", "_")
            if node.named:
                self._named.setdefault(key, []).append(node)
            else:
                self._placed.setdefault((key, node.op), []).append(node)
        self._known: dict[tuple[str, str], Found] = {}

    def find(self, op_name: str, op_type: str = "") -> Found:
        """The nodes that `op_name` of a dump stands for, none when the graph does not know it.

        Args:
            op_name: as the dump has it, with ``_`` or ``/``.
            op_type: kind of operator (``MatMul``), for graphs without names.
        """
        key = (op_name, op_type)
        if key not in self._known:
            self._known[key] = self._find(op_name.replace("/", "_"), op_type)
        return self._known[key]

    def _find(self, name: str, op_type: str) -> Found:
        if name in self._named:
            return Found(_distinct(self._named[name]), True)
        inside = self._inside(name[:_LONGEST_NAME])
        if inside:
            return Found(_distinct(inside), False)
        path = name.rpartition("_")[0]
        return Found(_distinct(self._placed.get((path, op_type), ())), False)

    def _inside(self, name: str) -> list[Node]:
        """Nodes whose name is the longest part of this one: parts begin at the front or after a ``_`` or ``.``."""
        starts = [0, *(i + 1 for i, c in enumerate(name) if c in "_.")][:_MOST_STARTS]
        for start in starts:
            for end in reversed([match.end() for match in _END.finditer(name)][:_MOST_STARTS]):
                found = self._named.get(name[start:end])
                if found is not None:
                    return found
        return []


def _distinct(nodes: Iterable[Node]) -> tuple[Node, ...]:
    """One of those with the same name and the same lines; with lines first."""
    kept = {(node.scope, tuple(node.lines)): node for node in nodes}
    return tuple(sorted(kept.values(), key=lambda node: not node.lines))
