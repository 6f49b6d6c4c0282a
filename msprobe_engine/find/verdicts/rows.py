"""Verdicts of this tool on the rows of a table: a row is off when its difference is more than round-off, and at fault when what went into
its record is not off.

* error: the difference begins here, or it is a fact (another argument, NaN that nothing before has made, a shape, a dtype)
* warning: it is off because of something before it; only one side has it, or has one of its statistics; requires_grad differs; both sides
  hold NaN or Inf and nothing finite that could be compared
* pass: nothing beyond round-off

Distances and limits are those of `measure.distances`; differences may grow `origins.GROWTH`-fold within one call before it is to blame.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from msprobe_engine.align.frameworks.common_terms import CommonSide
from msprobe_engine.core.names import forward_twin
from msprobe_engine.find.difference.divergence import NOISIEST, PRODUCTS
from msprobe_engine.find.difference.origin import GROWTH
from msprobe_engine.find.difference.walk import CALIBRATED, CALIBRATED_GROWTH
from msprobe_engine.formats.dump.dump_table import INPUT, OUTPUT, PARAMETERS, PARAMETERS_GRAD, DumpTable
from msprobe_engine.measure import distances, dump_dialects, factorize, missing_statistics

Rows = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

PASS, WARNING, ERROR = range(3)
_MANY, _ROUNDS = 64, 6


@dataclass
class Judged:
    """Of all rows of a table.

    Attributes:
        level: int8, `PASS`, `WARNING` or `ERROR`.
        said: row -> one sentence.
    """

    level: npt.NDArray[np.int8]
    said: dict[int, str] = field(default_factory=dict)

    def set(self, at: int, level: int, text: str) -> None:
        """Raise the level of a row; the sentence of the highest level stays, the first of equal ones."""
        if at not in self.said or level > self.level[at]:
            self.said[at] = text
        self.level[at] = max(int(self.level[at]), level)


class Judge:
    """Judges the rows of one table.

    Args:
        target, golden: both sides.
        rows, others: int64, row of the target and of the golden side; -1 where there is none.
        record: int64, which rows belong to one record; equal ones stand together.
        distance: float64, of what was measured otherwise (saved tensors); NaN where nothing was.
        moved: float64 (rows of the golden side), what round-off moves each row (`find.difference.calibration`); without it the dtype tells.
        begins: bool, rows of records where a difference begins; None: that is judged here.
    """

    def __init__(
        self,
        target: DumpTable,
        golden: DumpTable,
        rows: Rows,
        others: Rows,
        record: Rows,
        distance: Floats | None = None,
        moved: Floats | None = None,
        begins: Bools | None = None,
    ) -> None:
        self._begins = begins
        self.target, self.golden, self.rows, self.others = target, golden, rows, others
        n = len(rows)
        self.both = (rows >= 0) & (others >= 0)
        found = distances.distances(target, golden, np.stack((rows[self.both], others[self.both]), axis=1))
        self.distance = np.zeros(n)
        self.distance[self.both] = found.distance
        self._argument, self._shape, self._dtype, self._bad = (np.zeros(n, bool) for _ in range(4))
        for name, part in (("_argument", found.argument), ("_shape", found.shape), ("_dtype", found.dtype)):
            getattr(self, name)[self.both] = part
        self._bad[self.both] = found.bad_target != found.bad_golden
        self._blind = np.zeros(n, bool)  # NaN or Inf on both sides, and nothing finite beside them
        self._blind[self.both] = found.bad_target & found.bad_golden & ~found.known
        self.one_sided = np.zeros((n, len(missing_statistics.WHAT)), bool)
        self.one_sided[self.both] = found.one_sided
        self._random = np.zeros(n, bool)
        count = factorize.of_each(golden.shape, distances.elements)[others[self.both]]
        self._random[self.both] = (count >= _MANY) & (found.norm * np.sqrt(count) <= 8 * found.extremes)
        self._alien = self._made_alone()
        self.distance[self._alien] = np.inf
        if distance is not None:
            self._blind &= np.isnan(distance)
            self.one_sided[~np.isnan(distance), : missing_statistics.REDACTED] = False
            self.one_sided[~np.isnan(distance), missing_statistics.NOWHERE] = False
            self.distance = np.where(np.isnan(distance), self.distance, distance)
        self._measured = moved is not None
        if moved is not None:
            self.distance[self.both] /= moved[others[self.both]]
        self._growth = CALIBRATED_GROWTH if self._measured else GROWTH
        role = np.frombuffer(bytes(target.role) or b"\0", np.uint8)
        self.role = np.where(rows >= 0, role[rows], INPUT) if n else np.zeros(0, np.int64)
        self.starts = np.concatenate(([0], np.flatnonzero(np.diff(record)) + 1)) if n else np.zeros(0, np.int64)
        self.group = np.repeat(np.arange(len(self.starts)), np.diff(np.append(self.starts, n)))

    def run(self) -> Judged:
        """Judge everything. When the first fault looks like products with fewer bits of mantissa (TF32), what they explain is accepted."""
        floor = 0.0
        for _ in range(_ROUNDS):
            judged = self._judge(floor)
            level = self._noise(judged)
            if level <= floor:
                break
            floor = level
        return judged

    def _noise(self, judged: Judged) -> float:
        faults = np.flatnonzero(judged.level == ERROR)
        if not len(faults) or self._measured:
            return 0.0
        at = int(faults[0])
        row = int(self.rows[at])
        if not self._random[at] or self.role[at] != OUTPUT or not self.distance[at] <= NOISIEST:
            return 0.0
        fine = distances.eps(self.target.dtype[row]) == distances.EPS["float32"]
        name = self.target.ops[self.target.op[row]].lower()
        return 4 * float(self.distance[at]) if fine and any(product in name for product in PRODUCTS) else 0.0

    def _judge(self, floor: float) -> Judged:
        n = len(self.rows)
        judged = Judged(np.zeros(n, np.int8))
        if not n:
            return judged
        gradient = self.role == PARAMETERS_GRAD
        out = (self.role == OUTPUT) | ~np.isin(self.role, (INPUT, PARAMETERS, OUTPUT, PARAMETERS_GRAD))
        measured = self.both & ~self._argument
        went_in = measured & ~out & ~gradient
        inner, outer = self._largest(went_in), self._largest((measured & out) | self._alien)
        before = np.concatenate(([0.0], np.maximum.accumulate(outer)[:-1]))
        known = np.zeros(len(self.starts), bool)
        known[self.group[went_in]] = True
        feeding = np.maximum(np.where(known, inner, before), self._within(outer))
        limits = np.maximum(self._limits(feeding, np.maximum(inner, outer)), floor)
        whole = float(outer.max(initial=0.0))
        with np.errstate(invalid="ignore"):
            allowed = np.where(out, (limits + self._growth * feeding)[self.group], (limits + self._growth * before)[self.group])
            allowed = np.where(gradient, limits.max(initial=0.0) + self._growth * whole, allowed)
            begins = measured & (self.distance > allowed)
        begins &= ~(went_in & np.isinf(before)[self.group])
        if self._begins is not None:
            begins = self._begins & measured & (self.distance > limits[self.group])
        self._say(judged, begins, ERROR, feeding, limits)
        self._facts(judged, feeding)
        self._alone(judged)
        faults = np.flatnonzero((judged.level == ERROR) | self._alien)
        if len(faults):
            first = int(faults[0])
            later = gradient | (np.arange(n) >= self.starts[self.group[first]])
            self._say(judged, measured & later & ~begins & (self.distance > limits[self.group]), WARNING, feeding, limits)
        return judged

    def _within(self, outer: Floats) -> Floats:
        """Of each record the largest difference that the records in it give out: what a module gives out follows from them."""
        found, (inside, around) = np.zeros(len(outer)), self._nested
        while len(inside):
            new = found.copy()
            np.maximum.at(new, around, np.maximum(found, outer)[inside])
            if np.array_equal(new, found):
                break
            found = new
        return found

    @cached_property
    def _nested(self) -> tuple[Rows, Rows]:
        """Groups whose record stands in the record of another group, and that one."""
        side, begins = self.target, self.rows[self.starts]
        groups = {side.ops[side.op[row]]: group for group, row in enumerate(begins.tolist()) if row >= 0}
        found = [(group, groups.get(side.parent(name) or "", -1)) for name, group in groups.items()]
        pairs = np.array([pair for pair in found if pair[1] >= 0 and pair[0] != pair[1]], np.int64).reshape(-1, 2)
        return pairs[:, 0], pairs[:, 1]

    def _made_alone(self) -> Bools:
        """NaN or +Inf that a call gives out which only the target has. (-Inf alone is what masks are made of.)"""
        alone = np.flatnonzero((self.rows >= 0) & (self.others < 0))
        found = np.zeros(len(self.rows), bool)
        told = dump_dialects.recorded_by_both(self.target, self.golden) if len(alone) else found
        told = told | self._bad.any()  # something that both have recorded is not finite on one side, so it did come from somewhere
        for at in alone.tolist():
            row = int(self.rows[at])
            found[at] = self.target.role[row] == OUTPUT and self._overflown(row) and told[self.target.op[row]]
        return found

    def _overflown(self, row: int) -> bool:
        return row in self.target.nans or str(self.target.stats_of(row)[0]).lower() in ("nan", "inf")

    def _largest(self, among: Bools) -> Floats:
        return np.asarray(np.maximum.reduceat(np.where(among, self.distance, 0.0), self.starts))

    @cached_property
    def _coarse(self) -> bool:
        """The runs are of different precision as a whole."""
        return bool(2 * self._dtype.sum() > max(1, int(self.both.sum()) - len(self.target.values)))

    def _limits(self, feeding: Floats, moved: Floats) -> Floats:
        """Round-off of each record. A backward call also sums over what its forward call has kept, whose difference feeds it as well."""
        i, j = self.rows[self.both], self.others[self.both]
        units, terms = np.zeros(len(self.rows)), np.ones(len(self.rows))
        units[self.both] = factorize.of_each(self.golden.dtype, distances.eps)[j]
        if self._coarse:
            units[self.both] = np.maximum(units[self.both], factorize.of_each(self.target.dtype, distances.eps)[i])
        terms[self.both] = factorize.of_each(self.target.shape, distances.longest_sum)[i]
        eps, longest = np.maximum.reduceat(units, self.starts), np.maximum.reduceat(terms, self.starts)
        places: dict[str, int] = {}
        for group, start in enumerate(self.starts.tolist()):
            if self.rows[start] >= 0:
                name = self.target.ops[self.target.op[self.rows[start]]]
                places[name] = group
                if ".backward" in name:
                    twin = places.get(forward_twin(name), -1)
                    if twin >= 0:
                        eps[group], longest[group] = max(eps[group], eps[twin]), max(longest[group], longest[twin])
                        feeding[group] = max(feeding[group], moved[twin])
        if self._measured:
            return np.full(len(eps), CALIBRATED)
        return np.fromiter(map(distances.limit, eps.tolist(), longest.astype(np.int64).tolist()), np.float64, len(eps))

    def _say(self, judged: Judged, where: Bools, level: int, feeding: Floats, limits: Floats) -> None:
        """Set the level of some rows, each with a sentence."""
        rows = np.flatnonzero(where)
        group, role = self.group[rows], self.role[rows]
        explained = {limit: f"{limit:.2g}" for limit in set(limits[group].tolist())}
        strange = (self._shape | self._bad | np.isinf(self.distance))[rows].tolist()
        took = np.isin(role, (INPUT, PARAMETERS)).tolist()
        gradient = (role == PARAMETERS_GRAD).tolist()
        parts = zip(rows.tolist(), self.distance[rows].tolist(), limits[group].tolist(), feeding[group].tolist(), strange, took, gradient)
        before = judged.level.tolist()
        for at, distance, limit, inside, odd, entered, summed in parts:
            if at in judged.said and level <= before[at]:
                continue
            if odd:
                what = self._odd(at)
            elif self._measured:
                what = f"off by {distance:.2g} times what round-off moves it"
            else:
                what = f"off by {distance:.2g} of its size, round-off explains {explained[limit]}"
            judged.said[at] = f"{what}; {_why(level == ERROR, inside, entered, summed)}"
        judged.level[rows] = np.maximum(judged.level[rows], level)

    def _odd(self, at: int) -> str:
        if self._shape[at]:
            return f"shape {self.target.shape[int(self.rows[at])]} against {self.golden.shape[int(self.others[at])]}"
        return "NaN or Inf on one side only" if self._bad[at] else "the content differs"

    def _facts(self, judged: Judged, feeding: Floats) -> None:
        for at in np.flatnonzero(self._argument).tolist():
            i, j = int(self.rows[at]), int(self.others[at])
            text = f"argument {_short(self.target.values.get(i))} against {_short(self.golden.values.get(j))}"
            known = self._begins is not None and not self._begins[at]
            judged.set(at, WARNING if known or np.isinf(feeding[self.group[at]]) else ERROR, text)
        if not self._coarse:
            entered = np.zeros(len(self.starts), bool)
            entered[self.group[self._dtype & (self.role == INPUT)]] = True
            for at in np.flatnonzero(self._dtype & ~self._argument).tolist():
                made = self.role[at] == OUTPUT and not entered[self.group[at]]
                i, j = int(self.rows[at]), int(self.others[at])
                judged.set(at, ERROR if made else WARNING, f"dtype {self.target.dtype[i]} against {self.golden.dtype[j]}")
        for at in np.flatnonzero(self._blind).tolist():
            judged.set(at, WARNING, "cannot be compared: NaN or Inf on both sides, and no finite number beside it")
        for at in np.flatnonzero(self.one_sided.any(1)).tolist():
            judged.set(at, WARNING, f"not compared whole: {missing_statistics.words(self.one_sided[at])}")
        mine, other = (factorize.of_each(side.requires_grad, _sign, np.int8) for side in (self.target, self.golden))
        a, b = mine[self.rows], other[self.others]
        for at in np.flatnonzero(self.both & (a != b) & (a >= 0) & (b >= 0)).tolist():
            judged.set(at, WARNING, f"requires_grad {bool(a[at])} against {bool(b[at])}")

    def _told(self, at: int) -> str:
        """Why a row needs no partner, in dumps of two frameworks."""
        for side, row in ((self.target, int(self.rows[at])), (self.golden, int(self.others[at]))):
            if row >= 0:
                return side.told.get(row, "") if isinstance(side, CommonSide) else ""
        return ""

    def _alone(self, judged: Judged) -> None:
        for at in np.flatnonzero(~self.both).tolist():
            side = "golden side" if self.others[at] >= 0 else "target"
            why = self._told(at)
            if why:
                judged.set(at, PASS, why)
                continue
            if not self._alien[at]:
                judged.set(at, WARNING, f"only the {side} has it")
                continue
            record = self.target.rows(self.target.op[int(self.rows[at])])
            tensors = [row for row in record if self.target.role[row] in (INPUT, PARAMETERS) and row not in self.target.values]
            entered = any(self._overflown(row) for row in tensors)
            judged.set(
                at, WARNING if entered else ERROR, f"only the {side} has it, and it holds NaN or Inf{' that went in' if entered else ''}"
            )


def _why(begins: bool, inside: float, entered: bool, summed: bool) -> str:
    """What stands before a row: `inside`, the difference that went into its record; `entered`, the row went in itself; `summed`, it is a
    gradient of parameters."""
    if summed:
        return "nothing else explains it" if begins else "it follows from what came before"
    if entered:
        return "no record before it is off" if begins else "it was made before"
    if begins:
        return f"what went in is off by {inside:.2g}" if inside else "what went in is the same"
    return "what went in is not the same either" if inside == np.inf else f"what went in is off by {inside:.2g}"


def _sign(flag: bool | None) -> int:
    return -1 if flag is None else int(flag)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
