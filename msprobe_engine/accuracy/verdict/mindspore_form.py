"""The existing tool's details file for MindSpore (mindstudio-probe 8.1.1): three numbers of a result, and what it makes of two of them.

======================== =================================================================================
``Cosine``               (1e-8 + a . b) / (1e-8 + |a| |b|), judged: above 0.99
``MaxAbsErr``            largest of |a - b|, judged: below 0.001 (its manual says 0.0001)
``MaxRelativeErr``       largest of |a - b| / |b|, where b is 0 of |a - b| / 1e-8; not judged
======================== =================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from msprobe_engine.accuracy.result_forms import BLANK, RESULT_COLUMNS, Form, form_of, number, text_cell
from msprobe_engine.accuracy.results import ERROR, PASS, TensorResult

COLUMNS = {"cosine": "Cosine", "max_abs": "MaxAbsErr", "max_rel": "MaxRelativeErr"}
DETAILS_COLUMNS = ("API Name", "Bench Dtype", "Tested Dtype", "Shape", *COLUMNS.values(), "Status", "Message")
_EPSILON, _COSINE, _MAX_ABS = 1e-8, 0.99, 1e-3


@dataclass(frozen=True)
class MindSporeForm(Form):
    """See `Form`."""

    def _details_row(self, tensor: TensorResult, _source: str = "") -> list[str]:
        cells = (
            tensor.name,
            tensor.bench_dtype or BLANK,
            tensor.device_dtype or BLANK,
            str(tensor.shape) if tensor.device_dtype else BLANK,
        )
        numbers = [number(value if isinstance(value := tensor.metrics.get(key), (int, float)) else None) for key in COLUMNS]
        return [*(text_cell(cell) for cell in cells), *numbers, tensor.old_status, text_cell(tensor.message)]


def form_for(framework: str, compat: str | None, precision: int = 14) -> Form:
    """`form_of` for a dump of that framework."""
    if framework == "mindspore" and compat is not None:
        return MindSporeForm(RESULT_COLUMNS, DETAILS_COLUMNS, compat, precision)
    return form_of(compat, precision)


def existing_metrics(bench: npt.NDArray[Any], device: npt.NDArray[Any]) -> dict[str, float]:
    """The three numbers of a result; none where shapes differ or there are no elements. float64, complex values as they are."""
    if bench.shape != device.shape or not bench.size:
        return {}
    wide = np.complex128 if bench.dtype.kind == "c" else np.float64
    bench_values, device_values = bench.astype(wide).reshape(-1), device.astype(wide).reshape(-1)
    with np.errstate(all="ignore"):
        size, error = np.abs(bench_values), np.abs(bench_values - device_values)
        cosine = (_EPSILON + np.dot(bench_values, device_values).real) / (
            _EPSILON + np.linalg.norm(bench_values) * np.linalg.norm(device_values)
        )
        return {"cosine": float(cosine), "max_abs": float(error.max()), "max_rel": float((error / (size + (size == 0) * _EPSILON)).max())}


def existing_status(metrics: Mapping[str, float]) -> str:
    """What the existing tool makes of `existing_metrics`. NaN is an error."""
    if not metrics:
        return ERROR
    return PASS if metrics["cosine"] > _COSINE and metrics["max_abs"] < _MAX_ABS else ERROR
