"""One side of a comparison: the dump of one rank in one step, as columns with one row per tensor or argument.

Row names, and what the tables show of arguments that are no tensors, are those of the existing tool (`docs/guide/compare.md` lists them).
A row costs some two hundred bytes, so a million of them fit into a few hundred megabytes; the tree of objects of the file never
exists whole.
"""

from __future__ import annotations

import math
import os
import zlib
from array import array
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from msprobe_engine.core.dtypes import is_bool
from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.core.names import direction, node_parent, node_parents
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.formats.dump import frame_log, layout
from msprobe_engine.formats.dump.rank_files import (
    cut_off_companion,
    object_inside,
    parse_object,
    read_bytes,
    stack_lines,
)
from msprobe_engine.formats.tensors.reader import TensorFiles

INPUT, PARAMETERS, OUTPUT, PARAMETERS_GRAD, DEBUG = range(5)
"""Roles of a row. Keyword arguments are inputs; the gradients that enter a backward call too."""
Value = float | int | str | bool | None
WORDS_OF_NUMBERS = {
    "NaN": float("nan"),
    "nan": float("nan"),
    "Infinity": float("inf"),
    "inf": float("inf"),
    "-Infinity": -float("inf"),
    "-inf": -float("inf"),
}
"""Text that stands for a number that JSON has not."""

STATISTICS, MD5, DIGEST, TENSOR, STRUCTURE = "statistics", "md5", "digest", "tensor", "structure"
"""What a dump can be compared by. `DIGEST` is this tool's own: 64 bits per tensor in place of statistics."""


