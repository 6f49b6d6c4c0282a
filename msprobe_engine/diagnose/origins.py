"""Where a difference between two runs begins, in one rank of one step.

The records are walked in the order in which the calls ended. A record is an origin when its result is off although what went into it
is not:

* its outputs differ by more than round-off, its inputs and parameters do not (or by far less);
* it takes in something that differs and that no earlier record has made: data, a parameter, a buffer, something written in place, or the
  output of a call that only one side has;
* it makes NaN or Inf of finite inputs, and the golden side does not;
* it was called with another argument.

What lies behind an origin differs because of it, and is not one. Round-off grows on its way through a network, so each difference that was
accepted raises what is accepted from then on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from msprobe_engine.compare.side import INPUT, OUTPUT, PARAMETERS, PARAMETERS_GRAD, Side
from msprobe_engine.compare.structure import Structure
from msprobe_engine.compare.tree import Tree
from msprobe_engine.diagnose import exact, facts, measure

GROWTH = 50.0
"""By how much a difference may grow in one call: norms and softmax do that, and differences of nearly equal numbers."""

CALIBRATED, CALIBRATED_GROWTH = 20.0, 4.0
"""Limit and growth in multiples of what a record was seen to move."""

RESULT, TAKEN, PARAMETER, GRADIENT = "result", "taken in", "parameter", "gradient"
ARGUMENT, NONFINITE, EXTRA, MISSING, UNUSED = "argument", "non-finite", "extra call", "missing call", "unused result"
UNSUMMED = "unsummed part"
CHANGED = "changed afterwards"


@dataclass
class Origin:
    """One place where a difference begins.

    Attributes:
        op: record of the target; of a `MISSING` call the one that misses it.
        partner: record of the golden side, -1 when there is none; the missing call.
        kind: `RESULT`, `TAKEN`, `PARAMETER`, `GRADIENT`, `ARGUMENT`, `NONFINITE`, `EXTRA`, `MISSING`, `UNUSED`
            (a call whose result is right, and is not what goes on) or `CHANGED` (its result is right, and comes out different where
            it is taken in: something that no record has lies between).
        row, other: the row that shows it, on both sides (-1: none).
        distance: of that row.
        inside: largest distance of what went in.
        limit: what would have been round-off.
        noise: the difference looks like rounding: elements move at random, the norm hardly moves.
    """

    op: int
    partner: int
    kind: str
    row: int
    other: int
    distance: float
    inside: float
    limit: float
    noise: bool = False

    @property
    def weight(self) -> float:
        """How many times more than round-off."""
        return self.distance / max(self.limit + GROWTH * self.inside, 1e-30)


@dataclass
class Walk:
    """Outcome of one rank of one step.

    Attributes:
        origins: in order of execution.
        differing: records whose outputs differ, consequences too.
        compared: records whose outputs could be compared.
        largest: largest accepted distance: what round-off amounted to.
    """

    origins: list[Origin] = field(default_factory=list)
    differing: int = 0
    compared: int = 0
    largest: float = 0.0


class Walker:
    """Looks for origins in one rank of one step.

    Args:
        target, golden: trees of both sides.
        structure: which record belongs to which.
        foreign: record of the target -> largest distance of what other ranks put into the same collective.
    """

    def __init__(self, target: Tree, golden: Tree, structure: Structure, foreign: dict[int, float] | None = None) -> None:
        self.target, self.golden, self.structure = target, golden, structure
        self.foreign = foreign or {}
        side: Side = target.side
        self.side = side
        self.rows, self.starts = measure.paired_rows(side, golden.side, structure.pairs)
        self.measured = measure.distances(side, golden.side, self.rows)
        exact.refine(self.measured, side, golden.side, self.rows)
        self._extra = set(structure.only_target)
        self._missing = set(structure.only_golden)
        coarse = self._mostly_other_dtypes()
        mine, theirs = (np.array([measure.eps(s.dtype[pair[n]]) for pair in self.rows]) for n, s in enumerate((side, golden.side)))
        self._eps: list[float] = (np.maximum(mine, theirs) if coarse else theirs).tolist()
        lengths = {id(shape): measure.longest_sum(shape) for shape in {id(s): s for s in side.shape}.values()}  # equal ones are one object
        self._longest = [lengths[id(side.shape[i])] for i, _ in self.rows]
        self._limits: dict[int, float] = {}
        self._position = {op: at for at, (op, _) in enumerate(structure.pairs)}
        self._back = {b: a for a, b in structure.pairs}
        self._growth = GROWTH
        self._units: np.ndarray[tuple[int], np.dtype[np.float64]] | None = None
        self._of_module: dict[str, list[int]] = {}  # module path -> positions of its calls among the pairs
        for at, (op, _) in enumerate(structure.pairs):
            if len(target.kinds[op]) == 4 and not target.is_gradients(op):
                self._of_module.setdefault(target.kinds[op][2], []).append(at)

    def span_of(self, op: int) -> range:
        """Positions of a record's pairs of rows; empty when nothing matches it."""
        at = self._position.get(op)
        return range(0) if at is None else range(self.starts[at], self.starts[at + 1])

    def pair_of(self, row: int) -> int:
        """Position of the pair that a row of the target is in; -1 when it is in none."""
        return next((at for at in self.span_of(self.side.op[row]) if self.rows[at][0] == row), -1)

    def walk(self, floor: float = 0.0, accepted: float = 0.0) -> Walk:
        """Find the origins.

        Args:
            floor: distances up to it are round-off whatever the dtype says (a noisier kind of arithmetic).
            accepted: what round-off amounted to in the step before, whose weights this one begins with.
        """
        side, found = self.side, Walk(largest=accepted)
        made = np.zeros(len(side.ops))  # distance of what each record gave out, or holds inside
        clean = True
        for at in self._order():
            op, other = self.structure.pairs[at]
            span = range(self.starts[at], self.starts[at + 1])
            seen = self._look(op, other, span, made, floor, found.largest if clean else np.inf)
            if seen is None:
                continue
            origin, inner, outer, known = seen
            found.compared += known
            if origin is not None:
                found.origins.append(origin)
                clean = False
            allowed = self._limit(op, span, floor)
            if outer > allowed:
                found.differing += 1
            elif outer > found.largest and np.isfinite(outer):
                found.largest = outer
            made[op] = max(made[op], outer)
            parent = self.target.parents[op]
            while parent >= 0:
                made[parent] = max(made[parent], outer, inner if np.isfinite(inner) else 0.0)
                parent = self.target.parents[parent]
        for origin in found.origins:
            self._blame_unmatched(origin)
        return found

    def _mostly_other_dtypes(self) -> bool:
        """The runs are of different precision as a whole (not one call of them)."""
        floats = [(i, j) for i, j in self.rows if measure.eps(self.golden.side.dtype[j])]
        other = sum(measure.eps(self.side.dtype[i]) != measure.eps(self.golden.side.dtype[j]) for i, j in floats)
        return 2 * other > len(floats)

    def _order(self) -> list[int]:
        """Positions of pairs in the order of execution: parameter gradients stand where their module's backward pass ends."""
        tree = self.target
        ends: dict[str, int] = {}
        for i, kind in enumerate(tree.kinds):
            if len(kind) == 4 and kind[0] == "backward":
                ends[kind[2]] = i
        keys = []
        for at, (op, _) in enumerate(self.structure.pairs):
            place = max(ends.get(tree.kinds[op][2], op), op) if tree.is_gradients(op) else op
            keys.append((place, tree.is_gradients(op), op, at))
        return [key[-1] for key in sorted(keys)]

    def calibrate(self, moved: np.ndarray[tuple[int], np.dtype[np.float64]]) -> None:
        """Count distances in what was measured to be round-off, float64 (rows of the golden side)."""
        self._units = moved[np.fromiter((j for _, j in self.rows), np.int64, len(self.rows))]
        self.measured = dataclasses.replace(self.measured, distance=self.measured.distance / self._units)
        self._growth = CALIBRATED_GROWTH

    @property
    def calibrated(self) -> bool:
        """Distances are multiples of measured round-off."""
        return self._units is not None

    def _limit(self, op: int, span: Iterable[int], floor: float) -> float:
        if self._units is not None:
            return CALIBRATED
        known = self._limits.get(op)
        if known is None:
            places = [*span, *self._calls_behind(op)]
            worst = max((self._eps[at] for at in places), default=0.0)
            known = self._limits[op] = measure.limit(worst, max((self._longest[at] for at in places), default=1))
        return max(known, floor)

    def _calls_behind(self, op: int) -> Iterator[int]:
        """Pairs of rows that a result is made of besides what the record says: parameter gradients of what the module's calls took in,
        other gradients of what the forward call took in and gave out, which autograd has kept."""
        if self.target.is_gradients(op):
            for at in self._of_module.get(self.target.kinds[op][2], ()):
                for pair in range(self.starts[at], self.starts[at + 1]):
                    if self.side.role[self.rows[pair][0]] == INPUT:
                        yield pair
        elif self.target.kinds[op][0] == "backward":
            twin = self.target.index.get(facts.forward_twin(self.side.ops[op]))
            if twin is not None:
                yield from self.span_of(twin)

    def _look(
        self, op: int, other: int, span: range, made: np.ndarray[tuple[int], np.dtype[np.float64]], floor: float, accepted: float
    ) -> tuple[Origin | None, float, float, bool] | None:
        side, m = self.side, self.measured
        if _empty(side.ops[op]):
            return None
        limit = self._limit(op, span, floor)
        inner, explained, outer = 0.0, float(made[op]), 0.0
        worst_in = worst_out = bad_out = argument = -1
        known, bad_in = False, False
        for at in span:
            row = self.rows[at][0]
            distance = float(m.distance[at])
            if side.role[row] in (OUTPUT, PARAMETERS_GRAD):
                known |= bool(m.known[at])
                if m.bad_target[at] and not m.bad_golden[at]:
                    bad_out = at if bad_out < 0 else bad_out
                if distance > outer:
                    outer, worst_out = distance, at
            else:
                bad_in |= bool(m.bad_target[at])
                if m.argument[at]:
                    argument = at if argument < 0 else argument
                elif distance > inner:
                    inner, worst_in = distance, at
        explained = max(0.0, explained, self.foreign.get(op, 0.0), *(float(m.distance[at]) for at in self._calls_behind(op)))
        for at in span:
            source = self.target.producers.get(self.rows[at][0])
            if source is not None:
                explained = max(explained, float(made[source]))
        origin: Origin | None = None
        feeding = max(inner, explained)
        if bad_out >= 0 and not bad_in and not np.isinf(explained):
            origin = self._origin(op, other, NONFINITE, bad_out, np.inf, inner, limit)
        elif inner > limit + self._growth * max(accepted, explained) and worst_in >= 0:
            kind = PARAMETER if side.role[self.rows[worst_in][0]] == PARAMETERS else TAKEN
            if argument >= 0:  # the step before was called with it too, and left what is taken in now (running statistics)
                origin = self._origin(op, other, ARGUMENT, argument, inner, 0.0, limit)
            else:
                origin = self._origin(op, other, kind, worst_in, inner, 0.0, limit)
        elif argument >= 0 and outer > limit + self._growth * feeding:
            origin = self._origin(op, other, ARGUMENT, argument, outer, inner, limit, worst_out)
        elif outer > limit + self._growth * feeding and not np.isinf(feeding):
            kind = GRADIENT if side.role[self.rows[worst_out][0]] == PARAMETERS_GRAD else RESULT
            origin = self._origin(op, other, kind, worst_out, outer, feeding, limit)
        return origin, inner, outer, known

    def _origin(self, op: int, other: int, kind: str, at: int, distance: float, inside: float, limit: float, shown: int = -1) -> Origin:
        """`at`: the pair of rows to name; `shown`: that of the distance, when it is another one."""
        row, golden_row = self.rows[at]
        if self._units is not None:
            unit = float(self._units[at if shown < 0 else shown])
            return Origin(op, other, kind, row, golden_row, distance * unit, inside * unit, unit)
        m = self.measured
        count = measure.elements(self.side.shape[row])
        noise = count >= 64 and m.norm[at] * np.sqrt(count) <= 8 * m.extremes[at] and kind in (RESULT, GRADIENT)
        return Origin(op, other, kind, row, golden_row, distance, inside, limit, bool(noise))

    def _blame_unmatched(self, origin: Origin) -> None:
        """What takes in the output of a call that only one side has: that call is the origin."""
        if origin.kind not in (TAKEN, RESULT):
            return
        for row in self.side.rows(origin.op):
            source = self.target.producers.get(row) if self.side.role[row] == INPUT else None
            if source is not None and source in self._extra:
                origin.op, origin.partner, origin.kind = self._first_extra(source, origin), -1, EXTRA
                return
        if origin.kind == TAKEN and origin.other >= 0:
            writer = self._writer(origin)
            if writer is not None:
                origin.op, origin.partner, origin.kind = writer, -1, EXTRA
                return
            lost = self.golden.producers.get(origin.other)
            if lost is not None and lost in self._missing:
                origin.partner, origin.kind = _first(self.golden, lost, self._missing), MISSING
            elif lost is not None:
                self._blame_unused(origin, lost)
                call = self._back.get(lost)
                if origin.kind == TAKEN and call is not None and origin.row not in self.target.producers and not self._is_off(call):
                    origin.op, origin.partner, origin.kind = call, lost, CHANGED
            elif self.golden.kinds[origin.partner][0] == "backward":
                self._blame_missing_gradient(origin)

    def _blame_unused(self, origin: Origin, lost: int) -> None:
        """What the golden side takes in comes out of a collective, maybe divided afterwards; here it ran too, and nothing uses it."""
        for _ in range(4):
            if _is_collective(self.golden.side.ops[lost]):
                call = self._back.get(lost)
                if call is not None and call != self.target.producers.get(origin.row):
                    origin.op, origin.partner, origin.kind = call, lost, UNUSED
                return
            rows = self.golden.side.rows(lost)
            sources = [self.golden.producers[r] for r in rows if self.golden.side.role[r] == INPUT and r in self.golden.producers]
            if len(sources) != 1:
                return
            lost = sources[0]

    def _blame_missing_gradient(self, origin: Origin) -> None:
        """A sum of gradients that no record has: the backward calls that are missing just before it did not add their part."""
        run = origin.partner
        while run - 1 >= 0 and run - 1 in self._missing:
            run -= 1
        if run < origin.partner:
            origin.partner, origin.kind = run, MISSING

    def _is_off(self, op: int) -> bool:
        """Do outputs of a record differ by more than round-off?"""
        span = self.span_of(op)
        limit = self._limit(op, span, 0.0)
        return any(self.side.role[self.rows[at][0]] == OUTPUT and self.measured.distance[at] > limit for at in span)

    def _first_extra(self, source: int, origin: Origin) -> int:
        """The first of a chain of calls that only the target has; where NaN or Inf comes out of it, the first that gives some."""
        at = self.pair_of(origin.row)
        if at < 0 or not self.measured.bad_target[at] or self.measured.bad_golden[at]:
            return _first(self.target, source, self._extra)
        while True:
            sources = [self.target.producers.get(row) for row in self.side.rows(source) if self.side.role[row] == INPUT]
            more = [s for s in sources if s is not None and s in self._extra and self._gives_nonfinite(s)]
            if not more:
                return source
            source = more[0]

    def _gives_nonfinite(self, op: int) -> bool:
        rows = [row for row in self.side.rows(op) if self.side.role[row] == OUTPUT and row not in self.side.values]
        return bool(rows) and bool(measure.nonfinite(self.side, rows).any())

    def _writer(self, origin: Origin) -> int | None:
        """A call that only the target has, and that got what the golden side goes on with: it has written into it."""
        golden = self.golden.side
        wanted, shape = golden.four(origin.other), golden.shape[origin.other]
        for op in sorted(self._extra):
            if op >= origin.op:
                break
            for row in self.side.rows(op):
                if self.side.role[row] == INPUT and self.side.shape[row] == shape and self.side.four(row) == wanted:
                    return op
        return None


def _first(tree: Tree, op: int, among: set[int]) -> int:
    """The first of a chain of calls of one side only."""
    while True:
        sources = [tree.producers.get(row) for row in tree.side.rows(op) if tree.side.role[row] == INPUT]
        more = [s for s in sources if s is not None and s in among]
        if not more:
            return op
        op = more[0]


def _is_collective(name: str) -> bool:
    return name.startswith("Distributed.")


def _empty(name: str) -> bool:
    """Calls whose result is not defined (memory without values)."""
    return name.split(".", 2)[1].startswith(("empty", "new_empty")) if name.count(".") > 1 else False
