"""What the search for the first NaN/Inf looks at: the calls of one rank with three flag words each.

A flag word is the union over the tensors of one side of a call (inputs, parameters, outputs). Flags are made for all rows of a dump at
once; tensor facts are only built for the few calls that hold something non-finite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from msprobe_engine.core.dtypes import is_not_float
from msprobe_engine.formats.dump.dump_table import DumpTable, is_number
from msprobe_engine.measure import factorize

NAN, POS_INF, NEG_INF, UNKNOWN, FINITE, NOT_FLOAT, UNSEARCHED = 1, 2, 4, 8, 16, 32, 64
INF = POS_INF | NEG_INF
NONFINITE = NAN | INF
_TENSORS = ("Tensor", "Parameter")
"""What the types of tensors end with."""
_NO_VALUES = frozenset(("ignored", "uninitialised"))
"""Keys of tensors of which a dump has no numbers, because they have no values yet or are not read."""


MOST_LEVELS = 200
"""Of modules within modules, more than Python can call. Without a bound a damaged file makes the work the square of its records."""

Flags = npt.NDArray[np.uint8]


def row_flags(side: DumpTable) -> Flags:
    """uint8 (rows,), the flags of all tensors of a dump; 0 of what is no tensor.

    Max and Min decide, not Mean and Norm: a norm taken in fp16 overflows for healthy tensors. Counts (`nan_count`, `inf_count`) win where
    they exist, because NaN hides Inf in Max and Min. `UNSEARCHED` stands for a tensor with elements that has neither.
    """
    if not len(side):
        return np.zeros(0, np.uint8)
    extremes = side.stats[:, :2]
    nan = np.isnan(extremes).any(1)
    flags = np.where(nan, NAN, FINITE).astype(np.uint8)
    signs = np.where((extremes == math.inf).any(1), POS_INF, 0) | np.where((extremes == -math.inf).any(1), NEG_INF, 0)
    infinite = ~nan & (signs > 0)
    flags[infinite] = signs[infinite]
    for row, four in side.nonfloat_stats.items():
        if not (is_number(four[0]) and is_number(four[1])):
            unsearched = 0 if not _NO_VALUES.isdisjoint(side.extra.get(row, ())) else UNSEARCHED
            shape = side.shape[row]
            flags[row] = FINITE if isinstance(shape, list) and 0 in shape else UNKNOWN | unsearched
    for row in side.nans.keys() | side.infs.keys():
        # with NaN in the tensor the signs are gone from Max and Min; then both are possible
        infinities = (int(signs[row]) or INF) if side.infs.get(row) else 0
        flags[row] = infinities | (NAN if side.nans.get(row) else 0)
    flags[factorize.of_each(side.dtype, lambda dtype: dtype is not None and is_not_float(str(dtype)), bool)] = NOT_FLOAT
    flags[factorize.of_each(side.dtype, lambda dtype: dtype is None, bool)] = 0
    for row in side.values:
        tensor = str(side.extra.get(row, {}).get("type", "")).endswith(_TENSORS)
        flags[row] = UNKNOWN | UNSEARCHED if tensor else 0
    return flags


class TensorFact(NamedTuple):
    """One tensor of a call: its place (``input.0``, ``input.mask``, ``output.0``, ``parameters.weight``), its flags, and its row."""

    place: str
    flags: int
    side: DumpTable
    row: int

    @property
    def nans(self) -> int | None:
        """Number of NaN elements; None when the dump has no counts."""
        return self._count(self.side.nans)

    @property
    def infs(self) -> int | None:
        """Number of infinite elements; None when the dump has no counts."""
        return self._count(self.side.infs)

    def _count(self, counts: Mapping[int, int]) -> int | None:
        counted = self.row in self.side.nans or self.row in self.side.infs or self.side.header.get("nonfinite_counts") is True
        return counts.get(self.row, 0) if counted else None

    @property
    def shape(self) -> tuple[Any, ...]:
        """() of a single number, and where the dump has none."""
        shape = self.side.shape[self.row]
        return tuple(shape) if isinstance(shape, list) else ()

    @property
    def requires_grad(self) -> bool:
        """False also where the dump does not say."""
        return bool(self.side.requires_grad[self.row])

    def fingerprint(self) -> tuple[str, ...]:
        """Text that is equal for two sightings of the same values: dtype, shape and every number the dump has."""
        side, row = self.side, self.row
        digest = side.extra.get(row, {}).get("digest")
        facts = (side.dtype[row], side.shape[row], *side.stats_of(row), side.md5[row], digest, side.nans.get(row), side.infs.get(row))
        return tuple(map(repr, facts))

    def describe(self) -> dict[str, Any]:
        """JSON-ready summary."""
        side, row = self.side, self.row
        facts = zip(("dtype", "shape", "Max", "Min", "Mean", "Norm"), (side.dtype[row], side.shape[row], *side.stats_of(row)))
        summary = {"place": self.place, "what": what(self.flags), "nans": self.nans, "infs": self.infs}
        return summary | {key: value for key, value in facts if value is not None}


def what(flags: int) -> str:
    """``NaN``, ``Inf``, ``-Inf``, ``NaN and Inf``, or ``finite``."""
    inf = "-Inf" if flags & INF == NEG_INF else "Inf" if flags & INF else ""
    return " and ".join(word for word in ("NaN" if flags & NAN else "", inf) if word) or "finite"


@dataclass(slots=True)
class Call:
    """One call (or one gradient, or one monitor sample) of one rank.

    Attributes:
        index: position in execution order.
        record: of the dump.
        name: record name, ``Functional.linear.0.forward``.
        kind: ``module``, ``api``, ``collective``, ``gradient`` (a parameters_grad record) or ``sample``.
        direction: ``forward`` or ``backward``.
        op: API name (``linear``) or class name of the module.
        ins, parameters, outs: rows; buffers that are only written to are left out of ``ins``.
        in_flags, parameter_flags, out_flags: union of tensor flags per side.
        parent: record name of the enclosing call, None at the top or when unknown.
        dump: the record and the rows are of this one; where several ranks say the same, of the first of them.
        flags: of all rows of the dump.
    """

    index: int
    record: int
    name: str
    kind: str
    direction: str
    op: str
    ins: Sequence[int]
    parameters: Sequence[int]
    outs: Sequence[int]
    in_flags: int
    parameter_flags: int
    out_flags: int
    parent: str | None
    dump: DumpTable
    flags: Flags

    def inputs(self) -> list[TensorFact]:
        """The tensors that go in."""
        return self._facts(self.ins)

    def outputs(self) -> list[TensorFact]:
        """The tensors that come out."""
        return self._facts(self.outs)

    def parameter_facts(self) -> list[TensorFact]:
        """The parameters of a module."""
        return self._facts(self.parameters)

    def literals(self) -> list[tuple[str, float]]:
        """Plain Python or numpy numbers among the inputs that are NaN or infinite."""
        values = ((row, self.dump.values.get(row)) for row in self.ins)
        return [(self._place(row), value) for row, value in values if isinstance(value, float) and not math.isfinite(value)]

    def _facts(self, rows: Sequence[int]) -> list[TensorFact]:
        return [TensorFact(self._place(row), int(self.flags[row]), self.dump, row) for row in rows if self.flags[row]]

    def _place(self, row: int) -> str:
        record = self.dump.ops[self.dump.op[row]]  # parameter gradients take in what a backward call took in
        return self.dump.name[row][len(record) + 1 :]


@dataclass
class Trace:
    """What one rank did in one step.

    Attributes:
        calls: in execution order; ``calls[i].index == i``.
        dump: what it was made of.
        complete: False when the step was cut off.
        path: directory it was read from.
        parents: record name -> that of the enclosing call; of calls that were not recorded, too.
    """

    step: int
    rank: int
    calls: list[Call]
    dump: DumpTable
    complete: bool = True
    path: str = ""
    parents: Mapping[str, str | None] = field(default_factory=dict)

    def raw(self, call: Call) -> Mapping[str, Any]:
        """A communication call as the file of this rank has it."""
        return self.dump.collectives.get(call.record, {})

    @cached_property
    def _by_name(self) -> dict[str, Call]:
        return {call.name: call for call in self.calls}

    @property
    def unsearched(self) -> list[str]:
        """Names of records with a tensor of which the dump has no number that could be searched."""
        return [call.name for call in self.calls if (call.in_flags | call.parameter_flags | call.out_flags) & UNSEARCHED]

    def find_call(self, name: str | None) -> Call | None:
        """The call with this record name, if it was recorded."""
        return None if name is None else self._by_name.get(name)

    def ancestors(self, call: Call, parents: Mapping[str, str | None] | None = None) -> list[str]:
        """Record names from the direct parent outwards; recorded or not. Stops at a cycle of a damaged file, and after `MOST_LEVELS`."""
        chain: list[str] = []
        seen = {call.name}
        parent = call.parent
        links = self.parents if parents is None else parents
        while parent and parent not in seen and len(chain) < MOST_LEVELS:
            chain.append(parent)
            seen.add(parent)
            parent = links.get(parent)
        return chain
