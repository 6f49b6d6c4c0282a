"""Why a call made a NaN or an Inf, where the statistics of what went in show it: 0 / 0, log of 0, a row masked completely.

A sentence is only said of what the numbers prove or leave as the one way; nothing is guessed from the name of a function alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from msprobe_engine.core import operator_traits
from msprobe_engine.core.dtypes import float_type
from msprobe_engine.core.names import forward_twin
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.formats.dump.dump_table import INPUT, OUTPUT, DumpTable

_IGNORED_LABEL = -100
"""What the losses of torch and MindSpore leave out unless they are told another number."""
_CALLS_OF_A_LOSS = 8
"""As far back as the division of a summed loss looks for the call that summed it: casts and a move to the device lie between."""
_LOGARITHMS = {"log": 0.0, "log2": 0.0, "log10": 0.0, "log1p": -1.0}
"""Function -> where its logarithm is that of 0."""
_CASTS = operator_traits.CASTS | {"copy", "copy_"}
_ARCS = ("acos", "arccos", "asin", "arcsin")
_GROW = frozenset(
    (*operator_traits.PRODUCTS, *operator_traits.SUMS, "mse_loss", "pow", "__pow__", "square", "cumsum", "norm", "prod", "einsum")
)
_GROW |= operator_traits.SCALINGS | operator_traits.ADDITIONS | operator_traits.PRODUCTS_WITH_ADDEND


class _Operand(NamedTuple):
    """A tensor or number that goes in: its place, dtype ("" of a plain number), shape, and what its elements lie between."""

    place: str
    dtype: str
    shape: tuple[Any, ...]
    least: float
    most: float

    @property
    def has_zero(self) -> bool:
        """Zero is at an end of the range, so that an element is known to be 0."""
        return 0.0 in (self.least, self.most)

    @property
    def is_zero(self) -> bool:
        return self.least == self.most == 0.0


class _Seen(NamedTuple):
    """A call: function, operands by position or name, and what its result holds."""

    function: str
    operands: Mapping[str, _Operand]
    nan: bool
    dtype: str

    def at(self, position: int, *names: str) -> _Operand | None:
        """The operand at a position, or given by one of the names."""
        return next((operand for key in (str(position), *names) if (operand := self.operands.get(key)) is not None), None)


def why_not_finite(side: DumpTable, op: int) -> Sentence:
    """Why the record `op` gives a NaN or an Inf; an empty sentence where its numbers do not say, or it gives none."""
    name = side.ops[op]
    parts = name.split(".")
    if len(parts) < 4 or not parts[-2].isdecimal():
        return Sentence("")
    if parts[-1] == "backward":
        return _of_gradient(side, name, parts[-3])
    seen = _read_nonfinite_result(side, op, parts[-3])
    if seen is None:
        return Sentence("")
    if said := _labels_counted(side, op, seen):
        return said
    return next((said for rule in _RULES if (said := rule(seen))), Sentence(""))


def _read_nonfinite_result(side: DumpTable, op: int, function: str) -> _Seen | None:
    operands: dict[str, _Operand] = {}
    nan = infinite = False
    dtype = ""
    for row in side.rows(op):
        if side.role[row] == INPUT and (operand := _operand(side, op, row)) is not None:
            operands[operand.place.removeprefix("input.")] = operand
        elif side.role[row] == OUTPUT and row not in side.values:
            ends = [value for value in side.stats_of(row)[:2] if isinstance(value, float)]
            bad_nan = bool(side.nans.get(row)) or any(math.isnan(value) for value in ends)
            bad_inf = bool(side.infs.get(row)) or any(math.isinf(value) for value in ends)
            nan, infinite = nan or bad_nan, infinite or bad_inf
            dtype = dtype or (str(side.dtype[row]) if bad_nan or bad_inf else "")
    return _Seen(function, operands, nan, dtype) if nan or infinite else None


def _operand(side: DumpTable, op: int, row: int) -> _Operand | None:
    place = side.name[row].removeprefix(side.ops[op]).lstrip(".")
    value = side.values.get(row)
    if row in side.values:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return None
        return _Operand(place, "", (), float(value), float(value))
    most, least = side.stats_of(row)[:2]
    shape = side.shape[row]
    ends = math.nan, math.nan
    if isinstance(most, (int, float)) and isinstance(least, (int, float)):
        ends = float(least), float(most)
    return _Operand(place, str(side.dtype[row]), tuple(shape) if isinstance(shape, list) else (), *ends)


def _logarithm(seen: _Seen) -> Sentence | None:
    end, x = _LOGARITHMS.get(seen.function.strip("_")), seen.at(0, "self", "input")
    if end is None or x is None:
        return None
    if x.least < end:
        return Sentence("logarithm of a negative number: {0} goes down to {1}", x.place, _number(x.least - end))
    return Sentence("logarithm of 0: the smallest element of {0} is {1}", x.place, _number(x.least)) if x.least == end else None


def _root(seen: _Seen) -> Sentence | None:
    function, x = seen.function.strip("_"), seen.at(0, "self", "input")
    if function not in ("sqrt", "rsqrt") or x is None:
        return None
    if x.least < 0:
        return Sentence("square root of a negative number: {0} goes down to {1}", x.place, _number(x.least))
    return Sentence("1 / sqrt(0): an element of {0} is 0", x.place) if function == "rsqrt" and x.least == 0 else None


def _arc(seen: _Seen) -> Sentence | None:
    function, x = seen.function.strip("_"), seen.at(0, "self", "input")
    if function not in _ARCS or x is None or not (x.least < -1 or x.most > 1):
        return None
    template = "{0} is defined from -1 to 1, and the elements of {1} lie between {2} and {3}"
    return Sentence(template, function, x.place, _number(x.least), _number(x.most))


def _find_division_operands(seen: _Seen) -> tuple[_Operand | None, _Operand | None]:
    """The divisor of a division, and what is divided."""
    function = seen.function.strip("_").removeprefix("i")
    if function in ("reciprocal", "rtruediv"):
        return seen.at(0, "self", "input"), seen.at(1, "other")
    if function in ("div", "divide", "true_divide", "truediv"):
        return seen.at(1, "other"), seen.at(0, "self", "input")
    return None, None


def _division(seen: _Seen) -> Sentence | None:
    below, above = _find_division_operands(seen)
    if below is None or not below.has_zero:
        return None
    if seen.nan and (below.is_zero or (above is not None and above.has_zero)):
        return Sentence("0 / 0: an element of the divisor {0} is 0, and what is divided is 0 there", below.place)
    return Sentence("division by 0: an element of the divisor {0} is 0", below.place)


def _exponential(seen: _Seen) -> Sentence | None:
    x = seen.at(0, "self", "input")
    kind = float_type(x.dtype) if x is not None else None
    if seen.function.strip("_") not in ("exp", "expm1", "exp2", "sinh", "cosh") or x is None or kind is None or seen.nan:
        return None
    end = math.log2(kind.largest) if "2" in seen.function else math.log(kind.largest)
    template = "overflow of the exponential: {0} goes up to {1}, and beyond {2} its result does not fit into {3}"
    most = max(x.most, -x.least) if "h" in seen.function else x.most
    return Sentence(template, x.place, _number(most), f"{end:.1f}", kind.name) if most > end else None


def _power(seen: _Seen) -> Sentence | None:
    function = seen.function.strip("_").removeprefix("i")
    if function not in ("pow", "rpow"):
        return None
    operands = seen.at(0, "self", "input"), seen.at(1, "exponent", "other")
    base, exponent = operands if function == "pow" else operands[::-1]
    if base is None or exponent is None:
        return None
    if seen.nan and base.least < 0 and not (exponent.least == exponent.most and float(exponent.least).is_integer()):
        return Sentence("a negative number to a power that is no integer: {0} goes down to {1}", base.place, _number(base.least))
    if base.has_zero and exponent.least < 0:
        return Sentence("0 to a negative power: an element of {0} is 0", base.place)
    return None


def _labels(seen: _Seen) -> Sentence | None:
    target, ignore_index = seen.at(1, "target"), seen.at(4, "ignore_index")
    if seen.function not in operator_traits.LOSSES_OF_LABELS or target is None or not seen.nan:
        return None
    ignored = _IGNORED_LABEL if ignore_index is None or ignore_index.dtype else ignore_index.least
    if target.least == target.most == ignored:
        return Sentence("0 / 0: all labels are {0}, which are ignored, so the mean is that of nothing", _number(ignored))
    return None


def _labels_counted(side: DumpTable, op: int, seen: _Seen) -> Sentence | None:
    """The loss is a sum over labels, divided by how many there are in a later call, and there were none."""
    below, _ = _find_division_operands(seen)
    if not seen.nan or below is None or not below.is_zero:
        return None
    for before in range(op - 1, max(op - _CALLS_OF_A_LOSS, 0) - 1, -1):
        parts = side.ops[before].split(".")
        if len(parts) >= 4 and parts[-1] == "forward" and parts[-3] in operator_traits.LOSSES_OF_LABELS:
            target = next(
                (
                    operand
                    for row in side.rows(before)
                    if side.role[row] == INPUT
                    and (operand := _operand(side, before, row)) is not None
                    and operand.place in ("input.1", "input.target")
                ),
                None,
            )
            if target is not None and target.least == target.most == _IGNORED_LABEL:
                template = "0 / 0: all labels are {0}, which are ignored, and the loss is divided by their number, {1}"
                return Sentence(template, _number(_IGNORED_LABEL), below.place)
            return None
    return None


def _softmax(seen: _Seen) -> Sentence | None:
    x = seen.at(0, "self", "input")
    if x is None or not seen.nan or not operator_traits.is_softmax(seen.function) or x.least != -math.inf:
        return None
    return Sentence("a row that is masked completely: softmax of nothing but -Inf, by {0}", x.place)


def _empty(seen: _Seen) -> Sentence | None:
    x = seen.at(0, "self", "input")
    if x is None or not seen.nan or not x.dtype:
        return None
    if seen.function in ("mean", "nanmean") and 0 in x.shape:
        return Sentence("0 / 0: the mean of an empty tensor, {0} has shape {1}", x.place, list(x.shape))
    if seen.function in ("std", "var") and math.prod(x.shape) == 1:
        return Sentence("0 / 0: the spread of a single element, {0}", x.place)
    along = seen.at(1, "dim")
    if seen.function not in ("std", "var") or along is None or along.dtype or along.least not in range(-len(x.shape), len(x.shape)):
        return None
    template = "0 / 0: the spread of a single element along dimension {0}, {1} has shape {2}"
    return Sentence(template, _number(along.least), x.place, list(x.shape)) if x.shape[int(along.least)] == 1 else None


def _impossible_label(seen: _Seen) -> Sentence | None:
    x, smoothing = seen.at(0, "self", "input"), seen.at(7, "label_smoothing")
    smoothed = seen.function == "cross_entropy" and smoothing is not None and not smoothing.is_zero
    if seen.function not in operator_traits.LOSSES_OF_LABELS or seen.nan or smoothed or x is None or x.least != -math.inf:
        return None
    return Sentence("the score of a label is -Inf, its probability 0: {0} holds -Inf", x.place)


def _given_infinity(seen: _Seen) -> Sentence | None:
    infinite = [operand for operand in seen.operands.values() if not operand.dtype and math.isinf(operand.least)]
    if not infinite or seen.nan or seen.function not in operator_traits.ADDITIONS | operator_traits.SCALINGS:
        return None
    return Sentence("the call was given an infinite number, {0}", infinite[0].place)


def _spread(seen: _Seen) -> Sentence | None:
    if seen.function not in operator_traits.NORMALISATIONS:
        return None
    eps = seen.at({"rms_norm": 3, "batch_norm": 7}.get(seen.function, 4), "eps")
    if eps is not None and not eps.dtype and eps.is_zero:
        return Sentence("eps is 0: a row without spread is divided by 0")
    x = seen.at(0, "self", "input")
    kind = float_type("float64" if x is not None and "64" in x.dtype else "float32")  # kernels take the squares of narrower types in it
    largest = 0.0 if x is None else max(x.most, -x.least)
    if kind is None or not math.isfinite(largest) or largest <= math.sqrt(kind.largest):
        return None
    template = "the squares for the spread are beyond {0}, which ends at {1}: {2} is up to {3}"
    return Sentence(template, kind.name, f"{kind.largest:.6g}", "" if x is None else x.place, _number(largest))


def _infinities(seen: _Seen) -> Sentence | None:
    infinite = [operand for operand in seen.operands.values() if math.inf in (operand.most, -operand.least)]
    if not seen.nan or seen.function not in operator_traits.ADDITIONS | operator_traits.SUMS or not infinite:
        return None
    return Sentence("Inf minus Inf: {0} holds infinities", infinite[0].place)


def _range(seen: _Seen) -> Sentence | None:
    """The result is too large for its type."""
    kind = float_type(seen.dtype)
    if kind is None or not kind.infinite or seen.nan:
        return None
    numbers = seen.function in operator_traits.SCALINGS | operator_traits.ADDITIONS  # of others they are dimensions, an exponent, ...
    sizes = [max(operand.most, -operand.least) for operand in seen.operands.values() if operand.dtype or numbers]
    if math.inf in sizes:
        return None
    largest = max((size for size in sizes if math.isfinite(size)), default=0.0)
    ends = f"{kind.largest:.6g}"
    if seen.function in _CASTS and largest > kind.largest:
        return Sentence("cast to {0}, which ends at {1}: what goes in is up to {2}", kind.name, ends, _number(largest))
    if seen.function in _GROW:
        return Sentence("the result is beyond {0}, which ends at {1}; what goes in is up to {2}", kind.name, ends, _number(largest))
    return None


def _of_gradient(side: DumpTable, name: str, function: str) -> Sentence:
    """Of a backward record: what the forward call took in."""
    function = function.strip("_")
    if function in ("sqrt", *_ARCS) and (twin := forward_twin(name)) in side.ops:
        op = side.ops.index(twin)
        first = next(
            (operand for row in side.rows(op) if side.role[row] == INPUT and (operand := _operand(side, op, row)) is not None), None
        )
        if first is not None and function == "sqrt" and first.least == 0:
            return Sentence("the gradient of the square root is infinite at 0, and an element of {0} is 0", first.place)
        if first is not None and function != "sqrt" and (ends := [end for end in (first.most, first.least) if abs(end) == 1]):
            template = "the gradient of {0} is infinite at -1 and 1, and an element of {1} is {2}"
            return Sentence(template, function, first.place, _number(ends[0]))
    return Sentence("")


def _number(value: float) -> str:
    return f"{value:.6g}"


_RULES: tuple[Callable[[_Seen], Sentence | None], ...] = (
    _logarithm,
    _root,
    _arc,
    _division,
    _exponential,
    _power,
    _labels,
    _impossible_label,
    _softmax,
    _empty,
    _spread,
    _infinities,
    _given_infinity,
    _range,
)