@dataclass
class DumpTable:
    """Columns of one rank of one step. All lists have one item per row, in the order of the tables: within a record inputs,
    parameters, outputs; records in the order of the file.

    Attributes:
        path: the dump.json (debug.json).
        header: the file's keys but its data.
        tags: further keys of records (``tags``, ``is_recompute``, ...), by record index; only of those that have some.
        offsets: first row of each record, and the number of rows at the end; a record without rows has an empty range.
        op: index of the row's record.
        role: `INPUT` ... `DEBUG`, one byte each.
        dtype, shape: as the tables show them; a shape is a list of integers, or text; None of a row without a value.
        stats: float64 (rows, 4): Max, Min, Mean, Norm; NaN where there is no float, then `nonfloat_stats` has the row.
        nonfloat_stats: row -> the four values as the file has them, where not all four are floats.
        md5: checksum in the file, or None; of arguments that are no tensors `checksum` makes one.
        requires_grad: True, False, None.
        data_name: name of the saved tensor, "" when there is none.
        nans, infs: row -> count, where the file has one above 0.
        values: row -> value of an argument that is no tensor.
        extra: row -> further keys (``digest``, ``full_shape``, peer of a P2POp, placements, ...).
        collectives: record index -> the record as the file has it, of communication calls; their arguments tell which belong together.
        recovered: read from the frame log of a process that was killed.
        problems: sentences about what of this rank could not be read, while the rows could; the tools show them and end with 3.
        template: what several ranks share that are the same but for the ranks that they name (`replicas`); None: it is like no other.
        named_ranks: where there is a template, the ranks of groups and peers, one object for equal ones.
    """

    path: Path
    header: dict[str, Any] = field(default_factory=dict)
    ops: list[str] = field(default_factory=list)
    tags: dict[int, dict[str, Any]] = field(default_factory=dict)
    offsets: array[int] = field(default_factory=lambda: array("q", [0]))
    op: array[int] = field(default_factory=lambda: array("q"))
    role: bytearray = field(default_factory=bytearray)
    name: list[str] = field(default_factory=list)
    dtype: list[str | None] = field(default_factory=list)
    shape: list[Any] = field(default_factory=list)
    numbers: array[float] = field(default_factory=lambda: array("d"))
    nonfloat_stats: dict[int, tuple[Value, Value, Value, Value]] = field(default_factory=dict)
    md5: list[str | None] = field(default_factory=list)
    requires_grad: list[bool | None] = field(default_factory=list)
    data_name: list[str] = field(default_factory=list)
    nans: dict[int, int] = field(default_factory=dict)
    infs: dict[int, int] = field(default_factory=dict)
    values: dict[int, Any] = field(default_factory=dict)
    extra: dict[int, dict[str, Any]] = field(default_factory=dict)
    collectives: dict[int, dict[str, Any]] = field(default_factory=dict)
    recovered: bool = False
    problems: list[str] = field(default_factory=list)
    template: DumpTable | None = None
    named_ranks: tuple[Any, ...] = ()

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
        return DIGEST if any("digest" in fact for fact in self.extra.values()) else STATISTICS

    def is_after_update(self, record: str) -> bool:
        """Was this forward call made when the update of the step was done? It may belong to the next step."""
        first = self.header.get(layout.AFTER_UPDATE)
        if direction(record) != "forward" or first not in self.ops or record not in self.ops:
            return False
        return self.ops.index(record) >= self.ops.index(first)

    def with_own_columns(self) -> DumpTable:
        """A copy whose rows can be replaced."""
        copied = replace(
            self,
            shape=list(self.shape),
            numbers=array("d", self.numbers),
            md5=list(self.md5),
            data_name=list(self.data_name),
            nonfloat_stats=dict(self.nonfloat_stats),
            values=dict(self.values),
            nans=dict(self.nans),
            infs=dict(self.infs),
            extra=dict(self.extra),
        )
        copied.stacks, copied.construct = self.stacks, self.construct
        if self.aliases is not self.ops:
            copied.aliases = self.aliases
        return copied

    def with_header(self, header: dict[str, Any]) -> DumpTable:
        """A copy under another header, which shares the columns and what has been read of the files beside the dump."""
        copied = replace(self, header=header)
        copied.__dict__.update({name: self.__dict__[name] for name in ("stacks", "construct", "aliases") if name in self.__dict__})
        return copied

    def share_construct(self, construct: dict[str, Any]) -> None:
        """Hold an equal construct.json that another table has, in place of the one that was read: ranks of one program hold it once."""
        self.construct = construct

    def rows(self, op: int) -> range:
        return range(self.offsets[op], self.offsets[op + 1])

    def stats_of(self, row: int) -> tuple[Value, Value, Value, Value]:
        """Max, Min, Mean, Norm of a row as the file has them; of an argument that is no tensor its value, four times."""
        special = self.nonfloat_stats.get(row)
        if special is not None:
            return special
        largest, smallest, mean, norm = self.numbers[4 * row : 4 * row + 4]
        return largest, smallest, mean, norm

    def true_count(self, row: int) -> int | None:
        """How many elements of a tensor of bools are True; None of others, and where the file does not say."""
        shape, mean = self.shape[row], self.numbers[4 * row + 2]
        known = is_bool(self.dtype[row]) and isinstance(shape, list) and math.isfinite(mean)
        return round(mean * math.prod(shape)) if known else None

    def checksum(self, row: int) -> str:
        """The md5 column: of a tensor what the file has, of an argument that is no tensor the CRC-32 of its value's text (8.1.1)."""
        return self.md5[row] or f"{zlib.crc32(str(self.values.get(row, '')).encode('utf-8', 'surrogatepass')):08x}"

    @cached_property
    def stacks(self) -> dict[str, list[str]]:
        """Record name -> call stack lines, innermost first; both layouts of stack.json. Empty without the file, or when it is damaged,
        which `problems` says."""
        found, odd = stack_lines(self._beside(layout.STACK))
        if odd:
            self.add_problem(
                Sentence("{0}: {1} stacks are no lists of lines of text and are left out", self.path.parent / layout.STACK, odd)
            )
        return found

    @cached_property
    def construct(self) -> dict[str, Any]:
        """construct.json as it is: record -> parent, None, or [parent, micro step]. Empty without the file, or when it is damaged, which
        `problems` says."""
        return self._beside(layout.CONSTRUCT)

    def parent(self, op: str) -> str | None:
        """The record that encloses this one; None at the top or when not known."""
        return node_parent(self.construct.get(op))

    @cached_property
    def parents(self) -> dict[str, str | None]:
        """Node of construct.json -> the one that encloses it; None at the top. Also nodes that are no record."""
        return node_parents(self.construct)

    def place(self, row: int) -> str:
        """The row's place within its record, as tensor files are called: ``input.0``, ``kwargs.mask``, ``output.0.1``, a parameter's name
        in gradient records, "" of a record that is one tensor."""
        op, name = self.ops[self.op[row]], self.name[row]
        place = name[len(op) + 1 :] if name.startswith(op) else name
        section, _, rest = place.partition(".")
        keyword = section == "input" and self.role[row] == INPUT and not rest.partition(".")[0].isdecimal()
        return f"kwargs.{rest}" if keyword else place

    @cached_property
    def stated(self) -> npt.NDArray[np.bool_]:
        """Which of `stats` the file has, (rows, 4): of no argument that is no tensor, and no text but that of NaN and infinities."""
        stated = np.ones((len(self), 4), np.bool_)
        for row, four in self.nonfloat_stats.items():
            stated[row] = [row not in self.values and is_number(value) for value in four]
        return stated

    @cached_property
    def aliases(self) -> list[str]:
        """What the records are taken for: their names, until a mapping says others (`align.mapping.user_mapping`)."""
        return self.ops

    @cached_property
    def positions(self) -> dict[int, str]:
        """Row -> its place within its record (``.input.0``) on the golden side, of rows that a mapping has moved."""
        return {}

    @cached_property
    def files(self) -> TensorFiles:
        """The saved tensors, by `data_name`."""
        return TensorFiles(self.path.parent)

    def companion(self, name: str) -> dict[str, Any]:
        """stack.json or construct.json as it is; {} where the dump has none.

        Raises:
            FileNotFoundError, DumpFormatError: it is a link to nothing, or damaged.
        """
        file, log = self.path.parent / name, self.path.parent / layout.FRAME_LOG
        if self.recovered and os.path.lexists(log):  # a killed process: what is beside may be of the run before
            logged = frame_log.decode(read_bytes(log), str(log))
            return parse_object((logged.stack if name == layout.STACK else logged.construct) or b"{}", log)
        if layout.holds_inside(self.header, name):
            return object_inside(read_bytes(self.path), self.path, name)
        return parse_object(read_bytes(file), file) if os.path.lexists(file) else {}

    def _beside(self, name: str) -> dict[str, Any]:
        file = self.path.parent / name
        inside = self.recovered or layout.holds_inside(self.header, name)
        try:
            return self.companion(name)
        except FileNotFoundError:
            self.add_problem(Sentence("{0}: is a link to nothing; compared without it", self.path if inside else file))
        except DumpFormatError as error:
            self.add_problem(("" if inside else cut_off_companion(file)) or Sentence("{0}. Compared without it", error))
        return {}

    def add_problem(self, problem: str) -> None:
        """Add to `problems`, once."""
        if problem not in self.problems:
            self.problems.append(problem)


def is_number(value: Any) -> bool:
    """A statistic as the file has it is a number, NaN and the infinities among them."""
    return isinstance(value, (int, float)) or (type(value) is str and value in WORDS_OF_NUMBERS)
