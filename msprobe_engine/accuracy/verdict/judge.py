"""The verdict of one tensor: device against bench.

In this order, and the first that finds something decides: types and shapes; NaN and Inf stand in the same places; integers and APIs that
only move values are equal; the error against the condition of the operator (`condition`), the bias of all errors; and, where another
implementation is there, its errors. The columns of the existing tool (`metrics`) and its verdict (`compat`) are taken beside.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from msprobe_engine.accuracy.results import ERROR, PASS, SKIP, WARNING, Metric, TensorResult
from msprobe_engine.accuracy.verdict import standards
from msprobe_engine.accuracy.verdict.condition import Measured, internal, measure
from msprobe_engine.accuracy.verdict.existing import old_status
from msprobe_engine.accuracy.verdict.metrics import blocks, convert_to_working_types, error_rate, float_metrics
from msprobe_engine.accuracy.verdict.rounding import round_to
from msprobe_engine.core.dtypes import FloatType, float_type, plain_name

Array = npt.NDArray[Any]
Value = Array | bool | int | float | complex | str | None

UNITS = 32.0
"""Largest `condition` units of a right kernel that computes in its own type."""
INSIDE, COARSE_INSIDE, COARSE = 1 / 32, 2.0, 8.0
"""The same for results of 16 bits and less, in units of their own type: of kernels that compute in float32, of these with a single
intermediate result that is rounded to it (a warning), and of operators of several kernels."""
WEIGHTS = 2.0
"""The same for operators that round one intermediate result in every fused kernel there is (``weights`` in standards.yaml)."""
HIDDEN = 8.0
"""Operators that round values nobody sees (``hidden`` in standards.yaml) may have so many times more."""
LONG_SUMS = 8.0
"""So are float32 gradients that are sums of many terms (``long_sums``)."""
SECOND_WORST, SECOND_TYPICAL = 10.0, 2.0
"""The error may be so many times that of another implementation, the largest and the typical one."""


def judge(
    api: str,
    name: str,
    bench: Value,
    device: Value,
    bench_dtype: str,
    device_dtype: str,
    *,
    changed: Sequence[Array] = (),
    second: Array | None = None,
    input_dtype: str = "",
    integer_step: int = 0,
) -> TensorResult:
    """Verdict of one output or gradient.

    Args:
        api: bare name of the API, ``"matmul"``: it says which standard holds.
        name: of the tensor, ``"Torch.matmul.0.forward.output.0"``.
        bench, device: values of both sides. Types that numpy has not (bfloat16, float8) come widened to float32.
        bench_dtype, device_dtype: what the tensors were, ``"torch.bfloat16"``; of scalars the name of the Python type.
        changed: results of the bench on inputs that were changed by one unit of round-off of `input_dtype`, each of the shape
            of `bench`: how much the operator makes of such a change is its condition.
        second: result of another implementation of the same dtype as the device's: an error that it makes as well is not held
            against the device.
        input_dtype: the coarsest float type among the inputs; without it the device's result has it.
        integer_step: integers may differ by so much: an operator that quantizes rounds, and a value between two may go either way.
    """
    if not isinstance(bench, np.ndarray) or not isinstance(device, np.ndarray):
        return _scalar(name, bench, device, bench_dtype, device_dtype)
    standard = standards.standard_of(api, device_dtype)
    metrics = _metrics(bench, device, device_dtype, standard)
    old = old_status(*convert_to_working_types(bench, device, device_dtype), device_dtype, metrics)
    status, message, measured = _verdict(api, name, bench, device, device_dtype, standard, changed, second, input_dtype, integer_step)
    units = None if measured is None else max(measured.units, measured.most)
    return TensorResult(name, device.shape, bench_dtype, device_dtype, metrics, standard, status, message, old, units)


def _scalar(name: str, bench: Value, device: Value, bench_dtype: str, device_dtype: str) -> TensorResult:
    """Values of Python are equal or not; floats up to the rounding of the device's."""
    if bench is None:
        return TensorResult(name, (), "", "", status=SKIP, message="the bench has no result", old_status=SKIP)
    old = PASS if type(bench) is type(device) and _equal(bench, device) else ERROR
    metrics: dict[str, Metric] = {"error_rate": 0} if old == PASS else {}
    if isinstance(bench, np.ndarray) or isinstance(device, np.ndarray) or type(bench) is not type(device):
        text = f"the bench's result is a {type(bench).__name__}, the device's a {type(device).__name__}"
        return TensorResult(
            name, np.shape(device) if isinstance(device, np.ndarray) else (), bench_dtype, device_dtype, metrics, "", ERROR, text, old
        )
    close = _equal(bench, device) or (
        isinstance(bench, float | complex) and isinstance(device, float | complex) and abs(bench - device) <= 2.0**-20 * abs(bench)
    )
    text = "" if close else f"bench {bench!r}, device {device!r}"[:200]
    return TensorResult(name, (), bench_dtype, device_dtype, metrics, "", PASS if close else ERROR, text, old)


