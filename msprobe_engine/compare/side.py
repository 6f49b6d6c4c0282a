"""One side of a comparison: the dump of one rank in one step, as columns with one row per tensor or argument.

Row names, and what the tables show of arguments that are no tensors, are those of the existing tool (`docs/compare.md` lists them).
A row costs some two hundred bytes, so a million of them fit into a few hundred megabytes; the tree of objects of the file never
exists whole.
"""

from __future__ import annotations

import math
import os
import zlib
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from msprobe_engine.dump import layout
from msprobe_engine.dump.reader import collection_paused, parse_json, read_bytes
from msprobe_engine.dump.stream import open_records
from msprobe_engine.dump.tensor_reader import TensorFiles
from msprobe_engine.errors import DumpFormatError

INPUT, PARAMETERS, OUTPUT, PARAMETERS_GRAD, DEBUG = range(5)
"""Roles of a row. Keyword arguments are inputs; the gradients that enter a backward call too."""

STATISTICS, MD5, DIGEST, TENSOR, STRUCTURE = "statistics", "md5", "digest", "tensor", "structure"
"""What a dump can be compared by. `DIGEST` is this tool's own: 64 bits per tensor in place of statistics."""

_SECTIONS = {"input_args": INPUT, "input_kwargs": INPUT, "input": INPUT, "parameters": PARAMETERS, "output": OUTPUT}
_ORDER = ("input_args", "input_kwargs", "input", "parameters", "output")
_PLACES = {"input_args": ".input", "input_kwargs": ".input", "input": ".input", "parameters": ".parameters", "output": ".output"}
_RANKS = frozenset(("src", "dst", "group_src", "group_dst"))
_FLOAT, _INT = float, int
_COMMUNICATION = ("Distributed.", "MintDistributed.")
_DEEPEST = 100
_LONGEST_SHAPE = 1000
"""Characters of a shape that is text."""

Value = float | int | str | bool | None


