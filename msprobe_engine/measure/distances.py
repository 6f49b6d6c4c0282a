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


def of_other_keys(
    target: DumpTable, golden: DumpTable, target_rows: factorize.Integers, golden_rows: factorize.Integers
) -> tuple[Bools, Bools]:
    """Which pairs of rows are redacted on a side, and for which of them the two sides do not have one key."""
    target_keys, golden_keys = _marks(target)[target_rows], _marks(golden)[golden_rows]
    redacted = (target_keys != "") | (golden_keys != "")
    return redacted, redacted & ((target_keys != golden_keys) | (target_keys == NO_KEY))


def _marks(side: DumpTable) -> npt.NDArray[np.str_]:
    """The key of each row, "" where nothing was left out."""
    keys = np.zeros(len(side), "U16")
    for row, facts in side.extra.items():
        if "redacted" in facts:
            keys[row] = str(facts["redacted"])[:16] or NO_KEY
    return keys


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

    def leave_out(self, pairs: int | Sequence[int], nonfinite: bool = False) -> None:
        """Take pairs for such as cannot be compared; `nonfinite`: whether they hold NaN or Inf is not asked, either."""
        self.distance[pairs], self.known[pairs] = 0.0, False
        if nonfinite:
            self.bad_target[pairs], self.bad_golden[pairs] = False, False

    @property
    def compared(self) -> Bools:
        """Pairs of which equal numbers say that they are the same."""
        return np.asarray(self.known & (self.elements | ~self.bounds))


