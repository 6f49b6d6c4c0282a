"""The columns of the existing tool (mindstudio-probe 8.1.1 and 26.2.0), as arithmetic on two arrays.

Values, types of intermediate results and edge cases are those of that tool, so that its own readers find the cells they know; our verdict
does not rest on them (`judge`). b is the bench, d the device, e = abs(d - b), in the type numpy gives a mix of both; of bfloat16 tensors
both sides are float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from msprobe_engine.accuracy import standards
from msprobe_engine.accuracy.dtypes import FLOAT32, float_type, plain
from msprobe_engine.accuracy.results import Metric

Array = npt.NDArray[Any]

COLUMNS = {
    "cosine": "余弦相似度", "max_abs": "最大绝对误差", "hundredth": "双百指标", "thousandth": "双千指标", "ten_thousandth": "双万指标",
    "error_rate": "二进制一致错误率", "balance": "误差均衡性", "rmse": "均方根误差", "small_errors": "小值域错误占比",
    "max_rel": "相对误差最大值", "mean_rel": "相对误差平均值", "nonfinite_errors": "inf/nan错误率", "rel_errors": "相对误差错误率",
    "abs_errors": "绝对误差错误率", "max_ulp": "ULP误差最大值", "mean_ulp": "ULP误差平均值", "ulp_share": "ULP误差大于阈值占比",
}  # fmt: skip
"""Key -> column of the details file, in its order."""

BY_STANDARD = {
    standards.BINARY: ("error_rate",),
    standards.ABSOLUTE: ("nonfinite_errors", "rel_errors", "abs_errors"),
    standards.ULP: ("max_ulp", "mean_ulp", "ulp_share"),
    standards.THOUSANDTH: ("thousandth",),
    standards.BENCHMARK: ("balance", "rmse", "small_errors", "max_rel", "mean_rel"),
}
RELATIVE = {"hundredth": 0.01, "thousandth": 0.001, "ten_thousandth": 0.0001}
"""Limits of the relative error of the shares of good elements."""
COSINE_LIMIT, MAX_ABS_LIMIT = 0.99, 0.001
BFLOAT16_EPS = 2.0**-8
ZERO = float(np.finfo(float).eps)
"""A tensor whose largest value is up to this counts as zero for the cosine."""


def single_in_double(kind: str, dimensions: int) -> bool:
    """Relative errors of a bfloat16 scalar: the existing tool's numpy (1.x) makes float64 of a scalar and a number of Python."""
    return kind == "bfloat16" and dimensions == 0


def working(bench: Array, device: Array, device_dtype: str) -> tuple[Array, Array]:
    """Both sides in the types the metrics are computed in."""
    if plain(device_dtype) == "bfloat16":
        with np.errstate(over="ignore"):
            return bench.astype(np.float32, copy=False), device.astype(np.float32, copy=False)
    return bench, device


def cosine(bench: Array, device: Array) -> float | None:
    """Cosine similarity, each side divided by its largest absolute value first; NaN where either holds NaN or Inf.

    None where it says nothing: a single element, or a side that is zero (`one_side_zero` tells these apart).
    """
    b, d = bench.reshape(-1), device.reshape(-1)
    if d.size == 1:
        return None
    with np.errstate(all="ignore"):
        top_d, top_b = np.abs(d).max(), np.abs(b).max()
        if top_d <= ZERO or top_b <= ZERO:
            return None
        x, y = _wide(d) / top_d, _wide(b) / top_b
        value = np.dot(x, y) / (np.linalg.norm(x) * np.linalg.norm(y))
    if np.iscomplexobj(value):
        value = value.real
    return float(np.clip(value, -1, 1))


def _wide(values: Array) -> Array:
    return values.astype(np.complex128 if np.iscomplexobj(values) else np.float64)


def one_side_zero(bench: Array, device: Array) -> str:
    """``"bench"`` or ``"device"`` where exactly that side counts as zero; empty else."""
    if bench.size <= 1:
        return ""
    with np.errstate(invalid="ignore"):
        b, d = bool(np.abs(bench).max() <= ZERO), bool(np.abs(device).max() <= ZERO)
    return "" if b == d else "bench" if b else "device"


def error_rate(bench: Array, device: Array) -> float:
    """Share of elements that are not equal; NaN equals nothing."""
    return float((bench != device).sum() / bench.size)


