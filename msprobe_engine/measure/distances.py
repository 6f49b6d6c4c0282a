"""How far two rows of matched records are apart, from what a dump says about them: numbers, counts, checksums, arguments.

A distance is relative to the tensor itself and free of units:

* extremes: ``max(|dMax|, |dMin|) / max(|Max|, |Min|)``; when one of the two is the large constant of a mask (-10000, the smallest
  float16), the other one is the scale
* norm: ``|dNorm| / Norm``
* mean: ``|dMean| / (Norm / sqrt(n))``, because a mean near zero says nothing about the size of the elements

Which distance round-off explains is said by `measure.roundoff`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from msprobe_engine.core.redaction import NO_KEY
from msprobe_engine.formats.dump.dump_table import DumpTable
from msprobe_engine.measure import dump_dialects, factorize, missing_statistics, nonfinite_rows, roundoff
from msprobe_engine.measure.comparable_dtypes import kind_of


def of_other_keys(target: DumpTable, golden: DumpTable, left: factorize.Integers, right: factorize.Integers) -> tuple[Bools, Bools]:
    """Which pairs of rows are redacted on a side, and for which of them the two sides do not have one key."""
    a, b = _marks(target)[left], _marks(golden)[right]
    redacted = (a != "") | (b != "")
    return redacted, redacted & ((a != b) | (a == NO_KEY))


def _marks(side: DumpTable) -> npt.NDArray[np.str_]:
    """The key of each row, "" where nothing was left out."""
    found = np.zeros(len(side), "U16")
    for row, facts in side.extra.items():
        if "redacted" in facts:
            found[row] = str(facts["redacted"])[:16] or NO_KEY
    return found


Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

_MASK = 1e3
REARRANGED = 1e-13
"""Another checksum with the same numbers: elements have changed places. Rounding moves the norm of a million numbers by more."""
_IGNORED = frozenset(("torch.device", "torch.Generator", "generator", "torch.memory_format", "device"))


def elements(shape: Any) -> int:
    """Number of elements of a shape; 1 for what is no tensor."""
    return _elements(tuple(shape)) if isinstance(shape, list) else 1


@lru_cache(maxsize=65536)
def _elements(shape: tuple[Any, ...]) -> int:
    return int(math.prod(shape)) if all(isinstance(n, int) for n in shape) else 1


@dataclass
class Distances:
    """Of pairs of rows; one item per pair.

    Attributes:
        distance: the largest of the three distances; 0 when everything equals, inf when only one side is finite or the shapes differ.
        extremes, norm: the parts of it.
        bad_target, bad_golden: holds NaN or Inf; `bad_golden` is False where it holds Inf and the target NaN, or -Inf
            and the target +Inf too.
        argument: is no tensor, and differs.
        shape, dtype: differ.
        known: the dump says something that can be compared; of rows that both hold NaN or Inf: `nonfinite_rows.compare_rows`.
        one_sided: bool (n, 12), what only one side has, see `missing_statistics`.
        elements: `distance` is that of the saved elements.
        bounds: Max and Min alone are known, and are the same on both sides (a mask of truth values): nothing was compared of what lies
            between them.
    """

    distance: Floats
    extremes: Floats
    norm: Floats
    bad_target: Bools
    bad_golden: Bools
    argument: Bools
    shape: Bools
    dtype: Bools
    known: Bools
    one_sided: Bools
    elements: Bools
    bounds: Bools

    def leave_out(self, at: int | Sequence[int], nonfinite: bool = False) -> None:
        """Take pairs for such as cannot be compared; `nonfinite`: whether they hold NaN or Inf is not asked, either."""
        self.distance[at], self.known[at] = 0.0, False
        if nonfinite:
            self.bad_target[at], self.bad_golden[at] = False, False

    @property
    def compared(self) -> Bools:
        """Pairs of which equal numbers say that they are the same."""
        return np.asarray(self.known & (self.elements | ~self.bounds))


def distances(target: DumpTable, golden: DumpTable, rows: Sequence[tuple[int, int]] | factorize.Integers) -> Distances:
    """Measure pairs of rows (row of the target, row of the golden side); int64 (n, 2) or a sequence of pairs."""
    left, right = factorize.columns(rows)
    n = len(left)
    a, b = target.stats[left], golden.stats[right]
    coarse = dump_dialects.find_rows_in_float32(target)[left] | dump_dialects.find_rows_in_float32(golden)[right]
    if coarse.any():
        a, b = dump_dialects.as_float32(a, coarse), dump_dialects.as_float32(b, coarse)
    a[:, 3], b[:, 3] = np.abs(a[:, 3]), np.abs(b[:, 3])  # the existing tool gives a tensor without dimensions its value for a norm
    count = factorize.of_each(golden.shape, elements)[right]
    with np.errstate(all="ignore"):
        moved = a[:, :2] != b[:, :2]
        sizes = np.maximum(np.abs(a[:, :2]), np.abs(b[:, :2]))
        fixed = np.where(moved, 0.0, sizes).max(1)
        one = (moved.sum(1) == 1) & (fixed >= _MASK)
        scale = np.where(one, np.where(moved, sizes, 0.0).max(1), sizes.max(1))
        extremes = _ratio(np.abs(a[:, :2] - b[:, :2]).max(1), scale)
        norms = np.maximum(np.abs(a[:, 3]), np.abs(b[:, 3]))
        norm = _ratio(np.abs(a[:, 3] - b[:, 3]), norms)
        mean = _ratio(np.abs(a[:, 2] - b[:, 2]), norms / np.sqrt(np.maximum(count, 1)))
        distance = np.fmax(np.fmax(extremes, norm), mean)
    distance[coarse & (distance <= roundoff.call_limit(roundoff.EPS["float32"], 1) * np.sqrt(np.maximum(count, 1)))] = 0.0
    known = ~np.isnan(distance)
    bad_a, bad_b = _bad(target, left, a), _bad(golden, right, b)
    distance = np.where(bad_a & bad_b, 0.0, np.where(bad_a != bad_b, np.inf, np.nan_to_num(distance, nan=0.0, posinf=np.inf)))
    known |= bad_a | bad_b
    half = missing_statistics.half_finite(target, golden, left, right, a, b) & ~bad_a & ~bad_b
    distance[half], known[half] = np.maximum(distance[half], 1.0), True
    both = np.flatnonzero(bad_a & bad_b)
    if len(both):
        floating = factorize.of_each(golden.dtype, roundoff.eps) > 0
        distance[both], known[both], overflown = nonfinite_rows.compare_rows(
            target, golden, left[both], right[both], a[both], b[both], floating
        )
        nan_a, nan_b = nans(target, left[both], a[both]), nans(golden, right[both], b[both])  # the -inf of a mask hides no NaN
        distance[both[nan_a != nan_b]] = np.inf
        known[both[nan_a != nan_b]] = True
        bad_b[both[(nan_a & ~nan_b) | overflown]] = False
    argument = np.zeros(n, bool)
    plain = factorize.mask(target.values, len(target))[left] | factorize.mask(golden.values, len(golden))[right]
    for at in np.flatnonzero(plain).tolist():
        distance[at], argument[at] = _argument(target, golden, int(left[at]), int(right[at]))
    one_sided = missing_statistics.on_one_side(target, golden, left, right, count)
    shape = factorize.unequal(target.shape, golden.shape, left, right) & ~plain & ~one_sided[:, missing_statistics.SHAPE]
    dtype = _other_dtypes(target, golden, left, right) & ~plain
    if target.framework != golden.framework:  # a view more or less
        shape &= factorize.of_each(target.shape, elements)[left] != count
    distance[shape] = np.inf
    known |= plain | shape
    for at in np.flatnonzero(shape & (a[:, :3] == b[:, :3]).all(1)).tolist():
        if _is_repeated(target.shape[left[at]], golden.shape[right[at]], a[at, 3], b[at, 3]):
            distance[at], shape[at] = 0.0, False
    compared, same = _same_content(target, golden, left, right)
    hidden, other_keys = of_other_keys(target, golden, left, right)
    compared &= ~plain & ~shape & ~other_keys
    distance[compared & same] = 0.0
    same_numbers = compared & ~same & (~known | (distance < REARRANGED))
    masked = _has_mask_constant(sizes) & known  # round-off of what no mask covers moves none of the numbers
    distance[same_numbers] = np.where(masked[same_numbers], REARRANGED, np.inf)
    distance[hidden & compared & ~same] = np.inf  # their statistics are coarse, and how far apart they are is not known
    known |= compared
    apart = dump_dialects.find_incomparable(target, golden, left, right)
    distance[apart], known[apart] = 0.0, False
    blank = (other_keys | (hidden & ~plain & ~compared)) & ~shape  # equal means of two batches do not make them the same
    distance[blank], known[blank] = 0.0, False
    for differs in (argument, dtype):
        differs[blank & plain] = False
    one_sided[bad_a | bad_b | shape | apart, : missing_statistics.REDACTED] = False
    one_sided[compared, missing_statistics.NUMBERS] = False  # a checksum says it all
    one_sided[hidden] = False
    expected = missing_statistics.expects_numbers(target, golden, left, right, count) & ~plain & ~apart
    one_sided[:, missing_statistics.NOWHERE] = expected & ~known & ~(bad_a | bad_b) & ~one_sided.any(1)  # NaN is said as NaN
    one_sided[blank & ~shape & ~apart, missing_statistics.REDACTED] = True
    bounds = np.isnan(a[:, 2:]).all(1) | np.isnan(b[:, 2:]).all(1)
    bounds &= (a[:, 0] != a[:, 1]) & (distance == 0) & known & ~plain & ~compared & ~(bad_a | bad_b)
    parts = np.nan_to_num(extremes), np.nan_to_num(norm)
    return Distances(distance, *parts, bad_a, bad_b, argument, shape, dtype, known, one_sided, np.zeros(n, bool), bounds)


def _has_mask_constant(extremes: Floats) -> Bools:
    """The larger extreme, of float64 (n, 2) magnitudes, is the constant of a mask, beside which the others do not show in a norm."""
    with np.errstate(all="ignore"):
        return np.asarray((extremes.max(1) >= _MASK) & (extremes.max(1) >= _MASK * extremes.min(1)))


def of_other_precision(dtype: Bools, argument: Bools) -> bool:
    """The runs are of different precision as a whole: most tensors are of another type.

    Args:
        dtype, argument: of pairs of rows, as `Distances` has them.
    """
    return 2 * int((dtype & ~argument).sum()) > int((~argument).sum())


def _other_dtypes(target: DumpTable, golden: DumpTable, left: factorize.Integers, right: factorize.Integers) -> Bools:
    """Dtypes differ; those of two frameworks by what they are, and integers of any width are alike there."""
    if target.framework == golden.framework:
        return factorize.unequal(target.dtype, golden.dtype, left, right)
    return factorize.unequal_by(kind_of, target.dtype, golden.dtype, left, right)


def _is_repeated(first: Any, second: Any, norm: float, other: float) -> bool:
    """One tensor is the other one, repeated where that has one element in a dimension (positions, masks): `norm` and `other` say so, of
    two with the same extremes and mean."""
    if not isinstance(first, list) or not isinstance(second, list) or len(first) != len(second):
        return False
    apart = [(x, y) for x, y in zip(first, second) if x != y]
    if not all(1 in pair for pair in apart) or len({x == 1 for x, _ in apart}) != 1 or not min(elements(first), elements(second)):
        return False
    expected = other * math.sqrt(elements(first) / elements(second))
    return abs(norm - expected) <= 2.0**-20 * expected


def nonfinite(side: DumpTable, rows: Sequence[int] | factorize.Integers) -> Bools:
    """Which rows hold NaN or Inf."""
    chosen = np.asarray(rows, np.int64)
    return _bad(side, chosen, side.stats[chosen])


def _ratio(difference: Floats, scale: Floats) -> Floats:
    return np.asarray(np.where(difference == 0, 0.0, difference / scale))


def _bad(side: DumpTable, rows: npt.NDArray[np.int64], stats: Floats) -> Bools:
    """NaN or Inf, from the counts where the file has them, else from the extremes (a missing number is no NaN)."""
    infinite: Bools = np.asarray(np.isinf(stats[:, :2]).any(1))
    nan: Bools = np.asarray(np.isnan(stats[:, :2]).any(1))
    found: Bools = np.asarray(infinite | nan)
    for at in np.flatnonzero(nan):
        odd = side.nonfloat_stats.get(int(rows[at]))
        if odd is not None and not any(_is_nan(v) for v in odd[:2]):
            found[at] = bool(infinite[at])
    if side.nans or side.infs:
        found |= factorize.mask([*side.nans, *side.infs], len(side))[rows]
    return found


def nans(side: DumpTable, rows: factorize.Integers, stats: Floats) -> Bools:
    """Which rows hold NaN, of rows that hold NaN or Inf. Without counts extremes tell: those of a tensor with a NaN are NaN."""
    found: Bools = np.asarray(np.isnan(stats[:, :2]).any(1))
    counted = [row for row, n in side.nans.items() if n]
    return found | factorize.mask(counted, len(side))[rows] if counted else found


def _is_nan(value: Any) -> bool:
    return (isinstance(value, float) and math.isnan(value)) or (isinstance(value, str) and value.lower() == "nan")


def _argument(target: DumpTable, golden: DumpTable, i: int, j: int) -> tuple[float, bool]:
    """(distance, differs) of an argument that is no tensor on at least one side."""
    kind = target.dtype[i]
    if kind in _IGNORED or golden.dtype[j] in _IGNORED:
        return 0.0, False
    x, y = target.values.get(i), golden.values.get(j)
    if x == y and type(x) is type(y):
        return 0.0, False
    if isinstance(x, float) != isinstance(y, float):  # one side may give a tensor of one element (a learning rate)
        x, y = _of_one_element(target, i, x), _of_one_element(golden, j, y)
    if isinstance(x, float) and isinstance(y, float):
        if x != x and y != y:
            return 0.0, False
        top = max(abs(x), abs(y))
        distance = abs(x - y) / top if math.isfinite(top) and top else math.inf
        return distance, distance > 2.0**-20
    if isinstance(x, (int, float)) and isinstance(y, (int, float)) and x == y:
        return 0.0, False
    if isinstance(x, str) and isinstance(y, str) and _device(x) and _device(y):
        return 0.0, False
    return math.inf, True


def _of_one_element(side: DumpTable, row: int, value: Any) -> Any:
    """The number of a tensor of one element; `value` of what is no tensor."""
    tensor = row not in side.values and isinstance(side.shape[row], list) and elements(side.shape[row]) == 1
    return float(side.stats[row][0]) if tensor and roundoff.eps(side.dtype[row]) else value


def _device(text: str) -> bool:
    return text.partition(":")[0] in ("cpu", "cuda", "npu", "xpu", "mps", "meta")


def _same_content(target: DumpTable, golden: DumpTable, left: factorize.Integers, right: factorize.Integers) -> tuple[Bools, Bools]:
    """By checksum, else by digest: where both sides have one of a kind, and where they are equal."""
    compared, same = np.zeros(len(left), bool), np.zeros(len(left), bool)
    for read in (_digests, _checksums):  # a checksum counts more
        x, y = read(target), read(golden)
        if x is not None and y is not None:
            a, b = x[left], y[right]
            both = (a != None) & (b != None)  # noqa: E711 - of every element
            compared |= both
            same = np.where(both, a == b, same)
    return compared, same


def _checksums(side: DumpTable) -> npt.NDArray[np.object_] | None:
    return np.array(side.md5, object) if any(side.md5) else None


def _digests(side: DumpTable) -> npt.NDArray[np.object_] | None:
    found = np.full(len(side), None, object)
    some = False
    for row, facts in side.extra.items():
        found[row] = facts.get("digest")
        some |= found[row] is not None
    return found if some else None


def paired_rows(target: DumpTable, golden: DumpTable, ops: Iterable[tuple[int, int]]) -> tuple[list[tuple[int, int]], list[int]]:
    """Rows of matched records that belong together, and the position of the first of each record pair (with the end at the end).

    Rows belong together by role and place (``input.0``, ``output.1.weight``); places that only one side has are left out.
    """
    pairs = np.array(list(ops), np.int64).reshape(-1, 2)
    left, right, starts, apart = factorize.pair_rows(target, golden, pairs)
    rows = list(zip(left.tolist(), right.tolist()))
    if not apart.any():
        return rows, starts.tolist()
    found: list[tuple[int, int]] = []
    begins = []
    others = pairs.tolist()
    for at, (differ, start, end) in enumerate(zip(apart.tolist(), starts[:-1].tolist(), starts[1:].tolist())):
        begins.append(len(found))
        found += _by_place(target, golden, *others[at]) if differ else rows[start:end]
    return found, [*begins, len(found)]


def _by_place(target: DumpTable, golden: DumpTable, x: int, y: int) -> list[tuple[int, int]]:
    cut, other = len(target.ops[x]), len(golden.ops[y])
    places = {(golden.role[j], golden.positions.get(j, golden.name[j][other:])): j for j in golden.rows(y)}
    found = ((i, places.get((target.role[i], target.positions.get(i, target.name[i][cut:])), -1)) for i in target.rows(x))
    return [(i, j) for i, j in found if j >= 0]
