"""Two runs of different layouts as two sides of the same shapes: each row of the whole from the rows of its pieces.

What a row is a piece of follows from the shapes of both sides: a dimension that is a multiple on the other side is cut, equal shapes are
replicas. Replicas that disagree are either parts of a sum that is still to come, which cannot be compared, or a fault. They are parts when
the call has taken in something cut (a product over a cut dimension), or has only passed on such a part.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from msprobe_engine.compare.layout import merge
from msprobe_engine.compare.layout.merge import Floats
from msprobe_engine.compare.layout.pieces import Piece
from msprobe_engine.compare.side import INPUT, OUTPUT, PARAMETERS, PARAMETERS_GRAD, Side
from msprobe_engine.compare.structure import Matcher, Structure
from msprobe_engine.compare.tree import Producers, Shapes, Tree
from msprobe_engine.diagnose import measure

AGREES = 1e-3
"""Closer than this a replica is taken for the right one when replicas disagree."""

ROUNDING = 2.0**-46
"""Adding up pieces in float64 moves the last bits; integers must stay equal."""

PASSING = frozenset(
    (
        *("to", "float", "half", "bfloat16", "double", "type", "type_as", "clone", "detach", "contiguous"),
        *("view", "view_as", "reshape", "transpose", "t", "permute", "flatten", "unflatten", "squeeze", "unsqueeze"),
    )
)
"""Calls that hand on what they got: a part stays a part."""

PART, PADDED, UNCLEAR, UPDATE = "parts of a sum", "padded", "of other shapes", "single numbers of the update"
"""Why a row cannot be compared."""


class LooseTree(Tree):
    """Dimensions differ between layouts; their number and the dtype do not."""

    def shapes(self, op: int) -> Shapes:
        """dtypes and numbers of dimensions."""
        inputs, outputs = super().shapes(op)
        return Shapes(tuple(map(_loose, inputs)), tuple(map(_loose, outputs)))


def _loose(item: object) -> object:
    if not isinstance(item, tuple):
        return item
    return (item[0], len(item[1]) if isinstance(item[1], tuple) else item[1])


class Run:
    """The pieces of one side, all placed beside the records of the first.

    Args:
        pieces: by rank and micro batch.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = list(pieces)
        self.first = self.pieces[0].side
        self.tree = LooseTree(self.first)
        self.rows: list[dict[int, int] | None] = [None]  # row of the first piece -> row of this one; None: the same
        for piece in self.pieces[1:]:
            self.rows.append(None if _alike(self.first, piece.side) else self._beside(piece.side))
        self._stats = [piece.side.stats for piece in self.pieces]

    def _beside(self, side: Side) -> dict[int, int]:
        pairs = Matcher(self.tree, LooseTree(side)).run().pairs
        rows, _ = measure.paired_rows(self.first, side, pairs)
        return dict(rows)

    def members(self, row: int, last_micro: bool) -> tuple[Floats, list[int]]:
        """float64 (pieces, 4), and their places among `pieces`. `last_micro`: of each rank only the last micro batch that has the row."""
        found: dict[object, tuple[int, int]] = {}
        for at, rows in enumerate(self.rows):
            there = row if rows is None else rows.get(row, -1)
            if there >= 0 and self.pieces[at].side.shape[there] == self.first.shape[row]:
                found[self.pieces[at].rank if last_micro else at] = (at, there)
        return np.array([self._stats[at][there] for at, there in found.values()]), [at for at, _ in found.values()]

    def count(self, row: int, which: Callable[[Side], Mapping[int, int]]) -> int:
        """Sum of the counts (of NaN, of Inf) of all pieces."""
        total = 0
        for at, rows in enumerate(self.rows):
            there = row if rows is None else rows.get(row, -1)
            total += which(self.pieces[at].side).get(there, 0)
        return total


def _alike(first: Side, second: Side) -> bool:
    return first.ops == second.ops and first.name == second.name


