"""Values rounded to a floating point type that numpy may not have."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from msprobe_engine.core.dtypes import FloatType

Array = npt.NDArray[Any]


def round_to(values: Array, kind: FloatType) -> Array:
    """Values rounded to nearest even of a type, as float64 (complex128 for complex values); too large ones become infinite.

    Subnormal numbers of the type are kept. Exact for values that are float64 themselves.
    """
    if np.iscomplexobj(values):
        wide = values.astype(np.complex128)
        rounded: Array = np.empty_like(wide)
        rounded.real, rounded.imag = round_to(wide.real, kind), round_to(wide.imag, kind)
        return rounded
    exact = values.astype(np.float64)
    if kind.bits == 53:
        return exact
    exponent = np.maximum(np.frexp(exact)[1] - 1, kind.least)
    unit = np.ldexp(1.0, exponent - kind.bits + 1)
    with np.errstate(invalid="ignore", over="ignore"):
        rounded = np.rint(exact / unit) * unit
        rounded = np.where(np.isfinite(exact), rounded, exact)
        return np.where(np.abs(rounded) > kind.largest, np.copysign(np.inf, rounded), rounded)
