"""Differences of Max, Min, Mean and Norm, as both generations of the tables print them.

8.1.1: ``diff = target - golden``; relative error ``|diff / golden| * 100`` with ``%``, ``N/A`` for a golden 0 and for what is no number,
``Nan`` as soon as a NaN is involved. 26.2.0: ``0`` for what has the same text; a golden 0 gives ``inf``; infinities against numbers give
``inf`` or ``-inf`` in both columns; two devices give ``N/A``, other texts that differ ``Diff``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from msprobe_engine.formats.dump.dump_table import DumpTable
from msprobe_engine.formats.number_text import texts
from msprobe_engine.measure.columns import DIFFERENCES, GOLDEN_STATS, RELATIVE, TARGET_STATS, UNMATCHED

Rows = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

NAN = "Nan"
_SLACK = 1e-10
_SUSPECT = 0.5
_DIGITS, _EXACT, _LARGEST = 17, 15, 308
_DEVICE = re.compile("npu|cpu|cuda", re.IGNORECASE)
_DECIMAL = re.compile(r"\s*[+-]?(\d+(\.\d*)?|\.\d+|inf(inity)?|nan)([eE][+-]?\d+)?\s*", re.IGNORECASE)


@dataclass
class Shown:
    """Statistics of one side as a table shows them.

    Attributes:
        cells: four lists, one item per row: a number, ``Nan``, ``N/A`` of a row that is not there, or text.
        numbers: float64 (rows, 4); NaN where a cell is no float of the file.
        plain: all four cells are floats of the file; what is False was filled in one by one.
    """

    cells: list[list[Any]]
    numbers: Floats
    plain: Bools

    @property
    def bad(self) -> Bools:
        """Max or Min is NaN or infinite; a text that says so counts."""
        bad: Bools = np.asarray((~np.isfinite(self.numbers[:, :2])).any(1) & self.plain)
        for position in np.flatnonzero(~self.plain):
            bad[position] = _not_finite(self.cells[0][position]) or _not_finite(self.cells[1][position])
        return bad


class Statistics:
    """Turns the statistics of one side into cells.

    Args:
        side: where they come from.
        rows: all rows of the table (-1: not there). Whether an integer is shown as ``3`` or ``3.0`` depends on the whole column, because
            the existing tool holds a column of nothing but numbers as floats.
    """

    def __init__(self, side: DumpTable, rows: Rows) -> None:
        self._side = side
        self._stats = side.stats
        self._odd = np.zeros(len(side) + 1, bool)  # the last one stands for "not there"
        self._odd[list(side.nonfloat_stats)] = True
        self._odd[-1] = True
        self._as_floats = self._columns_of_numbers(rows)

    def _columns_of_numbers(self, rows: Rows) -> list[bool]:
        if (rows < 0).any():
            return [False] * 4
        nan = np.isnan(self._stats[rows]) & ~self._odd[rows][:, None]
        fours = [self._side.nonfloat_stats[row] for row in rows[self._odd[rows]].tolist()]
        some = not self._odd[rows].all()
        are_numbers = []
        for k in range(4):
            numbers = all(type(four[k]) in (int, float) and four[k] == four[k] for four in fours)
            are_numbers.append(numbers and not nan[:, k].any() and (some or any(type(four[k]) is float for four in fours)))
        return are_numbers

    def format_cells(self, rows: Rows) -> Shown:
        """The cells of some rows of the table."""
        stats = self._stats[rows] if len(self._stats) else np.full((len(rows), 4), np.nan)
        odd = self._odd[rows]
        cells = [stats[:, k].tolist() for k in range(4)]
        for position, k in zip(*(part.tolist() for part in np.nonzero(np.isnan(stats)))):
            cells[k][position] = NAN
        numbers = np.where(odd[:, None], np.nan, stats)
        for position in np.flatnonzero(odd).tolist():
            row = int(rows[position])
            four = self._side.nonfloat_stats[row] if row >= 0 else (UNMATCHED,) * 4
            for k in range(4):
                cells[k][position] = self._cell(four[k], k)
        return Shown(cells, numbers, ~odd)

    def _cell(self, value: Any, k: int) -> Any:
        if value is None:
            return "None"
        if (isinstance(value, float) and value != value) or (isinstance(value, str) and value.lower() == "nan"):
            return NAN
        if self._as_floats[k] and type(value) is int:
            return _float(value)
        return value if isinstance(value, (bool, int, float, str)) else str(value)


@dataclass
class Differences:
    """What statistics mode adds to a block.

    Attributes:
        columns: differences, relative errors and the statistics of both sides; cells are numbers or text.
        norm: float64, relative error of the norm as a fraction; NaN where the cell is no percentage, and with `exact`.
        suspect: 8.1.1 warns about the row.
    """

    columns: dict[str, Any]
    norm: Floats
    suspect: Bools


def differences(target: Shown, golden: Shown, matched: Bools, old: bool, exact: bool = False) -> Differences:
    """Compare the cells of both sides.

    Args:
        target, golden: rows that stand next to each other.
        matched: the row has both sides.
        old: as 8.1.1 does it.
        exact: take the numbers as they are, where 8.1.1 loses their last digits (`read_old`).
    """
    plain = target.plain & golden.plain & matched
    diffs, relatives = [], []
    suspect = np.zeros(len(matched), bool)
    for k in range(4):
        target_numbers, golden_numbers = target.numbers[:, k], golden.numbers[:, k]
        with np.errstate(all="ignore"):
            diff = target_numbers - golden_numbers
            relative = np.abs(diff / golden_numbers * 100)
            if old:
                suspect |= plain & (np.abs(diff) / (np.abs(np.maximum(target_numbers, golden_numbers)) + _SLACK) > _SUSPECT)
        d, r, remaining = (
            _old_cells(diff, relative, target_numbers, golden_numbers, plain, exact)
            if old
            else _new_cells(diff, relative, target_numbers, golden_numbers, plain)
        )
        compare_cells = pair_old if old else pair_new
        for position in remaining:
            if not matched[position]:
                d[position] = r[position] = UNMATCHED
                continue
            d[position], r[position] = compare_cells(target.cells[k][position], golden.cells[k][position])
            if old and isinstance(d[position], float):
                suspect[position] |= _far(target.cells[k][position], golden.cells[k][position])
        diffs.append(d)
        relatives.append(r)
    shares = (float(cell[:-1]) / 100 if cell.endswith("%") else np.nan for cell in relatives[3])
    norm = np.full(len(matched), np.nan) if exact else np.fromiter(shares, np.float64, len(matched))
    columns: dict[str, Any] = dict(zip((*DIFFERENCES, *RELATIVE), (*diffs, *relatives)))
    columns.update(zip((*TARGET_STATS, *GOLDEN_STATS), (*target.cells, *golden.cells)))
    return Differences(columns, norm, suspect)


def _old_cells(
    diff: Floats, relative: Floats, target_numbers: Floats, golden_numbers: Floats, plain: Bools, exact: bool
) -> tuple[list[Any], list[Any], Sequence[int]]:
    d: list[Any] = diff.tolist()
    r: list[Any] = texts(relative, np.ones(len(relative), bool), "%")
    moved = np.flatnonzero(
        plain & np.isfinite(target_numbers) & np.isfinite(golden_numbers) & (target_numbers != golden_numbers) & (not exact)
    )
    for position, target_number, golden_number in zip(moved.tolist(), target_numbers[moved].tolist(), golden_numbers[moved].tolist()):
        d[position] = read_old(repr(target_number)) - read_old(repr(golden_number))
        r[position] = f"{abs(d[position] / golden_number * 100)}%" if golden_number else UNMATCHED
    for position in np.flatnonzero(plain & (golden_numbers == 0)).tolist():
        r[position] = UNMATCHED
    for position in np.flatnonzero(plain & np.isnan(diff)).tolist():
        d[position] = r[position] = NAN
    return d, r, np.flatnonzero(~plain).tolist()


def _new_cells(
    diff: Floats, relative: Floats, target_numbers: Floats, golden_numbers: Floats, plain: Bools
) -> tuple[list[Any], list[Any], Sequence[int]]:
    same = plain & (
        ((target_numbers == golden_numbers) & (np.signbit(target_numbers) == np.signbit(golden_numbers)))
        | (np.isnan(target_numbers) & np.isnan(golden_numbers))
    )
    simple = plain & ~same & np.isfinite(target_numbers) & np.isfinite(golden_numbers) & (golden_numbers != 0)
    d, r = texts(diff, simple, "", "0"), texts(relative, simple, "%", "0")
    return d, r, np.flatnonzero(~same & ~simple).tolist()


def number(cell: Any) -> float | None:
    """What a cell counts as: a number, a text of one; None for truth values and other text."""
    if type(cell) in (int, float):
        return _float(cell)
    if isinstance(cell, str) and _DECIMAL.fullmatch(cell):
        return float(cell)
    return None


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else -float("inf")


def read_old(text: str) -> float:
    """The number that pandas 2.0 reads from the text of a finite one; 8.1.1 takes differences of such numbers.

    It counts leading zeros among the 17 digits that it looks at, and adds and divides in float64, so the last digits may be others.
    """
    mantissa, _, power = text.lstrip("-").partition("e")
    whole, _, decimals = mantissa.partition(".")
    digits = (whole + decimals)[:_DIGITS]
    exponent = int(power or 0) + max(0, len(whole) - _DIGITS) - max(0, len(digits) - len(whole))
    value = float(int(digits[:_EXACT]))
    for digit in digits[_EXACT:]:
        value = value * 10.0 + int(digit)
    if exponent > 0:
        value = value * float(f"1e{exponent}") if exponent <= _LARGEST else float("inf")
    elif exponent < -_LARGEST:
        value = value / float(f"1e{-_LARGEST - exponent}") / float(f"1e{_LARGEST}")
    else:
        value = value / float(f"1e{-exponent}")
    return -value if text.startswith("-") else value


def pair_old(target_cell: Any, golden_cell: Any) -> tuple[Any, str]:
    """(difference, relative error) of two cells as 8.1.1 prints them."""
    target_number, golden_number = number(target_cell), number(golden_cell)
    if target_number is None or golden_number is None:
        return UNMATCHED, UNMATCHED
    if math.isfinite(target_number) and math.isfinite(golden_number):
        difference = read_old(repr(target_number)) - read_old(repr(golden_number))
    else:
        difference = target_number - golden_number
    if difference != difference:
        return NAN, NAN
    return difference, UNMATCHED if golden_number == 0 else f"{abs(difference / golden_number * 100)}%"


def _far(target_cell: Any, golden_cell: Any) -> bool:
    target_number, golden_number = number(target_cell), number(golden_cell)
    if target_number is None or golden_number is None:
        return False
    with np.errstate(all="ignore"):
        return bool(abs(np.float64(target_number) - golden_number) / (abs(max(target_number, golden_number)) + _SLACK) > _SUSPECT)


def _kind(cell: Any) -> str:
    text = str(cell)
    lower = text.lower()
    if lower == "nan":
        return "nan"
    if lower in ("inf", "-inf"):
        return lower
    if number(cell) is not None:
        return "number"
    if _DEVICE.search(text):
        return "device"
    return "n/a" if text == UNMATCHED else "other"


def pair_new(target_cell: Any, golden_cell: Any) -> tuple[str, str]:
    """(difference, relative error) of two cells as 26.2.0 prints them."""
    if str(target_cell) == str(golden_cell):
        return "0", "0"
    kinds = _kind(target_cell), _kind(golden_cell)
    target_number, golden_number = number(target_cell), number(golden_cell)
    if target_number is not None and golden_number is not None and kinds == ("number", "number"):
        return str(
            target_number - golden_number
        ), "inf" if golden_number == 0 else f"{abs((target_number - golden_number) / golden_number * 100)}%"
    if "n/a" in kinds or kinds == ("device", "device"):
        return UNMATCHED, UNMATCHED
    if "device" in kinds or "other" in kinds:
        return "Diff", "Diff"
    if "nan" in kinds:
        return NAN, NAN
    if kinds[0] != "number":
        return kinds[0], kinds[0]
    turned = "-inf" if kinds[1] == "inf" else "inf"
    return turned, turned


def _not_finite(cell: Any) -> bool:
    if isinstance(cell, float):
        return not np.isfinite(cell)
    return isinstance(cell, str) and cell.strip().lower() in ("inf", "-inf", "nan")