@dataclass
class Whole:
    """Attributes:
    target, golden: sides of the whole; records are those of the first piece of each.
    structure: which record belongs to which.
    producers: as `Tree.producers`, of the first piece of the target.
    made_of: row of the target -> number of pieces, of merged ones.
    skipped: row of the target -> why it was not compared.
    source: row of the target with a part -> the latest record that gave it out.
    rank: row of the target whose replicas disagree -> rank of the one that is off.
    factor: of all gradients of the pieces; 1.0 when there is none.
    """

    target: Side
    golden: Side
    structure: Structure
    producers: Producers
    made_of: dict[int, int] = field(default_factory=dict)
    skipped: dict[int, str] = field(default_factory=dict)
    source: dict[int, int] = field(default_factory=dict)
    rank: dict[int, int] = field(default_factory=dict)
    factor: float = 1.0

    def turned(self, partners: Mapping[int, int], producers: Producers) -> Whole:
        """The same with the sides changed over. `partners`: row of the target -> row of the golden side."""
        structure = Structure(
            sorted((b, a) for a, b in self.structure.pairs),
            self.structure.only_golden,
            self.structure.only_target,
            {b: a for a, b in self.structure.renamed.items()},
        )
        made_of = {partners[row]: n for row, n in self.made_of.items()}
        skipped = {partners[row]: why for row, why in self.skipped.items()}
        return Whole(self.golden, self.target, structure, producers, made_of, skipped, factor=1 / self.factor)

    def reasons(self) -> Counter[str]:
        """How many rows were not compared, by reason."""
        return Counter(self.skipped.values())


