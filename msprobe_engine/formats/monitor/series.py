"""What a monitor file says, as columns: one `Table` per rank and family, cut into one `Series` per tensor on request."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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


def series_of(values: Mapping[int, float]) -> Series:
    """The numbers of steps as a series."""
    steps = sorted(values)
    return Series(np.array(steps, np.int64), np.array([values[step] for step in steps], np.float64))


def steps_of(several: Iterable[Series]) -> Integers:
    """Steps that any of them has, ascending."""
    return np.unique(np.concatenate([np.empty(0, np.int64), *(series.steps for series in several)]))


@dataclass(frozen=True)
class Table:
    """All rows of one family of one rank, by key and step, each (key, step) once.

    Attributes:
        keys: the tensors, in the order in which the files name them first.
        ids: index into `keys` of every row, int64 [n], ascending.
        steps: step of every row, int64 [n], ascending within a key.
        values: statistic to float64 [n].
        repeated: rows that a later row of the same key and step has replaced.
        kinds: shapes and data types as the files have them, of keys of which they say any; of the calls of a module together.
    """

    keys: list[Key]
    ids: Integers
    steps: Integers
    values: Mapping[str, Floats]
    repeated: int = 0
    kinds: Mapping[Key, frozenset[Kind]] = field(default_factory=dict)

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
        return {key: Series(self.steps[begin:end], values[begin:end]) for key, begin, end in zip(self.keys, cuts, cuts[1:]) if end > begin}


EMPTY = Table([], np.empty(0, np.int64), np.empty(0, np.int64), {})


class Kind(NamedTuple):
    """Shape (``[4,8]``) and data type (``float32``) of a tensor; "" where nobody says."""

    shape: str
    dtype: str

    @property
    def elements(self) -> int:
        """0 where nobody says the shape."""
        return math.prod(json.loads(self.shape)) if self.shape else 0


_MOST_KINDS = 64
"""Of one key: sequences may be of any length."""


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


OF_CALLS = frozenset({"actv", "actv_grad"})
"""Families that have a row for each call of a module that is called several times in one pass, under one name."""


class Builder:
    """Collects parts, in the order in which they were written, into a table.

    Args:
        family: of those of `OF_CALLS` several rows of one key that were written with one step are calls of their own: the second one's key
            has the name with `` #2``, and so on. In all other families, and when a step was written again, the later row counts.
    """

    def __init__(self, family: str = "") -> None:
        self.keys: Ids = Ids()
        """`Key` to its number."""
        self.kinds: dict[Key, set[Kind]] = {}
        self._of_calls = family in OF_CALLS
        self._parts: list[Part] = []
        self._files: list[int] = []
        self._file: object = None

    def add(self, part: Part, file: object = None) -> None:
        """Take rows; statistics that another part does not have are NaN there. Rows of one step that follow each other in one `file` were
        written with that step; without a file each part is one."""
        if len(part.ids):
            self._parts.append(part)
            begins = file is None or file is not self._file
            self._files.append(len(self._files) if begins else self._files[-1])
            self._file = file

    def add_kind(self, key: Key, shape: str, dtype: str) -> None:
        """What the files say of a tensor in some step."""
        known = self.kinds.setdefault(key, set())
        if len(known) < _MOST_KINDS:
            known.add(Kind("".join(shape.split()), dtype.rpartition(".")[2].lower()))

    def table(self) -> Table:
        """The table of all parts; of rows with the same key and step the last one stays."""
        parts = self._parts
        if not parts:
            return EMPTY
        ids, steps = np.concatenate([p.ids for p in parts]), np.concatenate([p.steps for p in parts])
        if self._of_calls:
            ids = self._by_call(ids, steps)
        order = np.lexsort((steps, ids))  # stable: of equal rows the one written last comes last
        ids, steps = ids[order], steps[order]
        last = np.ones(len(ids), bool)
        last[:-1] = (ids[1:] != ids[:-1]) | (steps[1:] != steps[:-1])
        last &= ids >= 0
        repeated = int((ids >= 0).sum() - last.sum())
        order = order[last]
        ops = dict.fromkeys(op for p in parts for op in p.values)
        values = {op: np.concatenate([_column(p, op) for p in parts])[order] for op in ops}
        kinds = {key: frozenset(kinds) for key, kinds in self.kinds.items()}
        return Table(list(self.keys), ids[last], steps[last], values, repeated, kinds)

    def _by_call(self, ids: Integers, steps: Integers) -> Integers:
        """The numbers of the keys of rows, where later calls have keys of their own; keys are in the order of their first rows then."""
        files = np.repeat(np.array(self._files), [len(p.ids) for p in self._parts])
        written = np.cumsum(np.concatenate([[0], (steps[1:] != steps[:-1]) | (files[1:] != files[:-1])]))
        order = np.lexsort((written, ids))  # stable: rows of one key and one writing stay in their order
        begins = np.ones(len(ids), bool)
        begins[1:] = (ids[order][1:] != ids[order][:-1]) | (written[order][1:] != written[order][:-1])
        places = np.arange(len(ids))
        call = np.empty(len(ids), np.int64)
        call[order] = places - np.maximum.accumulate(np.where(begins, places, 0))
        later = (call > 0) & (ids >= 0)
        if not later.any():
            return ids
        names: list[Key] = list(self.keys)
        pairs, at = np.unique(np.stack([ids[later], call[later]]), axis=1, return_inverse=True)
        of_pair = [self.keys[names[i]._replace(name=f"{names[i].name} #{k + 1}")] for i, k in pairs.T.tolist()]
        ids = ids.copy()
        ids[later] = np.array(of_pair, np.int64)[at.reshape(-1)]
        first = np.full(len(self.keys), len(ids))
        np.minimum.at(first, ids[ids >= 0], places[ids >= 0])
        new = np.argsort(first, kind="stable")
        names = list(self.keys)
        self.keys = Ids({names[old]: i for i, old in enumerate(new.tolist())})
        renumbered = np.empty(len(new), np.int64)
        renumbered[new] = np.arange(len(new))
        return np.where(ids >= 0, renumbered[ids], -1)


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