class FloatMetrics:
    """Metrics of one float tensor; what several of them need is computed once.

    Args:
        bench, device: of one shape, not empty, from `working`.
        device_dtype: what the device's tensor was, ``"torch.bfloat16"``.
    """

    def __init__(self, bench: Array, device: Array, device_dtype: str) -> None:
        self.bench, self.device, self.kind = bench, device, plain(device_dtype)
        with np.errstate(all="ignore"):
            self.error = np.abs(device - bench)
            self._abs_bench = np.abs(bench)
            self._scale = self._abs_bench + (BFLOAT16_EPS if self.kind == "bfloat16" else np.finfo(bench.dtype).eps)
            if single_in_double(self.kind, bench.ndim):
                self._scale = np.asarray(self._abs_bench, np.float64) + BFLOAT16_EPS
            self.relative = np.abs(self.error / self._scale)
        self._finite: Array | None = None
        self._small: Array | None = None

    def common(self) -> dict[str, Metric]:
        """Those that are taken whatever the standard: cosine, largest error, shares of good elements."""
        found: dict[str, Metric] = {"cosine": cosine(self.bench, self.device), "max_abs": float(self.error.max())}
        for key, limit in RELATIVE.items():
            found[key] = float(np.sum(self.relative < limit) / self.relative.size)
        return found

    def of(self, standard: str) -> dict[str, Metric]:
        """Those of one standard."""
        with np.errstate(all="ignore"):
            return _TAKEN[standard](self)

    @property
    def finite(self) -> Array:
        """Finite on both sides, the bench rounded to the device's type (of bfloat16 to float32)."""
        if self._finite is None:
            with np.errstate(all="ignore"):
                self._finite = np.isfinite(self.device) & np.isfinite(self.bench.astype(self.device.dtype))
        return self._finite

    @property
    def small(self) -> Array:
        """Finite and of a small bench."""
        if self._small is None:
            self._small = (self._abs_bench <= standards.of_type(standards.SMALL_VALUE, self.kind)) & self.finite
        return self._small

    def _benchmark(self) -> dict[str, Metric]:
        small, finite, size = self.small, self.finite, self.error.size
        left_out = small | ~finite
        atol = standards.of_type(standards.SMALL_ATOL[standards.BENCHMARK], self.kind)
        # numpy 1 takes a number and a 0-dimensional float32 array together as float64
        error, relative = (e.astype(np.float64) if e.ndim == 0 else e for e in (self.error, self.error / self._scale))
        mean = np.mean(np.square(np.where(left_out, 0, error)))
        rmse = np.sqrt(mean * (size / (size - np.sum(left_out) + 0.0001) + 0.0001))
        difference = self.device - self.bench.astype(self.device.dtype)
        kept = np.where(left_out, -1, relative)
        kept = kept[kept >= 0]
        return {
            "balance": float(abs(np.sum(difference > 0) - np.sum(difference < 0)) / size), "rmse": float(rmse),
            "small_errors": _share(small & (self.error > atol), small),
            "max_rel": float(kept.max()) if kept.size else 0, "mean_rel": float(np.mean(kept)) if kept.size else 0,
        }  # fmt: skip

    def _absolute(self) -> dict[str, Metric]:
        rtol = standards.of_type(standards.RTOL, self.kind)
        atol = standards.of_type(standards.SMALL_ATOL[standards.ABSOLUTE], self.kind)
        normal, nonfinite = self.finite & ~self.small, ~self.finite
        if self.kind == "bfloat16":
            high = getattr(float_type("bfloat16"), "largest", FLOAT32.largest)
            low = -high
        else:
            low, high = np.finfo(self.device.dtype).min, np.finfo(self.device.dtype).max
        bench, device = np.clip(self.bench.astype(self.device.dtype), low, high), np.clip(self.device, low, high)
        good = (np.abs(device - bench) / self._scale <= rtol) | (np.isnan(self.device) & np.isnan(bench))
        return {
            "nonfinite_errors": _share(nonfinite & ~good, nonfinite),
            "rel_errors": _share(normal & (self.error / self._scale > rtol), normal),
            "abs_errors": _share(self.small & (self.error > atol), self.small),
        }

    def _ulp(self) -> dict[str, Metric]:
        bits, least = standards.ULP_BITS.get(self.kind, standards.ULP_BITS["float32"])
        limit = standards.ULP_LIMIT.get(self.kind, 1)
        wide = np.float64 if self.kind == "float32" else np.float32
        exponent = np.maximum(np.where(self._abs_bench == 0, 0, np.floor(np.log2(self._abs_bench))), least)
        ulps = np.abs((self.device.astype(wide) - self.bench).astype(wide) * np.exp2(-exponent + bits).astype(wide))
        return {
            "max_ulp": float(np.max(ulps)), "mean_ulp": float(np.mean(ulps)), "ulp_share": float(np.sum(ulps > limit) / ulps.size),
        }  # fmt: skip

    def _binary(self) -> dict[str, Metric]:
        return {"error_rate": error_rate(self.bench, self.device)}

    def _thousandth(self) -> dict[str, Metric]:
        return {"thousandth": float(np.sum(self.relative < RELATIVE["thousandth"]) / self.relative.size)}


_TAKEN = {
    standards.BENCHMARK: FloatMetrics._benchmark, standards.ABSOLUTE: FloatMetrics._absolute, standards.ULP: FloatMetrics._ulp,
    standards.BINARY: FloatMetrics._binary, standards.THOUSANDTH: FloatMetrics._thousandth,
}  # fmt: skip


def _share(found: Array, of: Array) -> float | int:
    """0, an integer, where there is nothing to have a share of, as the existing tool has it."""
    count = np.sum(of)
    return 0 if count == 0 else float(np.sum(found) / count)


def float_metrics(bench: Array, device: Array, device_dtype: str, *wanted: str) -> Mapping[str, Metric]:
    """Common metrics and those of the standards `wanted` of a float tensor of one shape, not empty; of complex ones and types without a
    standard (float64) the common ones alone."""
    b, d = working(bench, device, device_dtype)
    if np.iscomplexobj(b) or np.iscomplexobj(d):
        return FloatMetrics(b.astype(np.complex128), d.astype(np.complex128), device_dtype).common()
    taken = FloatMetrics(b, d, device_dtype)
    found = taken.common()
    if taken.kind in (*standards.NARROW, *standards.FLOAT8):
        for standard in wanted:
            found.update(taken.of(standard))
    return found