def distances(target: DumpTable, golden: DumpTable, rows: Sequence[tuple[int, int]] | factorize.Integers) -> Distances:
    """Measure pairs of rows (row of the target, row of the golden side); int64 (n, 2) or a sequence of pairs."""
    target_rows, golden_rows = factorize.columns(rows)
    n = len(target_rows)
    target_stats, golden_stats = target.stats[target_rows], golden.stats[golden_rows]
    coarse = dump_dialects.find_rows_in_float32(target)[target_rows] | dump_dialects.find_rows_in_float32(golden)[golden_rows]
    if coarse.any():
        target_stats, golden_stats = dump_dialects.as_float32(target_stats, coarse), dump_dialects.as_float32(golden_stats, coarse)
    target_stats[:, 3], golden_stats[:, 3] = (
        np.abs(target_stats[:, 3]),
        np.abs(golden_stats[:, 3]),
    )  # the existing tool gives a tensor without dimensions its value for a norm
    count = factorize.of_each(golden.shape, elements)[golden_rows]
    with np.errstate(all="ignore"):
        moved = target_stats[:, :2] != golden_stats[:, :2]
        sizes = np.maximum(np.abs(target_stats[:, :2]), np.abs(golden_stats[:, :2]))
        fixed = np.where(moved, 0.0, sizes).max(1)
        one_moved = (moved.sum(1) == 1) & (fixed >= _MASK)
        scale = np.where(one_moved, np.where(moved, sizes, 0.0).max(1), sizes.max(1))
        extremes = _ratio(np.abs(target_stats[:, :2] - golden_stats[:, :2]).max(1), scale)
        norms = np.maximum(np.abs(target_stats[:, 3]), np.abs(golden_stats[:, 3]))
        norm = _ratio(np.abs(target_stats[:, 3] - golden_stats[:, 3]), norms)
        mean = _ratio(np.abs(target_stats[:, 2] - golden_stats[:, 2]), norms / np.sqrt(np.maximum(count, 1)))
        distance = np.fmax(np.fmax(extremes, norm), mean)
    distance[coarse & (distance <= roundoff.call_limit(roundoff.EPS["float32"], 1) * np.sqrt(np.maximum(count, 1)))] = 0.0
    known = ~np.isnan(distance)
    bad_target, bad_golden = _bad(target, target_rows, target_stats), _bad(golden, golden_rows, golden_stats)
    distance = np.where(
        bad_target & bad_golden, 0.0, np.where(bad_target != bad_golden, np.inf, np.nan_to_num(distance, nan=0.0, posinf=np.inf))
    )
    known |= bad_target | bad_golden
    half = missing_statistics.half_finite(target, golden, target_rows, golden_rows, target_stats, golden_stats) & ~bad_target & ~bad_golden
    distance[half], known[half] = np.maximum(distance[half], 1.0), True
    bad_in_both = np.flatnonzero(bad_target & bad_golden)
    if len(bad_in_both):
        floating = factorize.of_each(golden.dtype, roundoff.eps) > 0
        distance[bad_in_both], known[bad_in_both], overflown = nonfinite_rows.compare_rows(
            target,
            golden,
            target_rows[bad_in_both],
            golden_rows[bad_in_both],
            target_stats[bad_in_both],
            golden_stats[bad_in_both],
            floating,
        )
        nan_target, nan_golden = (
            nans(target, target_rows[bad_in_both], target_stats[bad_in_both]),
            nans(golden, golden_rows[bad_in_both], golden_stats[bad_in_both]),
        )  # the -inf of a mask hides no NaN
        distance[bad_in_both[nan_target != nan_golden]] = np.inf
        known[bad_in_both[nan_target != nan_golden]] = True
        bad_golden[bad_in_both[(nan_target & ~nan_golden) | overflown]] = False
    argument = np.zeros(n, bool)
    plain = factorize.mask(target.values, len(target))[target_rows] | factorize.mask(golden.values, len(golden))[golden_rows]
    for position in np.flatnonzero(plain).tolist():
        distance[position], argument[position] = _argument(target, golden, int(target_rows[position]), int(golden_rows[position]))
    one_sided = missing_statistics.on_one_side(target, golden, target_rows, golden_rows, count)
    shape = factorize.unequal(target.shape, golden.shape, target_rows, golden_rows) & ~plain & ~one_sided[:, missing_statistics.SHAPE]
    dtype = _other_dtypes(target, golden, target_rows, golden_rows) & ~plain
    if target.framework != golden.framework:  # a view more or less
        shape &= factorize.of_each(target.shape, elements)[target_rows] != count
    distance[shape] = np.inf
    known |= plain | shape
    for position in np.flatnonzero(shape & (target_stats[:, :3] == golden_stats[:, :3]).all(1)).tolist():
        if _is_repeated(
            target.shape[target_rows[position]], golden.shape[golden_rows[position]], target_stats[position, 3], golden_stats[position, 3]
        ):
            distance[position], shape[position] = 0.0, False
    compared, same = _same_content(target, golden, target_rows, golden_rows)
    hidden, other_keys = of_other_keys(target, golden, target_rows, golden_rows)
    compared &= ~plain & ~shape & ~other_keys
    distance[compared & same] = 0.0
    same_numbers = compared & ~same & (~known | (distance < REARRANGED))
    masked = has_mask_constant(sizes) & known  # round-off of what no mask covers moves none of the numbers
    distance[same_numbers] = np.where(masked[same_numbers], REARRANGED, np.inf)
    distance[hidden & compared & ~same] = np.inf  # their statistics are coarse, and how far apart they are is not known
    known |= compared
    apart = dump_dialects.find_incomparable(target, golden, target_rows, golden_rows)
    distance[apart], known[apart] = 0.0, False
    blank = (other_keys | (hidden & ~plain & ~compared)) & ~shape  # equal means of two batches do not make them the same
    distance[blank], known[blank] = 0.0, False
    for differs in (argument, dtype):
        differs[blank & plain] = False
    one_sided[bad_target | bad_golden | shape | apart, : missing_statistics.REDACTED] = False
    one_sided[compared, missing_statistics.NUMBERS] = False  # a checksum says it all
    one_sided[hidden] = False
    expected = missing_statistics.expects_numbers(target, golden, target_rows, golden_rows, count) & ~plain & ~apart
    one_sided[:, missing_statistics.NOWHERE] = expected & ~known & ~(bad_target | bad_golden) & ~one_sided.any(1)  # NaN is said as NaN
    one_sided[blank & ~shape & ~apart, missing_statistics.REDACTED] = True
    bounds = np.isnan(target_stats[:, 2:]).all(1) | np.isnan(golden_stats[:, 2:]).all(1)
    bounds &= (target_stats[:, 0] != target_stats[:, 1]) & (distance == 0) & known & ~plain & ~compared & ~(bad_target | bad_golden)
    parts = np.nan_to_num(extremes), np.nan_to_num(norm)
    return Distances(distance, *parts, bad_target, bad_golden, argument, shape, dtype, known, one_sided, np.zeros(n, bool), bounds)