def _equal(one: object, other: object) -> bool:
    return bool(one == other) or (one != one and other != other)


def _metrics(bench: Array, device: Array, device_dtype: str, standard: str) -> dict[str, Metric]:
    if bench.shape != device.shape or not bench.size:
        return {}
    if _family(bench) != _family(device):
        return {}
    if not _is_float(bench):
        return {"error_rate": error_rate(bench, device)}
    return dict(float_metrics(bench, device, device_dtype, *dict.fromkeys((standard, standards.BENCHMARK))))


def _is_float(values: Array) -> bool:
    return values.dtype.kind in "fc"


Verdict = tuple[str, str, Measured | None]


def _verdict(
    api: str, name: str, bench: Array, device: Array, device_dtype: str, standard: str, changed: Sequence[Array],
    second: Array | None, input_dtype: str, integer_step: int,
) -> Verdict:  # fmt: skip
    if bench.shape != device.shape:
        return ERROR, f"the bench's result has the shape {bench.shape}, the device's {device.shape}", None
    if _family(bench) != _family(device):
        return ERROR, f"the bench's result is of type {bench.dtype.name}, the device's {plain_name(device_dtype)}", None
    if not bench.size:
        return PASS, "", None
    changed = [np.asarray(other) for other in changed if np.shape(other) == bench.shape]
    kind = float_type(device_dtype)
    if not _is_float(bench) or kind is None:
        return *_exact(bench, device, changed if standards.belongs(api, "decides") else (), integer_step), None
    bench_values, device_values = bench, device
    if np.iscomplexobj(bench_values) or standards.belongs(api, "signs"):
        wide = np.complex128 if np.iscomplexobj(bench) else np.float64
        bench_values, device_values, *changed = (values.astype(wide, copy=False) for values in (bench_values, device_values, *changed))
    finite, status, message = _nonfinite(bench_values, device_values, kind, changed)
    if status == ERROR:
        return ERROR, message, None
    if standard == standards.BINARY and ".backward." not in name:
        different = finite.copy()
        for part, bench_block, device_block in blocks(different.reshape(-1), bench_values.reshape(-1), device_values.reshape(-1)):
            part &= round_to(bench_block, kind) != device_block
        if different.any():
            return ERROR, _lines(message, f"{_count(different)}; this API moves values, and changes none"), None
        return status, message, Measured()
    inputs = float_type(input_dtype) or kind
    if standards.belongs(api, "signs"):
        device_values = _align_signs(bench_values, device_values)
    unit = max(inputs.round_off, 2.0**-52)
    measured = measure(bench_values, device_values, kind, changed, unit, finite)
    verdict, text = _by_condition(measured, _limits(api, name, kind, inputs), kind, bool(changed))
    if verdict != PASS and second is not None and second.shape == bench.shape:
        alike = measure(bench_values, second, kind, changed, unit, finite)
        if measured.units <= SECOND_WORST * alike.units and measured.typical <= SECOND_TYPICAL * alike.typical:
            verdict, text = PASS, _lines(text, f"the second implementation errs alike ({alike.units:.3g} units)")
    if verdict == ERROR and ".backward." in name and standards.belongs(api, "signs"):
        verdict, text = WARNING, _lines(text, "nothing determines the sign of the vectors, which these gradients depend on")
    return max(status, verdict, key=(PASS, WARNING, ERROR).index), _lines(message, text), measured