@dataclass
class Side:
    """Columns of one rank of one step. All lists have one item per row, in the order of the tables: within a record inputs,
    parameters, outputs; records in the order of the file.

    Attributes:
        path: the dump.json (debug.json).
        header: the file's keys but its data.
        ops: record names.
        tags: further keys of records (``tags``, ``is_recompute``, ...), by record index; only of those that have some.
        first: first row of each record, and the number of rows at the end; a record without rows has an empty range.
        op: index of the row's record.
        role: `INPUT` ... `DEBUG`, one byte each.
        name: row name.
        dtype, shape: as the tables show them; a shape is a list of integers, or text; None of a row without a value.
        stats: float64 (rows, 4): Max, Min, Mean, Norm; NaN where there is no float, then `odd` has the row.
        odd: row -> the four values as the file has them, where not all four are floats.
        md5: checksum in the file, or None; of arguments that are no tensors `checksum` makes one.
        requires_grad: True, False, None.
        data_name: name of the saved tensor, "" when there is none.
        nans, infs: row -> count, where the file has one above 0.
        values: row -> value of an argument that is no tensor.
        facts: row -> further keys (``digest``, ``full_shape``, peer of a P2POp, placements, ...).
        collectives: record index -> the record as the file has it, of communication calls; their arguments tell which belong together.
        recovered: read from the frame log of a process that was killed.
        problems: sentences about what of this rank could not be read, while the rows could; the tools show them and end with 3.
    """

    path: Path
    header: dict[str, Any] = field(default_factory=dict)
    ops: list[str] = field(default_factory=list)
    tags: dict[int, dict[str, Any]] = field(default_factory=dict)
    first: array[int] = field(default_factory=lambda: array("q", [0]))
    op: array[int] = field(default_factory=lambda: array("q"))
    role: bytearray = field(default_factory=bytearray)
    name: list[str] = field(default_factory=list)
    dtype: list[str | None] = field(default_factory=list)
    shape: list[Any] = field(default_factory=list)
    numbers: array[float] = field(default_factory=lambda: array("d"))
    odd: dict[int, tuple[Value, Value, Value, Value]] = field(default_factory=dict)
    md5: list[str | None] = field(default_factory=list)
    requires_grad: list[bool | None] = field(default_factory=list)
    data_name: list[str] = field(default_factory=list)
    nans: dict[int, int] = field(default_factory=dict)
    infs: dict[int, int] = field(default_factory=dict)
    values: dict[int, Any] = field(default_factory=dict)
    facts: dict[int, dict[str, Any]] = field(default_factory=dict)
    collectives: dict[int, dict[str, Any]] = field(default_factory=dict)
    recovered: bool = False
    problems: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.name)

    @property
    def stats(self) -> npt.NDArray[np.float64]:
        """float64 (rows, 4); see the attributes."""
        return np.frombuffer(self.numbers, np.float64).reshape(-1, 4)

    @property
    def framework(self) -> str:
        """``pytorch``, ``mindspore``, ``mindtorch``; ``pytorch`` when the file does not say, as the existing tool takes it."""
        return str(self.header.get("framework") or "pytorch")

    @property
    def task(self) -> str:
        """``statistics``, ``tensor``, ``structure``, ..."""
        return str(self.header.get("task") or "statistics")

    @cached_property
    def mode(self) -> str:
        """What the rows can be compared by: `STATISTICS`, `MD5`, `DIGEST`, `TENSOR` or `STRUCTURE`."""
        if self.task == "tensor":
            return TENSOR
        if self.task == "structure":
            return STRUCTURE
        if any(md5 and row not in self.values for row, md5 in enumerate(self.md5)):  # of a group it is our own text
            return MD5
        return DIGEST if any("digest" in fact for fact in self.facts.values()) else STATISTICS

    def rows(self, op: int) -> range:
        """Rows of a record."""
        return range(self.first[op], self.first[op + 1])

    def four(self, row: int) -> tuple[Value, Value, Value, Value]:
        """Max, Min, Mean, Norm of a row as the file has them; of an argument that is no tensor its value, four times."""
        found = self.odd.get(row)
        if found is not None:
            return found
        a, b, c, d = self.numbers[4 * row : 4 * row + 4]
        return a, b, c, d

    def checksum(self, row: int) -> str:
        """The md5 column: of a tensor what the file has, of an argument that is no tensor the CRC-32 of its value's text (8.1.1)."""
        return self.md5[row] or f"{zlib.crc32(str(self.values.get(row, '')).encode()):08x}"

    @cached_property
    def stacks(self) -> dict[str, list[str]]:
        """Record name -> call stack lines, innermost first; both layouts of stack.json. Empty without the file, or when it is damaged,
        which `problems` says."""
        found: dict[str, list[str]] = {}
        for key, value in self._beside(layout.STACK).items():
            if isinstance(value, list) and len(value) == 2 and isinstance(value[0], list):
                lines = value[1] if isinstance(value[1], list) else [value[1]]
                found.update((str(name), lines) for name in value[0])
            elif isinstance(value, list):
                found[key] = value
        return found

    @cached_property
    def construct(self) -> dict[str, Any]:
        """construct.json as it is: record -> parent, None, or [parent, micro step]. Empty without the file, or when it is damaged, which
        `problems` says."""
        return self._beside(layout.CONSTRUCT)

    def parent(self, op: str) -> str | None:
        """The record that encloses this one; None at the top or when not known."""
        node = self.construct.get(op)
        if isinstance(node, list):
            node = node[0] if node else None
        return node if isinstance(node, str) and node else None

    @cached_property
    def files(self) -> TensorFiles:
        """The saved tensors, by `data_name`."""
        return TensorFiles(self.path.parent)

    def _beside(self, name: str) -> dict[str, Any]:
        file = self.path.parent / name
        if not os.path.lexists(file):
            return {}
        try:
            document = parse_json(read_bytes(file), file)
            if isinstance(document, dict):
                return document
            raise DumpFormatError(f"{file}: holds a {type(document).__name__}; a JSON object is needed")
        except FileNotFoundError:
            self.say(f"{file}: is a link to nothing; compared without it")
        except DumpFormatError as error:
            self.say(f"{error}. Compared without it")
        return {}

    def say(self, problem: str) -> None:
        """Add to `problems`, once."""
        if problem not in self.problems:
            self.problems.append(problem)


def read_side(path: Path | str) -> Side:
    """Read one ``dump.json`` or ``debug.json`` (or what a killed process left of it).

    Raises:
        DumpFormatError: the file is damaged, or is none; what and where is said.
    """
    side = Side(Path(path))
    with collection_paused(), open_records(side.path) as records:
        reader = _Reader(side)
        for block in records:
            for name, record in block.items():
                reader.record(name, record)
        side.header = records.header
        side.recovered = records.recovered
    _say_damage(side, reader, records.repeated)
    return side


def side_of(path: Path, document: Mapping[str, Any], recovered: bool = False) -> Side:
    """As `read_side`, of a file that was read already."""
    side = Side(path, {key: value for key, value in document.items() if key != "data"}, recovered=recovered)
    reader = _Reader(side)
    for name, record in document["data"].items():
        reader.record(name, record)
    _say_damage(side, reader, 0)
    return side