def has_mask_constant(extremes: Floats) -> Bools:
    """The larger extreme, of float64 (n, 2) magnitudes, is the constant of a mask, beside which the others do not show in a norm."""
    with np.errstate(all="ignore"):
        return np.asarray((extremes.max(1) >= _MASK) & (extremes.max(1) >= _MASK * extremes.min(1)))


def of_other_precision(dtype: Bools, argument: Bools) -> bool:
    """The runs are of different precision as a whole: most tensors are of another type.

    Args:
        dtype, argument: of pairs of rows, as `Distances` has them.
    """
    return 2 * int((dtype & ~argument).sum()) > int((~argument).sum())


def _other_dtypes(target: DumpTable, golden: DumpTable, target_rows: factorize.Integers, golden_rows: factorize.Integers) -> Bools:
    """Dtypes differ; those of two frameworks by what they are, and integers of any width are alike there."""
    if target.framework == golden.framework:
        return factorize.unequal(target.dtype, golden.dtype, target_rows, golden_rows)
    return factorize.unequal_by(kind_of, target.dtype, golden.dtype, target_rows, golden_rows)


def _is_repeated(target_shape: Any, golden_shape: Any, target_norm: float, golden_norm: float) -> bool:
    """One tensor is the other one, repeated where that has one element in a dimension (positions, masks): the norms say so, of two with
    the same extremes and mean."""
    if not isinstance(target_shape, list) or not isinstance(golden_shape, list) or len(target_shape) != len(golden_shape):
        return False
    apart = [(target_size, golden_size) for target_size, golden_size in zip(target_shape, golden_shape) if target_size != golden_size]
    if (
        not all(1 in pair for pair in apart)
        or len({target_size == 1 for target_size, _ in apart}) != 1
        or not min(elements(target_shape), elements(golden_shape))
    ):
        return False
    expected = golden_norm * math.sqrt(elements(target_shape) / elements(golden_shape))
    return abs(target_norm - expected) <= 2.0**-20 * expected


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
    bad: Bools = np.asarray(infinite | nan)
    for position in np.flatnonzero(nan):
        odd = side.nonfloat_stats.get(int(rows[position]))
        if odd is not None and not any(_is_nan(v) for v in odd[:2]):
            bad[position] = bool(infinite[position])
    if side.nans or side.infs:
        bad |= factorize.mask([*side.nans, *side.infs], len(side))[rows]
    return bad


def nans(side: DumpTable, rows: factorize.Integers, stats: Floats) -> Bools:
    """Which rows hold NaN, of rows that hold NaN or Inf. Without counts extremes tell: those of a tensor with a NaN are NaN."""
    nan: Bools = np.asarray(np.isnan(stats[:, :2]).any(1))
    counted = [row for row, n in side.nans.items() if n]
    return nan | factorize.mask(counted, len(side))[rows] if counted else nan


def _is_nan(value: Any) -> bool:
    return (isinstance(value, float) and math.isnan(value)) or (isinstance(value, str) and value.lower() == "nan")