def _align_signs(bench: Array, device: Array) -> Array:
    """The device's vectors with the signs (phases) of the bench's: columns, or rows where these then fit better."""
    if bench.ndim < 2:
        return device
    fits = [device]
    for axis in (-2, -1):
        with np.errstate(all="ignore"):
            product = (bench * np.conj(device)).sum(axis, keepdims=True)
            fits.append(device * np.where(product == 0, 1, product / np.abs(product)))
    return min(fits, key=lambda values: float(np.abs(np.where(np.isfinite(values - bench), values - bench, 0)).sum()))


def _family(values: Array) -> str:
    kind = values.dtype.kind
    return "integer" if kind in "iu" else kind


def _exact(bench: Array, device: Array, changed: Sequence[Array], step: int) -> tuple[str, str]:
    """Integers and truth values are equal, but where an operator computes first and rounding decides then what comes out (``decides`` in
    standards.yaml): there, where changed inputs give another result."""
    different = bench != device
    if step and bench.dtype.kind in "iu":
        different &= np.abs(bench.astype(np.int64) - device.astype(np.int64)) > step
    if not different.any():
        return PASS, ""
    if _is_explained(different, changed, bench, device):
        return PASS, f"{_count(different)}, where round-off of the inputs decides"
    return ERROR, _count(different)


def _is_explained(different: Array, changed: Sequence[Array], bench: Array, device: Array) -> bool:
    """Is every difference where changed inputs give another result too? By chance it may have come out the same way every time: of
    those that are not, there may be as many as of those that are."""
    moves, hits = np.zeros(bench.shape, bool), np.zeros(bench.shape, bool)
    for other in changed:
        moves |= other != bench
        hits |= other == device
    known, unknown = int((different & moves).sum()), int((different & ~moves).sum())
    return unknown <= known and bool((different & hits).any())


def _count(different: Array) -> str:
    where = tuple(int(i) for i in np.unravel_index(int(np.argmax(different)), different.shape))
    return f"{int(different.sum())} of {different.size} elements differ, the first at {where}"


def _nonfinite(bench: Array, device: Array, kind: FloatType, changed: Sequence[Array]) -> tuple[Array, str, str]:
    """Elements finite on both sides, status and message: the others agree, as far as the type can hold the bench's value.

    A value beyond the type's range may have come out infinite, or as the largest one there is where the type has no infinity; one that
    round-off brings to the other side of that border may be either. A kernel that saturates where the type has Inf gets a warning: some
    devices are meant to, but what waits for an Inf (a loss scaler) sees none.
    """
    finite = np.ones(bench.shape, bool)
    wrong, first, stable, start, saturated = 0, -1, False, 0, 0
    with np.errstate(all="ignore"):
        for part, *values in blocks(finite.reshape(-1), bench.reshape(-1), device.reshape(-1), *(other.reshape(-1) for other in changed)):
            bad, firm, cut = _disagree(part, *values, kind=kind)
            saturated += cut
            if bad is not None:
                first = start + int(np.argmax(bad)) if first < 0 else first
                wrong, stable = wrong + int(bad.sum()), stable or firm
            start += part.size
    if not wrong:
        if saturated:
            return finite, WARNING, f"{saturated} of {finite.size} elements are the largest value of {kind.name} in place of Inf"
        return finite, PASS, ""
    position = tuple(int(i) for i in np.unravel_index(first, finite.shape))
    text = f"NaN and Inf: {wrong} of {finite.size} elements disagree, the first at {position}: "
    text += f"bench {bench[position]:.6g}, device {device[position]:.6g}"
    if stable:
        return finite, ERROR, text
    return finite, WARNING, f"{text}; round-off of the inputs decides whether they are finite"


