"""The verdict of the existing tool (mindstudio-probe 8.1.1; 26.2.0 has the same rules), flaws included: for those who need its columns.

It rests on the cosine and on fixed limits of the absolute and relative error, whatever the standard of the API says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy.typing as npt

from msprobe_engine.accuracy.results import ERROR, PASS, SKIP, WARNING, Metric
from msprobe_engine.accuracy.verdict.metrics import BY_STANDARD, COSINE_LIMIT, MAX_ABS_LIMIT, RELATIVE, one_side_zero
from msprobe_engine.accuracy.verdict.standards import BINARY, NARROW, NEW, OLD
from msprobe_engine.core.dtypes import plain_name

Array = npt.NDArray[Any]

_CLASSES = (("float16", "float32", "float64", "longdouble"), ("bool", "uint8"), ("int32", "int64"))
_CLASSES_OF_NEW = (*_CLASSES[:2], ("int8", "int32", "int64"))
_EXACT = ("bool", "uint8", "int8", "int16", "uint16", "uint32", "int32", "int64", "uint64")
_SIXTEEN = ("float16", "bfloat16")


def old_status(bench: Array, device: Array, device_dtype: str, metrics: Mapping[str, Metric], version: str = OLD) -> str:
    """Verdict of a tensor.

    Args:
        bench, device: as `metrics.convert_to_working_types` has them.
    """
    if bench.shape != device.shape or not comparable(bench.dtype.name, device.dtype.name, version):
        return ERROR
    if bench.size == 0:
        return SKIP if version == NEW else ERROR
    if bench.dtype.name in _EXACT:
        return PASS if metrics["error_rate"] == 0 else ERROR
    return _walk(metrics, device_dtype, bool(one_side_zero(bench, device)), version)[0]


def comparable(bench: str, device: str, version: str = OLD) -> bool:
    """Does the existing tool compare arrays of these types of numpy? Of others it writes no numbers, and an error."""
    return any(bench in names and device in names for names in (_CLASSES_OF_NEW if version == NEW else _CLASSES))


def _walk(metrics: Mapping[str, Metric], device_dtype: str, one_side: bool, version: str) -> tuple[str, tuple[str, ...]]:
    """Status, and the metrics that are looked at until it is known; a cosine of NaN is an error in 8.1.1 and none in 26.2.0."""
    cosine, largest = metrics["cosine"], metrics["max_abs"]
    unknown = version == NEW and cosine is not None and cosine != cosine
    if one_side or (cosine is not None and not cosine > COSINE_LIMIT and not unknown):
        return ERROR, ("cosine",)
    if largest is not None and largest < MAX_ABS_LIMIT:
        return PASS, ("cosine", "max_abs")
    good = {key: bool((metrics[key] or 0) > 1 - limit) for key, limit in RELATIVE.items()}
    if plain_name(device_dtype) in _SIXTEEN:
        if not good["hundredth"]:
            return ERROR, ("cosine", "max_abs", "hundredth")
        return (PASS if good["thousandth"] else WARNING), ("cosine", "max_abs", "hundredth", "thousandth")
    seen = ("cosine", "max_abs", "thousandth", "ten_thousandth")
    if plain_name(device_dtype) not in ("float32", "float64"):
        return PASS, seen
    return (ERROR if not good["thousandth"] else PASS if good["ten_thousandth"] else WARNING), seen


def select_written_metrics(
    metrics: Mapping[str, Metric], standard: str, device_dtype: str, size: int, status: str, version: str = OLD
) -> frozenset[str]:
    """Keys of the metrics that the existing tool writes; the cells of all others are blank.

    Args:
        standard: by its version (`standards.standard_of`).
        size: number of elements.
        status: `old_status`.
    """
    if "cosine" not in metrics:
        return frozenset({"error_rate", "max_abs"} & metrics.keys())  # the latter of `quantization_api_list`
    one_side = metrics["cosine"] is None and size > 1 and status == ERROR
    seen = set(_walk(metrics, device_dtype, one_side, version)[1])
    if plain_name(device_dtype) in NARROW:
        seen |= set(BY_STANDARD[standard]) if standard != BINARY else {"error_rate"}
    return frozenset(seen)
