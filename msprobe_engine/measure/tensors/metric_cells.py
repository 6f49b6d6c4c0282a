"""Figures of two tensors as the cells of a table: the six metrics, and a message.

`existing_cells` has the words and digits of the existing tool, in both generations; `cells` has ours, which differ where theirs say nothing
or the wrong thing: of single elements, of NaN and Inf, of complex numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from msprobe_engine.measure import roundoff
from msprobe_engine.measure.options import OLD
from msprobe_engine.measure.tensors.metrics import Figures, relative_error

Cell = float | int | str | None
Array = npt.NDArray[Any]

UNSUPPORTED, SHAPE_UNMATCHED, NOT_AVAILABLE, NAN = "unsupported", "shape unmatched", "N/A", "Nan"
NO_TARGET_FILE = {True: "No bench data matched.", False: "NPU does not have data file."}
"""Message of a row whose target has no file; by whether the columns are those of 8.1.1. So are the others."""
NO_GOLDEN_FILE = "Bench does not have data file."
NO_GOLDEN = {True: "No bench data matched.", False: "Bench api/module unmatched."}
EMPTY = "This is empty data, can not compare."
SHAPES = "Shape of NPU and bench tensor do not match. Skipped."
POSITIONS = "The position of inf or nan in NPU and bench Tensor do not match."
DTYPES = "Dtype of NPU and bench tensor do not match."
ZERO_D = "This is type of 0-d tensor, can not calculate 'Cosine', 'EucDist', 'One Thousandth Err Ratio' and 'Five Thousandths Err Ratio'. "
_ONE = "This is a 1-d tensor of length 1."
_NAN_OF = "Cannot compare by {}, the data contains nan/inf/-inf in dump data."
_ZERO_OF = "Cannot compare by Cosine Similarity, All the data is Zero in {} dump data."
_EPSILON = float(np.finfo(np.float64).eps)


def same(word: str) -> list[Cell]:
    return [word] * 6


def twelve(value: float) -> float:
    """As the existing tool prints: 12 digits behind the point."""
    return float(f"{value:.12f}")


def existing_cells(figures: Figures, dtypes_differ: bool) -> tuple[list[Cell], str]:
    """Of tensors with at least one dimension, equal shapes, and NaN and Inf in equal places."""
    message = DTYPES if dtypes_differ else ""
    target_norm, golden_norm = math.sqrt(figures.target_squares), math.sqrt(figures.golden_squares)
    cosine: Cell
    if figures.size == 1:
        cosine, said = UNSUPPORTED, _ONE
    elif target_norm <= _EPSILON and golden_norm <= _EPSILON:
        cosine, said = 1.0, ""
    elif target_norm <= _EPSILON or golden_norm <= _EPSILON:
        cosine, said = NAN, _ZERO_OF.format("npu" if target_norm <= _EPSILON else "Bench")
    else:
        with np.errstate(all="ignore"):
            similarity = float(np.float64(figures.dot) / (np.float64(target_norm) * np.float64(golden_norm)))
        cosine, said = (
            (NAN, "Cannot compare by Cosine Similarity, the dump data has NaN.") if math.isnan(similarity) else (twelve(similarity), "")
        )
        if isinstance(cosine, float) and cosine > 0.9999:
            cosine = round(cosine, 6)
    message += said
    cells: list[Cell] = [cosine, math.sqrt(figures.difference)]
    for value, name in ((figures.worst, "MaxAbsError"), (figures.relative, "MaxRelativeError")):
        cells.append(NAN if math.isnan(value) else twelve(value))
        message += _NAN_OF.format(name) if math.isnan(value) else ""
    cells += [twelve(figures.thousandth / figures.size), twelve(figures.five / figures.size)]
    return cells, message


def existing_scalar(target: Array, golden: Array, old: bool) -> tuple[list[Cell], str]:
    """Of tensors without dimensions (26.2.0: of one element). Metrics of 8.1.1 repeat what was said before: it stands there 16 times."""
    rule = OLD if old else None
    with np.errstate(all="ignore"):
        if target.dtype.kind == "b":
            error = np.abs(target.astype(np.float64) - golden.astype(np.float64))
        else:
            error = np.abs(target - golden)
        real = tuple(side.real.astype(np.float64) if side.dtype.kind == "c" else side for side in (target, golden))
        relative = relative_error(real[0].reshape(1), real[1].reshape(1), rule)
    cells: list[Cell] = [UNSUPPORTED, UNSUPPORTED]
    message = ZERO_D * 4 if old else ZERO_D
    for value, name in ((error, "MaxAbsError"), (relative, "MaxRelativeError")):
        number = float(np.max(value))
        cells.append(NAN if math.isnan(number) else twelve(number))
        message += _NAN_OF.format(name) if math.isnan(number) else ""
    return [*cells, UNSUPPORTED, UNSUPPORTED], message * 4 if old else message


def cells(figures: Figures) -> list[Cell]:
    """Ours: a number wherever there is one."""
    counted = figures.size - figures.apart
    if not figures.size:
        return [None] * 6
    target_squares, golden_squares = figures.target_squares, figures.golden_squares
    if not target_squares and not golden_squares:
        cosine: Cell = 1.0 if counted else None
    else:
        similarity = figures.cosine
        cosine = None if math.isnan(similarity) else twelve(max(-1.0, min(1.0, similarity)))
    # elements that are apart are in no sum, but they are within no limit either
    inside = [max(0, count - figures.apart) / figures.size for count in (figures.thousandth, figures.five)]
    return [cosine, math.sqrt(figures.difference), figures.worst, figures.relative, *(twelve(share) for share in inside)]


def units(figures: Figures, dtype: str) -> float:
    """The largest difference in units in the last place, of the larger of the element it is at and the typical (root mean square)
    element; NaN for integers."""
    eps = roundoff.EPS.get(dtype, 0.0)
    if not eps or not figures.size:
        return math.nan
    typical = math.sqrt(max(figures.target_squares, figures.golden_squares) / figures.size)
    scale = max(typical, *(abs(value) for value in figures.values))
    return figures.worst / (eps * scale) if scale else 0.0


def sentence(figures: Figures, shape: Sequence[int], dtype: str, limit: float) -> str:
    """What is to be said of a pair, in one sentence; empty when it is the same up to round-off."""
    if figures.apart:
        where = f"{figures.apart} of {figures.size} elements are NaN or Inf on one side only, or of another kind"
        return f"{where} ({figures.bad_target} in the target, {figures.bad_golden} in the golden side)"
    text = ""
    if figures.bad_target:
        text = "all elements are" if figures.bad_target == figures.size else f"{figures.bad_target} of {figures.size} elements are"
        text += " the same NaN or Inf on both sides"
    distance = figures.distance
    if distance > limit:
        position = [int(i) for i in np.unravel_index(figures.at, tuple(shape))] if len(shape) and math.prod(shape) == figures.size else []
        place = f" at {position}" if position else ""
        target_value, golden_value = figures.values
        unit = units(figures, dtype)
        counted = "" if math.isnan(unit) else f", {unit:.3g} units in the last place of {dtype}"
        text += f"{'; ' if text else ''}largest difference{place}: {target_value!r} against {golden_value!r}{counted}"
        text += f"; relative to the tensor {distance:.3g}"
        text += f", round-off reaches {limit:.2g}" if limit else ""
    return text
