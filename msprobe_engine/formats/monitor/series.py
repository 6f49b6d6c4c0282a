"""What a monitor file says, as columns: one `Table` per rank and family, cut into one `Series` per tensor on request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

SAMPLES_EVERY = "samples_every"
"""The scalar that says how many steps a thinned file has one of; infinite in the last step that is written."""

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


LARGEST_WHOLE = 2**53
"""Steps and the like; no run gets there, and what is larger overflows when it is added to or made a float."""


class Key(NamedTuple):
    """Which tensor a series is of.

    Attributes:
        vpp_stage: virtual pipeline chunk, 0 when there is one model.
        name: parameter, module tensor or collective, as the file has it.
        micro_step: micro batch, -1 when the family has one row per step.
        phase: where in its life a gradient was seen (``local``, ``reduced``, ...), ``""`` for others and in files that do not say.
        detail: state of the optimizer in ``opt_state``, tag of the row in ``other``, else ``""``.
    """

    vpp_stage: int
    name: str
    micro_step: int = -1
    phase: str = ""
    detail: str = ""


class Series(NamedTuple):
    """Numbers over steps: `steps` ascending and without repetition, int64 [n]; `values` float64 [n], NaN where there is no number."""

    steps: Integers
    values: Floats


@dataclass(frozen=True)
class Table:
    """All rows of one family of one rank, by key and step, each (key, step) once.

    Attributes:
        keys: the tensors, in the order in which the files name them first.
        ids: index into `keys` of every row, int64 [n], ascending.
        steps: step of every row, int64 [n], ascending within a key.
        values: statistic to float64 [n].
        repeated: rows that a later row of the same key and step has replaced.
    """

    keys: list[Key]
    ids: Integers
    steps: Integers
    values: Mapping[str, Floats]
    repeated: int = 0

    @property
    def nbytes(self) -> int:
        """Memory of the columns."""
        return self.ids.nbytes + self.steps.nbytes + sum(values.nbytes for values in self.values.values())

    def series(self, op: str) -> dict[Key, Series]:
        """One series per key; empty when there is no such statistic."""
        values = self.values.get(op)
        if values is None:
            return {}
        cuts = np.searchsorted(self.ids, np.arange(len(self.keys) + 1))
        return {key: Series(self.steps[a:b], values[a:b]) for key, a, b in zip(self.keys, cuts, cuts[1:]) if b > a}


EMPTY = Table([], np.empty(0, np.int64), np.empty(0, np.int64), {})


class Ids(dict[Any, int]):
    """Numbers things in the order in which they are first asked for."""

    def __missing__(self, key: Any) -> int:
        value = self[key] = len(self)
        return value


class Part(NamedTuple):
    """Rows as a file has them, in its order; `ids` refer to the keys of the `Builder` that the part is given to, -1 is no row."""

    ids: Integers
    steps: Integers
    values: Mapping[str, Floats]


class Builder:
    """Collects parts, in the order in which they were written, into a table."""

    def __init__(self) -> None:
        self.keys: Ids = Ids()
        """`Key` to its number."""
        self._parts: list[Part] = []

    def add(self, part: Part) -> None:
        """Take rows; statistics that another part does not have are NaN there."""
        if len(part.ids):
            self._parts.append(part)

    def table(self) -> Table:
        """The table of all parts; of rows with the same key and step the last one stays."""
        parts = self._parts
        if not parts:
            return EMPTY
        ids, steps = np.concatenate([p.ids for p in parts]), np.concatenate([p.steps for p in parts])
        order = np.lexsort((steps, ids))  # stable: of equal rows the one written last comes last
        ids, steps = ids[order], steps[order]
        last = np.ones(len(ids), bool)
        last[:-1] = (ids[1:] != ids[:-1]) | (steps[1:] != steps[:-1])
        last &= ids >= 0
        repeated = int((ids >= 0).sum() - last.sum())
        order = order[last]
        ops = dict.fromkeys(op for p in parts for op in p.values)
        values = {op: np.concatenate([_column(p, op) for p in parts])[order] for op in ops}
        return Table(list(self.keys), ids[last], steps[last], values, repeated)


def _column(part: Part, op: str) -> Floats:
    values = part.values.get(op)
    return np.full(len(part.ids), np.nan) if values is None else values


def floats(texts: Sequence[Any]) -> tuple[Floats, int]:
    """Numbers of cells, float64 [n], NaN for what is none; and how many are none (an empty cell is a missing number, not counted)."""
    try:
        return np.fromiter(map(float, texts), np.float64, len(texts)), 0
    except (ValueError, TypeError, OverflowError):
        pass
    out, wrong = np.full(len(texts), np.nan), 0
    for i, text in enumerate(texts):
        try:
            out[i] = float(text)
        except (ValueError, TypeError, OverflowError):
            wrong += text not in ("", None)
    return out, wrong


def integers(texts: Sequence[Any]) -> tuple[Integers, npt.NDArray[np.bool_]]:
    """Whole numbers of cells, int64 [n], and which of them are whole numbers, [n]. ``3.0`` is one: pandas writes so beside a NaN."""
    try:
        fast = np.fromiter(map(int, texts), np.int64, len(texts))
        return fast, (fast >= -LARGEST_WHOLE) & (fast <= LARGEST_WHOLE)
    except (ValueError, TypeError, OverflowError):
        pass
    out, good = np.zeros(len(texts), np.int64), np.zeros(len(texts), bool)
    for i, text in enumerate(texts):
        value = whole(text)
        if value is not None:
            out[i], good[i] = value, True
    return out, good


def whole(text: Any) -> int | None:
    """The whole number of a cell, None when it is none or is beyond `LARGEST_WHOLE`."""
    try:
        value = int(text) if not isinstance(text, float) else int(text) if text.is_integer() else None
    except (ValueError, TypeError, OverflowError):
        try:
            number = float(text)
            value = int(number) if number.is_integer() else None
        except (ValueError, TypeError, OverflowError):
            return None
    return value if value is not None and -LARGEST_WHOLE <= value <= LARGEST_WHOLE else None