class Joiner:
    """Makes a `Whole` of the pieces of both sides."""

    def __init__(self, target: Sequence[Piece], golden: Sequence[Piece]) -> None:
        self._a, self._b = Run(target), Run(golden)
        first, second = self._a.first, self._b.first
        self._structure = _without_collectives(Matcher(self._a.tree, self._b.tree).run(), first)
        self._producers = Tree(first).producers
        self._rows, self._starts = measure.paired_rows(first, second, self._structure.pairs)
        self._last_backward = max((op for op, kind in enumerate(self._a.tree.kinds) if kind[0] == "backward"), default=len(first.ops))

    def join(self, factors: bool = True) -> Whole:
        """Build both wholes. `factors`: look for a common factor of the gradients and take it out."""
        self._whole = Whole(_copy(self._a.first), _copy(self._b.first), self._structure, self._producers)
        self._parts: dict[bytes, int] = {}
        self._extra = set(self._structure.only_target)
        self._whole.factor = self._factor() if factors else 1.0
        for at, (op, _) in enumerate(self._structure.pairs):
            self._record(op, self._rows[self._starts[at] : self._starts[at + 1]])
        return self._whole

    def join_turned(self, factors: bool = True) -> Whole:
        """As `join`, with the second run as the target."""
        return self.join(factors).turned(dict(self._rows), Tree(self._b.first).producers)

    def _record(self, op: int, rows: Sequence[tuple[int, int]]) -> None:
        side = self._a.first
        backward = self._a.tree.kinds[op][0] in ("backward", "parameters_grad")
        cut = False
        for i, j in sorted(rows, key=lambda pair: side.role[pair[0]] in (OUTPUT, PARAMETERS_GRAD)):
            if isinstance(side.shape[i], list) != isinstance(self._b.first.shape[j], list):
                self._skip(i, j, UNCLEAR)  # given on one side only, as a bias that is added after the reduction
            if i in side.values or j in self._b.first.values or not isinstance(side.shape[i], list):
                continue
            cut |= self._row(op, i, j, backward, cut) and side.role[i] in (INPUT, PARAMETERS)

    def _row(self, op: int, i: int, j: int, backward: bool, cut: bool) -> bool:
        """Merge one pair of rows. Returns True when the row is a piece, or a part."""
        first, second = self._a.first, self._b.first
        shape = merge.whole_shape(first.shape[i], second.shape[j])
        if shape is None:
            pads = merge.padded(first.shape[i], second.shape[j], len(self._a.pieces))
            if pads or cut:
                self._skip(i, j, PADDED if pads else UNCLEAR)
            return pads
        accumulated = first.role[i] == PARAMETERS_GRAD
        others, _ = self._b.members(j, accumulated)
        pieces, places = self._a.members(i, accumulated)
        golden = _reduce(others, merge.needed(second.shape[j], shape))
        copies, left = divmod(len(pieces), merge.needed(first.shape[i], shape) or 1)
        all_cut = copies and not left and len(pieces) * measure.elements(first.shape[i]) == len(others) * measure.elements(second.shape[j])
        if golden is None and all_cut:
            shape = merge.times(shape, first.shape[i], second.shape[j], copies)
            golden = _reduce(others, len(others))  # cut on both sides: all pieces of each make the whole
        need = merge.needed(first.shape[i], shape)
        if golden is None or not need or len(pieces) % need:
            self._skip(i, j, UNCLEAR)
            return need > 1
        value = _reduce(pieces, need)
        if value is not None and backward and not shape and len(pieces) > 1 and _distance(value, golden) > AGREES:
            value = _sum_of(pieces, golden) if _sum_of(pieces, golden) is not None else value  # the loss is the sum of those of the pieces
        if value is None:
            value, place = _odd_one(pieces, need, golden, self._whole.factor if backward else 1.0)
            if value is not None:
                self._whole.rank[i] = self._a.pieces[places[place]].rank
            elif not shape and (total := _sum_of(pieces, golden)) is not None:
                value = total  # of one number the mean is all there is
            elif self._is_part(op, i, pieces, cut):
                self._part(op, i, j, pieces)
                return True
            else:
                value = max(merge_all(pieces, need), key=lambda one: _distance(one, golden))
        if not shape and self._last_backward < op and _distance(value, golden) > AGREES:
            self._skip(i, j, UPDATE)
            return True
        if backward and self._whole.factor != 1.0 and _distance(value / self._whole.factor, golden) < _distance(value, golden):
            value = value / self._whole.factor
        value = np.where(np.abs(value - golden) <= ROUNDING * np.abs(golden), golden, value)
        self._put(self._whole.target, i, value, shape, need, self._a)
        self._put(self._whole.golden, j, golden, shape, merge.needed(second.shape[j], shape), self._b)
        if need > 1:
            self._whole.made_of[i] = need
        return need > 1

    def _is_part(self, op: int, i: int, pieces: Floats, cut: bool) -> bool:
        side = self._a.first
        if pieces.tobytes() in self._parts or side.role[i] == PARAMETERS_GRAD:
            return True
        if side.role[i] in (INPUT, PARAMETERS):
            return self._producers.get(i) in self._extra  # made by what only this layout does, as the masked tokens of a cut vocabulary
        if self._part_taken(op) >= 0:
            return side.ops[op].split(".")[1] in PASSING
        return cut and not self._a.tree.children.get(op)

    def _part_taken(self, op: int) -> int:
        """A row with a part that goes into a record; -1."""
        rows = self._a.first.rows(op)
        return next((row for row in rows if self._a.first.role[row] == INPUT and row in self._whole.source), -1)

    def _part(self, op: int, i: int, j: int, pieces: Floats) -> None:
        key = pieces.tobytes()
        if self._a.first.role[i] in (OUTPUT, PARAMETERS_GRAD):
            taken = self._part_taken(op)
            if taken >= 0 and self._a.first.ops[op].split(".")[1] in PASSING:
                self._parts.setdefault(key, self._whole.source[taken])
            elif len(self._a.tree.kinds[self._parts.get(key, op)]) != 4 or key not in self._parts:  # the innermost module around it
                self._parts[key] = op
        elif key in self._parts:
            self._whole.source[i] = self._parts[key]
        self._skip(i, j, PART)

    def _skip(self, i: int, j: int, why: str) -> None:
        self._whole.skipped[i] = why
        for side, row in ((self._whole.target, i), (self._whole.golden, j)):
            side.numbers[4 * row : 4 * row + 4] = array("d", (float("nan"),) * 4)
            side.odd[row] = (None, None, None, None)
            side.md5[row] = None
            side.shape[row] = None
            for known in (side.nans, side.infs, side.facts):
                known.pop(row, None)

    @staticmethod
    def _put(side: Side, row: int, value: Floats, shape: list[int], need: int, run: Run) -> None:
        if need == 1 and len(run.pieces) == 1:
            return
        side.numbers[4 * row : 4 * row + 4] = array("d", value.tolist())
        if side.shape[row] != shape:
            side.shape[row] = shape
            side.odd.pop(row, None)
            side.md5[row] = None
            side.facts[row] = {key: fact for key, fact in side.facts.get(row, {}).items() if key != "digest"}
        for known, which in ((side.nans, _nans), (side.infs, _infs)):
            count = run.count(row, which)
            if count:
                known[row] = count

    def _factor(self) -> float:
        """Ratio of all gradients of the pieces to those of the whole: each piece takes the mean over its own part of the batch."""
        ratios = []
        first, second = self._a.first, self._b.first
        for i, j in self._rows:
            if first.role[i] != INPUT or self._a.tree.kinds[first.op[i]][0] != "backward" or not first.shape[i]:
                continue
            shape = merge.whole_shape(first.shape[i], second.shape[j])
            if shape is None or shape == first.shape[i] == second.shape[j]:
                continue
            value = _reduce(self._a.members(i, False)[0], merge.needed(first.shape[i], shape))
            golden = _reduce(self._b.members(j, False)[0], merge.needed(second.shape[j], shape))
            if value is not None and golden is not None and value[3] > 0 and golden[3] > 0:
                ratios.append(value[3] / golden[3])
        if not ratios:
            return 1.0
        # a vote, not the middle: behind a defect in the backward pass all gradients have another ratio
        most = max(len(self._a.pieces), len(self._b.pieces))
        found = np.asarray(ratios)
        votes = {f: int((np.abs(found / f - 1) < AGREES).sum()) for n in range(1, most + 1) for f in (float(n), 1.0 / n)}
        best = max(votes, key=lambda f: (votes[f], f == 1.0))
        return best if votes[best] >= max(1, len(ratios) // 5) else 1.0


def _without_collectives(structure: Structure, target: Side) -> Structure:
    """Collectives of one layout have no counterpart in another one, even where there are some."""
    gone = {op: other for op, other in structure.pairs if target.ops[op].startswith("Distributed.")}
    structure.pairs = [pair for pair in structure.pairs if pair[0] not in gone]
    structure.only_target = sorted((*structure.only_target, *gone))
    structure.only_golden = sorted((*structure.only_golden, *gone.values()))
    return structure


def _nans(side: Side) -> Mapping[int, int]:
    return side.nans


def _infs(side: Side) -> Mapping[int, int]:
    return side.infs


def merge_all(pieces: Floats, need: int) -> list[Floats]:
    """Every whole that can be made of the pieces."""
    return [merge.merged(pieces[members]) for way in merge.groupings(len(pieces), need) for members in way]


def _reduce(pieces: Floats, need: int) -> Floats | None:
    """The whole, when all its replicas say the same."""
    if not len(pieces) or not need or len(pieces) % need:
        return None
    for way in merge.groupings(len(pieces), need):
        wholes = [merge.merged(pieces[members]) if need > 1 else pieces[members[0]] for members in way]
        if all(merge.close(wholes[0], one) for one in wholes[1:]):
            return wholes[0]
    return None


def _odd_one(pieces: Floats, need: int, golden: Floats, factor: float) -> tuple[Floats | None, int]:
    """The replica that is off while another agrees with the golden side, and the place of one of its pieces; (None, 0) when none agrees."""
    for way in merge.groupings(len(pieces), need):
        wholes = [merge.merged(pieces[members]) if need > 1 else pieces[members[0]] for members in way]
        far = [min(_distance(one, golden), _distance(one / factor, golden)) for one in wholes]
        if min(far) <= AGREES:
            worst = int(np.argmax(far))
            return wholes[worst], way[worst][0]
    return None, 0


def _sum_of(pieces: Floats, golden: Floats) -> Floats | None:
    """Sum or mean over ranks of one number, whichever is the golden side's."""
    for scale in (1.0, 1.0 / len(pieces)):
        total = np.append(np.full(3, pieces[:, 2].sum() * scale), abs(pieces[:, 2].sum() * scale))
        if _distance(total, golden) <= AGREES:
            return total
    return None


def _distance(value: Floats, golden: Floats) -> float:
    """Relative; of extremes and norm."""
    with np.errstate(all="ignore"):
        top = max(abs(value[0]), abs(value[1]), abs(golden[0]), abs(golden[1]))
        far = max(abs(value[0] - golden[0]), abs(value[1] - golden[1])) / top if top else 0.0
        norm = max(value[3], golden[3])
        found = max(far, abs(value[3] - golden[3]) / norm if norm else 0.0)
    return float(found) if found == found else float("inf")


def _copy(side: Side) -> Side:
    """A side whose rows can be replaced."""
    copied = dataclasses.replace(
        side,
        shape=list(side.shape),
        numbers=array("d", side.numbers),
        md5=list(side.md5),
        odd=dict(side.odd),
        nans=dict(side.nans),
        infs=dict(side.infs),
        facts=dict(side.facts),
    )
    copied.__dict__["stacks"], copied.__dict__["construct"] = side.stacks, side.construct
    return copied