def _argument(target: DumpTable, golden: DumpTable, i: int, j: int) -> tuple[float, bool]:
    """(distance, differs) of an argument that is no tensor on at least one side."""
    kind = target.dtype[i]
    if kind in _IGNORED or golden.dtype[j] in _IGNORED:
        return 0.0, False
    target_value, golden_value = target.values.get(i), golden.values.get(j)
    if target_value == golden_value and type(target_value) is type(golden_value):
        return 0.0, False
    if isinstance(target_value, float) != isinstance(golden_value, float):  # one side may give a tensor of one element (a learning rate)
        target_value, golden_value = _of_one_element(target, i, target_value), _of_one_element(golden, j, golden_value)
    if isinstance(target_value, float) and isinstance(golden_value, float):
        if target_value != target_value and golden_value != golden_value:
            return 0.0, False
        top = max(abs(target_value), abs(golden_value))
        distance = abs(target_value - golden_value) / top if math.isfinite(top) and top else math.inf
        return distance, distance > 2.0**-20
    if isinstance(target_value, (int, float)) and isinstance(golden_value, (int, float)) and target_value == golden_value:
        return 0.0, False
    if isinstance(target_value, str) and isinstance(golden_value, str) and _device(target_value) and _device(golden_value):
        return 0.0, False
    return math.inf, True


def _of_one_element(side: DumpTable, row: int, value: Any) -> Any:
    """The number of a tensor of one element; `value` of what is no tensor."""
    tensor = row not in side.values and isinstance(side.shape[row], list) and elements(side.shape[row]) == 1
    return float(side.stats[row][0]) if tensor and roundoff.eps(side.dtype[row]) else value


def _device(text: str) -> bool:
    return text.partition(":")[0] in ("cpu", "cuda", "npu", "xpu", "mps", "meta")


def _same_content(
    target: DumpTable, golden: DumpTable, target_rows: factorize.Integers, golden_rows: factorize.Integers
) -> tuple[Bools, Bools]:
    """By checksum, else by digest: where both sides have one of a kind, and where they are equal."""
    compared, same = np.zeros(len(target_rows), bool), np.zeros(len(target_rows), bool)
    for read in (_digests, _checksums):  # a checksum counts more
        target_column, golden_column = read(target), read(golden)
        if target_column is not None and golden_column is not None:
            target_marks, golden_marks = target_column[target_rows], golden_column[golden_rows]
            known = (target_marks != None) & (golden_marks != None)  # noqa: E711 - of every element
            compared |= known
            same = np.where(known, target_marks == golden_marks, same)
    return compared, same


def _checksums(side: DumpTable) -> npt.NDArray[np.object_] | None:
    return np.array(side.md5, object) if any(side.md5) else None


def _digests(side: DumpTable) -> npt.NDArray[np.object_] | None:
    digests = np.full(len(side), None, object)
    some = False
    for row, facts in side.extra.items():
        digests[row] = facts.get("digest")
        some |= digests[row] is not None
    return digests if some else None


def paired_rows(target: DumpTable, golden: DumpTable, ops: Iterable[tuple[int, int]]) -> tuple[list[tuple[int, int]], list[int]]:
    """Rows of matched records that belong together, and the position of the first of each record pair (with the end at the end).

    Rows belong together by role and place (``input.0``, ``output.1.weight``); places that only one side has are left out.
    """
    pairs = np.array(list(ops), np.int64).reshape(-1, 2)
    target_rows, golden_rows, starts, apart = factorize.pair_rows(target, golden, pairs)
    rows = list(zip(target_rows.tolist(), golden_rows.tolist()))
    if not apart.any():
        return rows, starts.tolist()
    paired: list[tuple[int, int]] = []
    begins = []
    record_pairs = pairs.tolist()
    for position, (differ, start, end) in enumerate(zip(apart.tolist(), starts[:-1].tolist(), starts[1:].tolist())):
        begins.append(len(paired))
        paired += _by_place(target, golden, *record_pairs[position]) if differ else rows[start:end]
    return paired, [*begins, len(paired)]


def _by_place(target: DumpTable, golden: DumpTable, target_record: int, golden_record: int) -> list[tuple[int, int]]:
    target_cut, golden_cut = len(target.ops[target_record]), len(golden.ops[golden_record])
    places = {(golden.role[j], golden.positions.get(j, golden.name[j][golden_cut:])): j for j in golden.rows(golden_record)}
    pairs = (
        (i, places.get((target.role[i], target.positions.get(i, target.name[i][target_cut:])), -1)) for i in target.rows(target_record)
    )
    return [(i, j) for i, j in pairs if j >= 0]