def _say_damage(side: Side, reader: _Reader, repeated: int) -> None:
    if reader.left_out:
        side.say(f"{side.path}: {reader.left_out:,} records or values are damaged and left out, the first is {reader.first_left_out}")
    repeated += len(side.ops) - len(set(side.ops))
    if repeated:
        side.say(f"{side.path}: {repeated:,} records stand more than once under one name; of those close together the last counts")
    if not side.recovered and (side.path.parent / layout.MARKER).exists():
        side.say(f"{side.path}: the run ended before this step was whole, or still writes it; records may be missing")


class _Reader:
    """Appends records to the columns. Equal names of dtypes and equal shapes are one object."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self._texts: dict[Any, Any] = {}
        self._at = 0
        self.left_out = 0
        self.first_left_out = ""

    def record(self, name: str, record: Any) -> None:
        side = self._side
        self._at = len(side.ops)
        side.ops.append(name)
        if name.endswith(".debug"):
            self._walk(name, record, DEBUG, 0, False)
        elif not isinstance(record, dict):
            self._leave_out(f"{name[:120]!r}, which is a {type(record).__name__} and must be a JSON object")
        elif _is_gradients(name):
            for key, value in record.items():
                if isinstance(value, (list, dict)):
                    self._walk(f"{name}.{key}", value, PARAMETERS_GRAD, 0, True)
        else:
            for section in _ORDER:
                if section in record:
                    self._walk(name + _PLACES[section], record[section], _SECTIONS[section], 0, False)
            if name.startswith(_COMMUNICATION):
                side.collectives[self._at] = record
            extra = {key: value for key, value in record.items() if key not in _SECTIONS}
            if extra:
                side.tags[self._at] = extra
        side.first.append(len(side.name))

    def _walk(self, name: str, node: Any, role: int, depth: int, flat: bool) -> None:
        """`flat`: list positions do not show in row names (parameter gradients are wrapped in a list each)."""
        if node is None:
            self._row(name, role, None, None, (None, None, None, None), None, None, "")
        elif type(node) is dict:
            kind = node.get("type")
            if type(kind) is str:
                self._leaf(name, node, kind, role)
            elif node.get("class_type") == "torch.distributed.P2POp":
                self._peer(name, node, role)
            elif depth > _DEEPEST:
                self._leave_out(f"{name[:120]!r}, which is nested deeper than {_DEEPEST}")
            else:
                for key, child in node.items():
                    self._walk(f"{name}.{key}", child, role, depth + 1, flat)
        elif depth > _DEEPEST:
            self._leave_out(f"{name[:120]!r}, which is nested deeper than {_DEEPEST}")
        elif type(node) is list:
            for index, child in enumerate(node):
                if type(child) is dict and len(child) == 8 and self._tensor(name if flat else f"{name}.{index}", child, role):
                    continue
                if type(child) is not dict and type(child) is not list and child is not None:
                    self._leave_out(f"{name[:120]!r}, item {index}, which is {str(child)[:40]!r} and must be an object, a list or null")
                self._walk(name if flat else f"{name}.{index}", child, role, depth + 1, flat)

    def _leave_out(self, what: str) -> None:
        self.left_out += 1
        self.first_left_out = self.first_left_out or what

    def _peer(self, name: str, node: Mapping[str, Any], role: int) -> None:
        """One operation of ``batch_isend_irecv``: its tensor, with the peer among the facts."""
        tensor = node.get("tensor")
        row = len(self._side.name)
        if isinstance(tensor, dict) and isinstance(tensor.get("type"), str):
            self._leaf(name, tensor, tensor["type"], role)
        else:
            self._row(name, role, None, None, (None, None, None, None), None, None, "")
        self._side.facts.setdefault(row, {}).update({key: node.get(key) for key in ("class_type", "op", "peer", "tag", "group_id")})

    def _leaf(self, name: str, node: Mapping[str, Any], kind: str, role: int) -> None:
        get = node.get
        dtype = get("dtype")
        data_name = get("data_name") or ""
        if type(data_name) is not str or data_name == "-1":
            data_name = ""
        if data_name:
            name = data_name.rpartition(".")[0]
        if not dtype:
            self._argument(name, node, kind, role, data_name)
            return
        grad = get("requires_grad")
        md5 = get("md5")
        four = (get("Max"), get("Min"), get("Mean"), get("Norm"))
        row = self._row(
            name, role, str(dtype), get("shape"), four, None if md5 is None else str(md5), grad if type(grad) is bool else None, data_name
        )
        if len(node) > 8:
            self._facts(row, node)

    def _tensor(self, name: str, node: Mapping[str, Any], role: int) -> bool:
        """A tensor with statistics and nothing else, which nearly all nodes are: as `_leaf`, in less time. False: it is not."""
        try:
            kind, dtype, shape, a, b, c, d, grad = _PLAIN(node)
            known = self._texts[tuple(shape)]
        except (KeyError, TypeError):
            return False
        if not (type(a) is type(b) is type(c) is type(d) is _FLOAT and type(kind) is type(dtype) is str and dtype and type(shape) is list):
            return False
        side = self._side
        side.name.append(name)
        side.op.append(self._at)
        side.role.append(role)
        side.dtype.append(self._texts.setdefault(dtype, dtype))
        side.shape.append(known)
        side.numbers.extend((a, b, c, d))
        side.md5.append(None)
        side.requires_grad.append(grad if type(grad) is bool else None)
        side.data_name.append("")
        return True

    def _facts(self, row: int, node: Mapping[str, Any]) -> None:
        side = self._side
        facts = {key: value for key, value in node.items() if key not in _COMMON}
        if not facts:
            return
        for key, counts in (("nan_count", side.nans), ("inf_count", side.infs)):
            count = facts.pop(key, 0)
            if type(count) is int and count > 0:
                counts[row] = count
        if facts:
            side.facts[row] = facts

    def _argument(self, name: str, node: Mapping[str, Any], kind: str, role: int, data_name: str) -> None:
        """An argument that is no tensor: the value stands in place of all four statistics."""
        value = node.get("value")
        shape: Any = []
        dtype, shown, md5 = kind, value, node.get("md5")
        if kind == "torch.Size":
            shape, shown = str(value), None
        elif kind == "slice":
            shape, shown = str(np.shape(np.array(value, dtype=object))), None
        elif kind == "ellipsis":
            pass
        elif name.rpartition(".")[2] in _RANKS:
            shown = md5 = str(value)
        elif kind == "torch.ProcessGroup":
            value = shown = md5 = str(node.get("group_ranks"))
        else:
            dtype = str(type(value))
        row = self._row(name, role, dtype, shape, (shown, shown, shown, shown), None if md5 is None else str(md5), None, data_name)
        self._side.values[row] = value
        if kind == "torch.ProcessGroup":
            self._side.facts[row] = dict(node)

    def _row(
        self,
        name: str,
        role: int,
        dtype: str | None,
        shape: Any,
        four: tuple[Value, ...],
        md5: str | None,
        grad: bool | None,
        data_name: str,
    ) -> int:
        side = self._side
        row = len(side.name)
        side.name.append(name)
        side.op.append(self._at)
        side.role.append(role)
        texts = self._texts
        side.dtype.append(texts.setdefault(dtype, dtype))
        key = tuple(shape) if type(shape) is list else shape
        try:
            known = texts[key]
        except KeyError:
            known = texts[key] = _plausible(shape)
        except TypeError:  # lists in the list
            known = str(shape)[:_LONGEST_SHAPE]
        side.shape.append(known)
        a, b, c, d = four
        if type(a) is _FLOAT and type(b) is _FLOAT and type(c) is _FLOAT and type(d) is _FLOAT:
            side.numbers.extend(four)  # type: ignore[arg-type]
        else:
            side.numbers.extend((_number(a), _number(b), _number(c), _number(d)))
            side.odd[row] = four  # type: ignore[assignment]
        side.md5.append(md5)
        side.requires_grad.append(grad)
        side.data_name.append(data_name)
        return row


def _plausible(shape: Any) -> Any:
    """A shape as it is if it can be one, else as text, which equals no shape and has no size."""
    if shape is None or (type(shape) is str and len(shape) <= _LONGEST_SHAPE):
        return shape
    if type(shape) is list and all(type(n) is int and n >= 0 for n in shape) and math.prod(n or 1 for n in shape) < 1 << 63:
        return shape
    return str(shape)[:_LONGEST_SHAPE]


_PLAIN = itemgetter("type", "dtype", "shape", "Max", "Min", "Mean", "Norm", "requires_grad")
_COMMON = frozenset(("type", "dtype", "shape", "Max", "Min", "Mean", "Norm", "requires_grad", "md5", "data_name"))
_WORDS = {
    "NaN": float("nan"),
    "nan": float("nan"),
    "Infinity": float("inf"),
    "inf": float("inf"),
    "-Infinity": -float("inf"),
    "-inf": -float("inf"),
}


def _number(value: Any) -> float:
    if type(value) is _FLOAT:
        return value
    if isinstance(value, (int, bool)):
        try:
            return float(value)
        except OverflowError:
            return float("inf") if value > 0 else -float("inf")
    return _WORDS.get(value, float("nan")) if type(value) is str else float("nan")


def _is_gradients(name: str) -> bool:
    """``X.parameters_grad`` (8.1.1) or ``X.parameters_grad.<n>`` (26.2.0)."""
    return ".parameters_grad" in name and "parameters_grad" in name.split(".")[-2:]
