"""Verdicts of this tool on the rows of a table: a projection of what was found in its rank and step (`find.rank_findings`).

* error: a difference begins here: the row belongs to a record that a finding names
* warning: it is off because of something else; only one side has it, or has one of its statistics; both sides hold NaN or Inf and nothing
  finite that could be compared
* pass: nothing beyond round-off

The first error of a table is the first suspect of its rank and step: what stands before it and is off is a warning.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from msprobe_engine.align.frameworks.common_terms import CommonSide
from msprobe_engine.align.parallel.merge_records import origin_of
from msprobe_engine.core.text.words import shorten_text
from msprobe_engine.find.findings import Suspect
from msprobe_engine.find.origin import ARGUMENT, DTYPE, GRAD_FLAG, MISSING, PARAMETER, TAKEN
from msprobe_engine.find.rank_findings import RankFindings
from msprobe_engine.formats.dump.dump_table import INPUT, OUTPUT, PARAMETERS, PARAMETERS_GRAD, DumpTable
from msprobe_engine.measure import distances, factorize, missing_statistics, roundoff

Rows = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

PASS, WARNING, ERROR = range(3)


@dataclass
class RowVerdicts:
    """Of all rows of a table.

    Attributes:
        level: int8 (n,), `PASS`, `WARNING` or `ERROR`.
        one_sided: bool (n, 12), what only one side has and the other one lacks, see `measure.missing_statistics`.
        not_compared: bool (n,), rows of one side alone that need a partner.
        said: row -> one sentence.
    """

    level: npt.NDArray[np.int8]
    one_sided: Bools
    not_compared: Bools
    said: dict[int, str] = field(default_factory=dict)

    def raise_level(self, row: int, level: int, text: str) -> None:
        """Raise the level of a row; the sentence of the highest level stays, the first of equal ones."""
        if row not in self.said or level > self.level[row]:
            self.said[row] = text
        self.level[row] = max(int(self.level[row]), level)


class RowProjection:
    """The verdicts on the rows of one table.

    Args:
        found: of the rank and step; the rows are those of the sides of its walker.
        rows, others: int64 (n,), row of the target and of the golden side; -1 where there is none.
        record: int64 (n,), which rows belong to one record; equal ones stand together.
        distance: float64 (n,), of what was measured otherwise (saved tensors); NaN where nothing was.
    """

    def __init__(self, found: RankFindings, rows: Rows, others: Rows, record: Rows, distance: Floats | None = None) -> None:
        self.found, self.walker = found, found.walker
        self.target, self.golden, self.rows, self.others = self.walker.side, self.walker.golden.side, rows, others
        n = len(rows)
        self.both = (rows >= 0) & (others >= 0)
        role = np.frombuffer(bytes(self.target.role) or b"\0", np.uint8)
        golden_role = np.frombuffer(bytes(self.golden.role) or b"\0", np.uint8)
        self.role = np.where(rows >= 0, role[rows], golden_role[others]) if n else np.zeros(0, np.int64)
        self.starts = np.concatenate(([0], np.flatnonzero(np.diff(record)) + 1)) if n else np.zeros(0, np.int64)
        self.ends = np.append(self.starts[1:], n)
        self.group = np.repeat(np.arange(len(self.starts)), self.ends - self.starts)
        self.entered = np.isin(self.role, (INPUT, PARAMETERS))
        self.times = self._measure(distance)

    def run(self) -> RowVerdicts:
        """All verdicts."""
        verdicts = RowVerdicts(np.zeros(len(self.rows), np.int8), *self._losses())
        if not len(self.rows):
            return verdicts
        begins = list(self._begins())
        first = min((rows[0] for rows, _ in begins[:1]), default=-1)
        at_fault = np.zeros(len(self.rows), bool)
        for rows, suspect in begins:
            level = ERROR if rows[0] >= first else WARNING
            for row in rows:
                verdicts.raise_level(row, level, self._sentence(row, suspect) if level == ERROR else self._follows(row))
                at_fault[row] |= level == ERROR
        self._consequences(verdicts, at_fault)
        self._facts(verdicts)
        self._alone(verdicts)
        return verdicts

    def _measure(self, distance: Floats | None) -> Floats:
        """What is known of the pairs of rows: that of the walk, and of pairs that it has not (other ones by the user's mapping) anew."""
        walker, n = self.walker, len(self.rows)
        target_rows, golden_rows = factorize.columns(walker.rows)
        position = np.full(len(self.target) + 1, -1, np.int64)  # the last one is of rows that are not there
        position[target_rows] = np.arange(len(target_rows))
        places = np.where(self.both, position[self.rows], -1)
        walked = places >= 0
        walked[walked] = golden_rows[places[walked]] == self.others[walked]
        rest = self.both & ~walked
        further = distances.distances(self.target, self.golden, np.stack((self.rows[rest], self.others[rest]), axis=1))
        self.one_sided = np.zeros((n, len(missing_statistics.WHAT)), bool)
        self.distance = np.zeros(n)
        self._argument, self._shape, self._dtype, bad_target, bad_golden, known, compared = (np.zeros(n, bool) for _ in range(7))
        for part, source in ((walked, walker.measured), (rest, further)):
            chosen: Any = places[walked] if part is walked else slice(None)
            self.distance[part], self.one_sided[part] = source.distance[chosen], source.one_sided[chosen]
            self._argument[part], self._shape[part], self._dtype[part] = source.argument[chosen], source.shape[chosen], source.dtype[chosen]
            bad_target[part], bad_golden[part], known[part] = source.bad_target[chosen], source.bad_golden[chosen], source.known[chosen]
            compared[part] = source.compared[chosen]
        self._bad = bad_target != bad_golden
        self._unknown = self.both & ~compared
        self._blind = bad_target & bad_golden & ~known  # NaN or Inf on both sides, and nothing finite beside them
        if distance is not None:
            measured = ~np.isnan(distance)
            self._blind &= ~measured
            self._unknown &= ~measured
            self.one_sided[measured, : missing_statistics.REDACTED] = False
            self.one_sided[measured, missing_statistics.NOWHERE] = False
            new = rest & measured
            self.distance[new] = distance[new]
        return self._times(np.where(walked, places, -1))

    def _losses(self) -> tuple[Bools, Bools]:
        """`RowVerdicts.one_sided` and `RowVerdicts.not_compared`, as `msprobe diagnose` has them; of what was put together of several ranks
        all that the other layout has not needs no partner."""
        found, walker = self.found.one_sided, self.walker
        if found is None:
            return self.one_sided, np.zeros(len(self.rows), bool)
        accepted = factorize.mask([walker.rows[pair][0] for pair in np.flatnonzero(found.accepted).tolist()], len(self.target) + 1)
        need = [factorize.mask(rows, len(side) + 1) for rows, side in zip(found.not_compared, (self.target, self.golden))]
        return self.one_sided & ~(accepted[self.rows] & self.both)[:, None], (need[0][self.rows] | need[1][self.others]) & ~self.both

    def _times(self, places: Rows) -> Floats:
        """How many times what round-off explains each row differs, float64 (n,); `places`: where it is among the pairs of the walk."""
        times = np.array([*self.walker.carried.alone, 0.0])[places]
        for row in np.flatnonzero(self.both & (places < 0)).tolist():  # paired by the table alone
            units = roundoff.eps(self.golden.dtype[self.others[row]])
            limit = roundoff.call_limit(units, roundoff.longest_sum(self.target.shape[self.rows[row]]))
            times[row] = self.distance[row] / limit if limit else np.inf if self.distance[row] else 0.0
        return times

    def _begins(self) -> Iterator[tuple[list[int], Suspect]]:
        """Of each finding the rows of the table that are at fault, the one to name first."""
        target: dict[str, list[int]] = {}
        golden: dict[str, list[int]] = {}
        for group, start in enumerate(self.starts.tolist()):
            of_target = self.rows[start] >= 0
            side, row = (self.target, int(self.rows[start])) if of_target else (self.golden, int(self.others[start]))
            op, groups = side.op[row], target if of_target else golden
            origin = origin_of(side, op)
            for name in {side.ops[op], side.ops[op] if origin is None else origin[1]}:
                groups.setdefault(name, []).append(group)
        for suspect in self.found.begins:
            names = (golden, target) if suspect.kind == MISSING else (target, golden)
            rows = [
                table_row for groups in names for group in groups.get(suspect.record, ()) for table_row in self._at_fault(group, suspect)
            ]
            if rows:
                yield rows, suspect

    def _at_fault(self, group: int, suspect: Suspect) -> list[int]:
        """Rows of a record that a finding names: those that are off, by its kind those that go in or those that come out; else the row that
        shows it, or the first one that comes out."""
        rows = list(range(int(self.starts[group]), int(self.ends[group])))
        shown = [row for row in rows if self.rows[row] >= 0 and self.target.name[self.rows[row]] == suspect.tensor]
        if suspect.kind in (DTYPE, GRAD_FLAG) and shown:
            return shown
        off = [row for row in rows if self.both[row] and not self._argument[row] and self.times[row] > 1]
        if suspect.kind == ARGUMENT:
            return list(dict.fromkeys([*shown, *(row for row in off if not self.entered[row])])) or rows[:1]
        if suspect.kind in (TAKEN, PARAMETER):
            return [row for row in off if self.entered[row]] or shown or off or rows[:1]
        out = [row for row in off if not self.entered[row]]
        return out or shown or [row for row in rows if self.role[row] in (OUTPUT, PARAMETERS_GRAD)][:1] or rows[:1]

    def _consequences(self, verdicts: RowVerdicts, at_fault: Bools) -> None:
        """Rows that are off without being at fault."""
        if not self.found.differs:
            return
        off = self.both & ~self._argument & ~at_fault & (self.times > 1)
        for row in np.flatnonzero(off).tolist():
            verdicts.raise_level(row, WARNING, self._follows(row))

    def _sentence(self, row: int, suspect: Suspect) -> str:
        """Of a row that is at fault."""
        if not self.both[row]:
            side = "golden side" if self.others[row] >= 0 else "target"
            return f"only the {side} has it{f': {suspect.why}' if suspect.why else ''}"
        if self._argument[row]:
            return self._argument_text(row)
        if not self.times[row] > 1:
            return suspect.why or "a difference begins here"
        inside = self._taken_in(row)
        if self.role[row] == PARAMETERS_GRAD:
            return f"{self._size(row)}; nothing else explains it"
        if self.entered[row]:
            return f"{self._size(row)}; no record before it is off"
        same = "what went in could not be compared whole" if self._taken_in_unknown(row) else "what is recorded of what went in is the same"
        return f"{self._size(row)}; {f'what went in is off by {inside:.2g}' if inside else same}"

    def _follows(self, row: int) -> str:
        """Of a row that is off because of something else."""
        if self.role[row] == PARAMETERS_GRAD:
            return f"{self._size(row)}; it follows from what came before"
        if self.entered[row]:
            return f"{self._size(row)}; it was made before"
        inside = self._taken_in(row)
        if inside == np.inf:
            return f"{self._size(row)}; what went in is not the same either"
        return f"{self._size(row)}; {f'what went in is off by {inside:.2g}' if inside else 'it follows from what is off elsewhere'}"

    def _taken_in(self, row: int) -> float:
        """Largest difference of what went into the record of a row."""
        part = self._record_of(row)
        chosen = self.both[part] & self.entered[part] & ~self._argument[part]
        return float(self.distance[part][chosen].max(initial=0.0))

    def _taken_in_unknown(self, table_row: int) -> bool:
        """A tensor that goes into the record of a row could not be compared."""
        part = self._record_of(table_row)
        rows = self.rows[part][self._unknown[part] & self.entered[part]].tolist()
        return any(self.target.dtype[row] and distances.elements(self.target.shape[row]) for row in rows)

    def _record_of(self, row: int) -> slice:
        group = self.group[row]
        return slice(self.starts[group], self.ends[group])

    def _size(self, row: int) -> str:
        """How far a row is off."""
        if self._shape[row]:
            return f"shape {self.target.shape[int(self.rows[row])]} against {self.golden.shape[int(self.others[row])]}"
        if self._bad[row]:
            return "NaN or Inf on one side only"
        distance = float(self.distance[row])
        if distance == np.inf:
            return "the content differs"
        times = float(self.times[row])
        much = f"off by {distance:.2g} of its size"
        return f"{much}, {times:,.0f} times what round-off explains" if times < roundoff.MOST_TIMES else much

    def _argument_text(self, row: int) -> str:
        i, j = int(self.rows[row]), int(self.others[row])
        return f"argument {shorten_text(repr(self.target.values.get(i)))} against {shorten_text(repr(self.golden.values.get(j)))}"

    def _facts(self, verdicts: RowVerdicts) -> None:
        """What is not the same beside numbers."""
        for row in np.flatnonzero(self._argument).tolist():
            verdicts.raise_level(row, WARNING, self._argument_text(row))
        if not distances.of_other_precision(self._dtype[self.both], self._argument[self.both]):
            for row in np.flatnonzero(self._dtype & ~self._argument).tolist():
                i, j = int(self.rows[row]), int(self.others[row])
                verdicts.raise_level(row, WARNING, f"dtype {self.target.dtype[i]} against {self.golden.dtype[j]}")
        for row in np.flatnonzero(self._blind).tolist():
            verdicts.raise_level(row, WARNING, "cannot be compared: NaN or Inf on both sides, and no finite number beside it")
        for row in np.flatnonzero(self.one_sided.any(1)).tolist():
            verdicts.raise_level(row, WARNING, f"not compared whole: {missing_statistics.words(self.one_sided[row])}")
        target_flags, golden_flags = (factorize.of_each(side.requires_grad, _sign, np.int8) for side in (self.target, self.golden))
        target_flag, golden_flag = target_flags[self.rows], golden_flags[self.others]
        for row in np.flatnonzero(self.both & (target_flag != golden_flag) & (target_flag >= 0) & (golden_flag >= 0)).tolist():
            verdicts.raise_level(row, WARNING, f"requires_grad {bool(target_flag[row])} against {bool(golden_flag[row])}")

    def _alone(self, verdicts: RowVerdicts) -> None:
        """Rows of one side."""
        for row in np.flatnonzero(~self.both).tolist():
            side = "golden side" if self.others[row] >= 0 else "target"
            if why := self._needs_no_partner(row):
                verdicts.raise_level(row, PASS, why)
            elif self._behind_cut(row):
                verdicts.raise_level(row, WARNING, "not compared: the other side was cut off before this call")
            elif self.rows[row] >= 0 and _overflown(self.target, int(self.rows[row])):
                verdicts.raise_level(row, WARNING, f"only the {side} has it, and it holds NaN or Inf")
            else:
                verdicts.raise_level(row, WARNING, f"only the {side} has it")

    def _behind_cut(self, table_row: int) -> bool:
        """The other side was cut off before it came so far."""
        target_cut, golden_cut = self.walker.structure.behind_cut
        row, golden_row = int(self.rows[table_row]), int(self.others[table_row])
        return (self.target.op[row] in target_cut) if row >= 0 else (self.golden.op[golden_row] in golden_cut)

    def _needs_no_partner(self, table_row: int) -> str:
        """Why, in dumps of two frameworks; "" where it needs one."""
        for side, row in ((self.target, int(self.rows[table_row])), (self.golden, int(self.others[table_row]))):
            if row >= 0:
                return side.told.get(row, "") if isinstance(side, CommonSide) else ""
        return ""


def _overflown(side: DumpTable, row: int) -> bool:
    """Holds NaN or +Inf; -Inf alone is what masks are made of."""
    return row in side.nans or str(side.stats_of(row)[0]).lower() in ("nan", "inf")


def _sign(flag: bool | None) -> int:
    return -1 if flag is None else int(flag)