def _disagree(finite: Array, bench: Array, device: Array, *changed: Array, kind: FloatType) -> tuple[Array | None, bool, int]:
    """Of one block: where NaN and Inf disagree, None where they do not, is that so whatever round-off does, and how many elements are
    the largest value in place of Inf? Writes to `finite`."""
    if np.isfinite(device).all() and (np.abs(bench) < kind.largest / 2).all():
        return None, False, 0
    wide = np.complex128 if np.iscomplexobj(bench) else np.float64
    bench, device = bench.astype(wide, copy=False), device.astype(wide, copy=False)
    rounded = round_to(bench, kind)
    np.logical_and(np.isfinite(rounded), np.isfinite(device), out=finite)
    same = (rounded == device) | (np.isnan(rounded) & np.isnan(device))
    if finite.all():
        return None, False, 0
    size = np.maximum(np.abs(bench.real), np.abs(bench.imag))
    moved, unstable = np.zeros(bench.shape), np.zeros(bench.shape, bool)
    for other in changed:
        moved = np.maximum(moved, np.where(np.isfinite(other), np.abs(other - bench), 0.0))
        unstable |= np.isfinite(other) != np.isfinite(bench)
    near = np.isfinite(bench) & (size * (1 + 4 * kind.round_off) + COARSE * moved >= kind.largest)
    if not kind.infinite:
        same |= (size > kind.largest) & ~np.isnan(bench) & (np.isnan(device) | (np.abs(device) == kind.largest))
    if np.iscomplexobj(bench):
        same |= ~np.isfinite(bench) & ~np.isfinite(device)
    right_side = np.isinf(device) | (np.abs(device) >= kind.largest * (1 - 8 * kind.round_off))
    same |= near & right_side & (np.sign(device.real) == np.sign(bench.real))
    wrong = ~finite & ~same
    beyond = np.isfinite(bench) & (size * (1 - 4 * kind.round_off) - COARSE * moved > kind.largest)
    saturated = int((beyond & same & np.isfinite(device)).sum()) if kind.infinite else 0
    return (wrong if wrong.any() else None), bool((wrong & ~unstable).any()), saturated


class _Limits(NamedTuple):
    """Of `condition` units.

    Attributes:
        good: up to this a result passes.
        bearable: up to this it is a warning.
        strict: the kernel should compute in float32 and round once.
    """

    good: float
    bearable: float
    strict: bool


def _limits(api: str, name: str, kind: FloatType, inputs: FloatType) -> _Limits:
    inner = internal(kind)
    if standards.belongs(api, "casts"):
        limit = INSIDE * kind.round_off / inner.round_off
        return _Limits(limit, limit, inner is not kind)
    loose = HIDDEN if standards.belongs(api, "hidden") or standards.belongs(api, "signs") else 1.0
    if kind.name == "float32" and ".backward." in name and standards.belongs(api, "long_sums"):
        loose = LONG_SUMS
    if inner is kind:
        return _Limits(UNITS * loose, UNITS * loose, False)
    own = kind.round_off / inner.round_off  # units of the type itself
    # results narrower than the inputs: the operator, or autocast, casts these first
    if inputs.bits <= kind.bits and standards.belongs(api, "inside_backward" if ".backward." in name else "inside"):
        return _Limits(INSIDE * own, COARSE_INSIDE * own, True)
    if standards.belongs(api, "weights") and ".backward." not in name:
        return _Limits(WEIGHTS * own, COARSE * own, False)
    return _Limits(COARSE * loose * own, COARSE * own if loose == 1 else math.inf, False)


def _by_condition(measured: Measured, limits: _Limits, kind: FloatType, known: bool) -> tuple[str, str]:
    inner, good = internal(kind), limits.good
    condition = "" if known else "; the condition was not measured"
    bias = measured.bias if limits.strict else measured.drift
    if abs(bias) > 1 and limits.bearable < math.inf:
        side = "large" if bias > 0 else "small"
        return ERROR, f"all results are too {side}, on average by {abs(measured.mean):.3g} times the round-off of {kind.name}{condition}"
    size = (
        f"{measured.units:.3g} times the round-off of {inner.name} and the condition, at element {measured.at}; up to {good:.3g} is right"
    )
    if measured.units > limits.bearable:
        return ERROR, f"the error is {measured.error:.3g}, {size}{condition}"
    if measured.units > good:
        return WARNING, f"errors as of intermediate results in {kind.name}: {size}{condition}"
    if measured.most > good and (limits.strict or inner is kind):
        return WARNING, f"small results are wrong: {measured.most:.3g} times round-off and condition; up to {good:.3g} is right{condition}"
    return PASS, ""


def _lines(*texts: str) -> str:
    return "\n".join(text for text in texts if text)
