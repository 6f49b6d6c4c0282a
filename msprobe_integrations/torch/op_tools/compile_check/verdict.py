"""Does a tensor of compiled code belong to that of the same code uncompiled?

Compiled code need not have the bits of uncompiled code, and may be closer to the truth: a fused kernel keeps in float32 what would have
been rounded to bfloat16 on the way. So both are held against a run in float64, whose own sensitivity to round-off is measured. A compiled
result is wrong when it errs by more than the operations account for and more than the uncompiled one. With a threshold it is
simpler: the difference of the two, relative to the largest value, against the threshold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from msprobe_engine.accuracy.compile_report import FAILED, PASSED, SKIPPED, WARNED, TensorDiff
from msprobe_engine.accuracy.results import ERROR, PASS, SKIP, WARNING
from msprobe_engine.accuracy.verdict.judge import UNITS, judge
from msprobe_integrations.torch.tensors.arrays import as_array, kind_of

Array = npt.NDArray[Any]

WITHOUT_TRUTH = {"torch.float64": 1e-9, "torch.complex128": 1e-9, "torch.float32": 1e-4, "torch.complex64": 1e-4, "torch.float16": 1e-2}
OTHERWISE = 5e-2
"""Largest difference, relative to the largest value, where float64 could not be run."""
VOID = 0.25
"""A relative error of uncompiled code beyond this says that the float64 run computed something else (other random numbers)."""
FEW = 16
"""Errors of tensors with fewer elements are small by luck: they may be as large as is usual in this run."""
WORSE = 2.0
"""Errors may be so many times those of uncompiled code; twice that is a failure, between them a warning."""
_STATUS = {PASS: PASSED, WARNING: WARNED, ERROR: FAILED, SKIP: SKIPPED}


def verdict(
    eager: Any,
    compiled: Any,
    truth: Any,
    changed: Sequence[Any] = (),
    *,
    threshold: float | None = None,
    unit: str = "",
    usual: float = 0.0,
    name: str = "",
) -> TensorDiff:
    """Compare one tensor.

    Args:
        eager, compiled: of the same code.
        truth: of the same code in float64; None: it was not run.
        changed: of float64 runs whose inputs and parameters were changed by one unit of round-off.
        threshold: largest difference relative to the largest finite value of `eager`; None: judged by precision.
        unit: the type by whose unit they were changed.
        usual: relative error of uncompiled code that is usual in this run.
    """
    if not isinstance(eager, torch.Tensor) or not isinstance(compiled, torch.Tensor):
        same = type(eager) is type(compiled) and bool(eager == compiled or (eager != eager and compiled != compiled))
        message = "" if same else f"eager {eager!r}, compiled {compiled!r}"[:200]
        return TensorDiff(
            0.0 if same else math.inf, 0.0, 0.0, same, (), PASSED if same else FAILED, message, type(compiled).__name__, name=name
        )
    kind, shape = kind_of(compiled), tuple(compiled.shape)
    if eager.shape != compiled.shape or eager.dtype != compiled.dtype:
        text = f"eager is {kind_of(eager)} {tuple(eager.shape)}, compiled {kind} {shape}"
        return TensorDiff(math.inf, math.inf, math.inf, False, (tuple(eager.shape), shape), FAILED, text, kind, math.inf, name=name)
    e, c = as_array(eager), as_array(compiled)
    numbers = _numbers(e, c)
    status, message, extra = _judge_tensor(e, c, truth, changed, kind, threshold, numbers[3], unit, usual)
    return TensorDiff(*numbers[:3], status in (PASSED, WARNED), shape, status, message, kind, numbers[3], *extra, name)


def noise(eager: Any, truth: Any) -> float | None:
    """Relative error (root mean square) of an uncompiled result; None for tensors of few elements, and where it cannot be said."""
    if not isinstance(eager, torch.Tensor) or not isinstance(truth, torch.Tensor) or eager.numel() < FEW or eager.shape != truth.shape:
        return None
    return _relative(as_array(eager), as_array(truth)) if eager.dtype.is_floating_point else None


def _numbers(e: Array, c: Array) -> tuple[float, float, float, float]:
    """Largest and mean absolute, largest relative difference, and the largest by the largest value."""
    wide = np.complex128 if "c" in (e.dtype.kind, c.dtype.kind) else np.float64
    golden, target = e.astype(wide), c.astype(wide)
    finite = np.isfinite(golden) & np.isfinite(target)
    if not finite.any():
        return 0.0, 0.0, 0.0, 0.0
    with np.errstate(all="ignore"):
        size, diff = np.abs(golden[finite]), np.abs(golden[finite] - target[finite])
        largest, top = float(diff.max()), float(size.max())
        relative = float(np.where(diff > 0, diff / np.maximum(size, np.finfo(np.float64).tiny), 0.0).max())
    return largest, float(diff.mean()), relative, (largest / top if top else (math.inf if largest else 0.0))


Judged = tuple[str, str, tuple[float | None, float | None, float | None]]


def _judge_tensor(
    e: Array, c: Array, truth: Any, changed: Sequence[Any], kind: str, threshold: float | None, scaled: float, unit: str, usual: float
) -> Judged:
    nothing = (None, None, None)
    if np.array_equal(e, c, equal_nan=e.dtype.kind in "fc"):
        return PASSED, "", (*_errors(e, c, truth), 0.0 if truth is not None else None)
    if e.dtype.kind not in "fc":
        return FAILED, f"{int((e != c).sum())} of {e.size} elements differ", nothing
    pattern = _pattern(e, c)
    t = as_array(truth) if isinstance(truth, torch.Tensor) and tuple(truth.shape) == e.shape else None
    errors = _errors(e, c, truth)
    if threshold is not None or t is None or (errors[0] is not None and errors[0] > VOID):
        if pattern:
            return FAILED, pattern, nothing
        limit = WITHOUT_TRUTH.get(kind, OTHERWISE) if threshold is None else threshold
        why = "" if threshold is not None else ", no float64 run to hold them against"
        if scaled <= limit:
            return PASSED, "", (*errors, None)
        return FAILED, f"largest difference by largest value {scaled:.3g}, {limit:g} is allowed{why}", (*errors, None)
    others = [as_array(other) for other in changed if isinstance(other, torch.Tensor) and tuple(other.shape) == e.shape]
    judged = judge("module", "", t, c, "torch.float64", kind, changed=others, second=e, input_dtype=unit)
    status, message = _STATUS[judged.status], judged.message
    if (
        status == FAILED
        and pattern
        and judge("module", "", t, e, "torch.float64", kind, changed=others, input_dtype=unit).message == message
    ):
        status, message = PASSED, "as uncompiled code: " + message
    if not pattern and errors[0] is not None and errors[1] is not None:
        if status == PASSED and judged.units is not None and judged.units > UNITS:
            status, message = _beside(e, c, t, (errors[0], errors[1]), kind, usual)
        elif status in (FAILED, WARNED) and e.size < FEW and errors[1] <= WORSE * usual:
            status, message = PASSED, ""
    return status, message, (*errors, judged.units)


def _beside(e: Array, c: Array, t: Array, errors: tuple[float, float], kind: str, usual: float) -> tuple[str, str]:
    """The verdict on errors beyond those of computing in float32: uncompiled code, that rounds between its operations, says how large
    they may be, and that all values become larger or smaller together is no rounding."""
    unit = torch.finfo(getattr(torch, kind.removeprefix("torch."))).eps / 2
    allowed = max(errors[0], unit, usual if e.size < FEW else 0.0)
    text = f"relative error {errors[1]:.3g}, uncompiled {errors[0]:.3g}"
    if errors[1] > 2 * WORSE * allowed:
        return FAILED, text
    factor = _factor(c, t) / _factor(e, t) - 1
    if e.size >= FEW and abs(factor) > max(2 * unit, 6 * max(errors) / math.sqrt(e.size)):
        return FAILED, f"all values are {abs(factor):.3g} too {'large' if factor > 0 else 'small'} beside uncompiled code; {text}"
    return (WARNED, text) if errors[1] > WORSE * allowed else (PASSED, "")


def _factor(values: Array, truth: Array) -> float:
    """By what the truth is multiplied to come closest to `values`."""
    v, t = values.astype(np.complex128).reshape(-1), truth.astype(np.complex128).reshape(-1)
    size = float(np.vdot(t, t).real)
    return float(np.vdot(t, v).real) / size if size and math.isfinite(size) else 1.0


def _pattern(e: Array, c: Array) -> str:
    """Where NaN and Inf stand in one and not in the other; empty: they agree."""
    same = (np.isnan(e) & np.isnan(c)) | (e == c) | (np.isfinite(e) & np.isfinite(c))
    if same.all():
        return ""
    at = tuple(int(i) for i in np.unravel_index(int(np.argmin(same)), same.shape))
    return f"NaN and Inf: {int((~same).sum())} of {same.size} elements disagree, the first at {at}: eager {e[at]:.6g}, compiled {c[at]:.6g}"


def _errors(e: Array, c: Array, truth: Any) -> tuple[float | None, float | None]:
    if not isinstance(truth, torch.Tensor) or tuple(truth.shape) != e.shape or e.dtype.kind not in "fc":
        return None, None
    t = as_array(truth)
    return _relative(e, t), _relative(c, t)


def _relative(values: Array, truth: Array) -> float | None:
    wide = np.complex128 if "c" in (values.dtype.kind, truth.dtype.kind) else np.float64
    v, t = values.astype(wide), truth.astype(wide)
    finite = np.isfinite(v) & np.isfinite(t)
    with np.errstate(all="ignore"):
        size = float(np.sqrt(np.mean(np.abs(t[finite]) ** 2))) if finite.any() else 0.0
        return float(np.sqrt(np.mean(np.abs(v[finite] - t[finite]) ** 2))) / size if size else None
