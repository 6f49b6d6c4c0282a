"""The columns of the existing tool (mindstudio-probe 8.1.1 and 26.2.0), as arithmetic on two arrays.

Values, types of intermediate results and edge cases are those of that tool, so that its own readers find the cells they know; our verdict
does not rest on them (`judge`). b is the bench, d the device, e = abs(d - b), in the type numpy gives a mix of both; of bfloat16 tensors
both sides are float32.

Tensors of up to `BLOCK` elements are looked at as a whole, sums are numpy's own. Of larger ones counts and extremes are the same, and means
(cosine, rmse, mean_rel, mean_ulp) are those of the blocks taken together in float64, which differ from numpy's float32 sums by their
round-off, about 1e-6 of the value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from msprobe_engine.accuracy.results import Metric
from msprobe_engine.accuracy.verdict import standards
from msprobe_engine.core.dtypes import FLOAT32, float_type, plain_name

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
BLOCK = 1 << 20
"""Elements that are looked at at a time."""
ZERO = float(np.finfo(float).eps)
"""A tensor whose largest value is up to this counts as zero for the cosine."""


def single_in_double(kind: str, dimensions: int) -> bool:
    """Relative errors of a bfloat16 scalar: the existing tool's numpy (1.x) makes float64 of a scalar and a number of Python."""
    return kind == "bfloat16" and dimensions == 0


def convert_to_working_types(bench: Array, device: Array, device_dtype: str) -> tuple[Array, Array]:
    """Both sides in the types the metrics are computed in."""
    if plain_name(device_dtype) == "bfloat16":
        with np.errstate(over="ignore"):
            return bench.astype(np.float32, copy=False), device.astype(np.float32, copy=False)
    return bench, device


def blocks(*arrays: Array) -> Iterator[tuple[Array, ...]]:
    """Arrays of one shape, those of more than `BLOCK` elements in flat parts."""
    size = arrays[0].size
    if size <= BLOCK:
        yield arrays
        return
    flat = [values.reshape(-1) for values in arrays]
    for start in range(0, size, BLOCK):
        yield tuple(values[start : start + BLOCK] for values in flat)


def _largest(values: Array) -> Any:
    """Largest absolute value; NaN where there is one."""
    with np.errstate(invalid="ignore"):
        return np.max([np.abs(part).max() for (part,) in blocks(values)])


def cosine(bench: Array, device: Array) -> float | None:
    """Cosine similarity, each side divided by its largest absolute value first; NaN where either holds NaN or Inf.

    None where it says nothing: a single element, or a side that is zero (`one_side_zero` tells these apart).
    """
    if device.size == 1:
        return None
    with np.errstate(all="ignore"):
        top_d, top_b = _largest(device), _largest(bench)
        if top_d <= ZERO or top_b <= ZERO:
            return None
        if device.size <= BLOCK:
            device_unit, bench_unit = _wide(device.reshape(-1)) / top_d, _wide(bench.reshape(-1)) / top_b
            value = np.dot(device_unit, bench_unit) / (np.linalg.norm(device_unit) * np.linalg.norm(bench_unit))
        else:
            product, squares_d, squares_b = 0.0, 0.0, 0.0
            for bench_block, device_block in blocks(bench, device):
                device_unit, bench_unit = _wide(device_block) / top_d, _wide(bench_block) / top_b
                product += np.dot(device_unit, bench_unit)
                squares_d += np.vdot(device_unit, device_unit).real
                squares_b += np.vdot(bench_unit, bench_unit).real
            value = product / (np.sqrt(squares_d) * np.sqrt(squares_b))
    if np.iscomplexobj(value):
        value = value.real
    return float(np.clip(value, -1, 1))


def _wide(values: Array) -> Array:
    return values.astype(np.complex128 if np.iscomplexobj(values) else np.float64)


def one_side_zero(bench: Array, device: Array) -> str:
    """``"bench"`` or ``"device"`` where exactly that side counts as zero; empty else."""
    if bench.size <= 1:
        return ""
    bench_zero, device_zero = bool(_largest(bench) <= ZERO), bool(_largest(device) <= ZERO)
    return "" if bench_zero == device_zero else "bench" if bench_zero else "device"


def error_rate(bench: Array, device: Array) -> float:
    """Share of elements that are not equal; NaN equals nothing."""
    return float(sum(np.count_nonzero(bench_block != device_block) for bench_block, device_block in blocks(bench, device)) / bench.size)


class Mean(NamedTuple):
    """Of some values.

    Attributes:
        value: in the type in which numpy has it.
        of: how many they are.
    """

    value: Any
    of: int


Counts = Mapping[str, Any]
"""What is known of one block: counts, `Mean`, extremes, by a name."""


class FloatMetrics:
    """One block of a float tensor; what several metrics need is computed once.

    Args:
        bench, device: of one shape, not empty, from `convert_to_working_types`.
        device_dtype: what the device's tensor was, ``"torch.bfloat16"``.
    """

    def __init__(self, bench: Array, device: Array, device_dtype: str) -> None:
        self.bench, self.device, self.kind = bench, device, plain_name(device_dtype)
        with np.errstate(all="ignore"):
            self.error = np.abs(device - bench)
            self._abs_bench = np.abs(bench)
            scale = self._abs_bench + (BFLOAT16_EPS if self.kind == "bfloat16" else np.finfo(bench.dtype).eps)
            if single_in_double(self.kind, bench.ndim):
                scale = np.asarray(self._abs_bench, np.float64) + BFLOAT16_EPS
            self._scale = scale
            self.relative = self.error / scale
        self._finite: Array | None = None
        self._small: Array | None = None

    def common(self) -> dict[str, Any]:
        """For the metrics that are taken whatever the standard: largest error, numbers of good elements."""
        found: dict[str, Any] = {"max_abs": self.error.max()}
        for key, limit in RELATIVE.items():
            found[key] = np.count_nonzero(self.relative < limit)
        return found

    def of(self, standard: str) -> dict[str, Any]:
        with np.errstate(all="ignore"):
            return _TAKEN[standard][0](self)

    @property
    def finite(self) -> Array:
        """Finite on both sides, the bench rounded to the device's type (of bfloat16 to float32)."""
        if self._finite is None:
            with np.errstate(all="ignore"):
                self._finite = np.isfinite(self.device) & np.isfinite(self.bench.astype(self.device.dtype, copy=False))
        return self._finite

    @property
    def small(self) -> Array:
        """Finite and of a small bench."""
        if self._small is None:
            self._small = (self._abs_bench <= standards.of_type(standards.SMALL_VALUE, self.kind)) & self.finite
        return self._small

    def _benchmark(self) -> dict[str, Any]:
        small, finite = self.small, self.finite
        left_out = small | ~finite
        atol = standards.of_type(standards.SMALL_ATOL[standards.BENCHMARK], self.kind)
        # numpy 1 takes a number and a 0-dimensional float32 array together as float64
        error, relative = (e.astype(np.float64) if e.ndim == 0 else e for e in (self.error, self.relative))
        difference = self.device - self.bench.astype(self.device.dtype, copy=False)
        kept = np.where(left_out, -1, relative)
        kept = kept[kept >= 0]
        return {
            "above": np.count_nonzero(difference > 0), "below": np.count_nonzero(difference < 0),
            "squares": Mean(np.mean(np.square(np.where(left_out, 0, error))), error.size), "left_out": np.sum(left_out),
            "small": np.count_nonzero(small), "small_wrong": np.count_nonzero(small & (self.error > atol)),
            "max_rel": kept.max() if kept.size else 0, "mean_rel": Mean(np.mean(kept), kept.size) if kept.size else Mean(0, 0),
        }  # fmt: skip

    def _absolute(self) -> dict[str, Any]:
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
            "nonfinite": np.count_nonzero(nonfinite), "nonfinite_wrong": np.count_nonzero(nonfinite & ~good),
            "normal": np.count_nonzero(normal), "normal_wrong": np.count_nonzero(normal & (self.relative > rtol)),
            "abs": np.count_nonzero(self.small), "abs_wrong": np.count_nonzero(self.small & (self.error > atol)),
        }  # fmt: skip

    def _ulp(self) -> dict[str, Any]:
        bits, least = standards.ULP_BITS.get(self.kind, standards.ULP_BITS["float32"])
        limit = standards.ULP_LIMIT.get(self.kind, 1)
        wide = np.float64 if self.kind == "float32" else np.float32
        exponent = np.maximum(np.where(self._abs_bench == 0, 0, np.floor(np.log2(self._abs_bench))), least)
        ulps = np.abs((self.device.astype(wide) - self.bench).astype(wide) * np.exp2(-exponent + bits).astype(wide))
        return {"max_ulp": np.max(ulps), "mean_ulp": Mean(np.mean(ulps), ulps.size), "ulp_wrong": np.count_nonzero(ulps > limit)}

    def _binary(self) -> dict[str, Any]:
        return {"different": np.count_nonzero(self.bench != self.device)}

    def _thousandth(self) -> dict[str, Any]:
        return {}  # one of the common ones


class _Tensor:
    """What is known of all blocks of a tensor, and the metrics that follow."""

    def __init__(self, parts: Sequence[Counts], size: int) -> None:
        self._parts, self._size = parts, size

    def common(self) -> dict[str, Metric]:
        """Metrics from `FloatMetrics.common`, without the cosine."""
        return {"max_abs": float(self._top("max_abs")), **{key: self._count(key) / self._size for key in RELATIVE}}

    def benchmark(self) -> dict[str, Metric]:
        size, left_out = self._size, sum(part["left_out"] for part in self._parts)
        rmse = np.sqrt(self._mean("squares") * (size / (size - left_out + 0.0001) + 0.0001))
        return {
            "balance": float(abs(self._count("above") - self._count("below")) / size), "rmse": float(rmse),
            "small_errors": self._share("small"), "max_rel": _number(self._top("max_rel")), "mean_rel": _number(self._mean("mean_rel")),
        }  # fmt: skip

    def absolute(self) -> dict[str, Metric]:
        return {"nonfinite_errors": self._share("nonfinite"), "rel_errors": self._share("normal"), "abs_errors": self._share("abs")}

    def ulp(self) -> dict[str, Metric]:
        """Of units in the last place."""
        found: dict[str, Metric] = {"max_ulp": float(self._top("max_ulp")), "mean_ulp": float(self._mean("mean_ulp"))}
        return {**found, "ulp_share": self._count("ulp_wrong") / self._size}

    def binary(self) -> dict[str, Metric]:
        return {"error_rate": self._count("different") / self._size}

    def thousandth(self) -> dict[str, Metric]:
        """Of the share of good elements."""
        return {"thousandth": self._count("thousandth") / self._size}

    def _count(self, key: str) -> int:
        return sum(int(part[key]) for part in self._parts)

    def _share(self, key: str) -> float | int:
        """0, an integer, where there is nothing to have a share of, as the existing tool has it."""
        count = self._count(key)
        return 0 if count == 0 else self._count(f"{key}_wrong") / count

    def _top(self, key: str) -> Any:
        found = [part[key] for part in self._parts]
        return found[0] if len(found) == 1 or all(isinstance(value, int) for value in found) else np.max(found)

    def _mean(self, key: str) -> Any:
        if len(self._parts) == 1:
            return self._parts[0][key].value
        means: list[Mean] = [part[key] for part in self._parts if part[key].of]
        total = sum(mean.of for mean in means)
        with np.errstate(all="ignore"):
            return type(means[0].value)(sum(float(mean.value) * mean.of for mean in means) / total) if means else 0


def _number(value: Any) -> float | int:
    return value if isinstance(value, int) else float(value)


_TAKEN: Mapping[str, tuple[Callable[[FloatMetrics], dict[str, Any]], Callable[[_Tensor], dict[str, Metric]]]] = {
    standards.BENCHMARK: (FloatMetrics._benchmark, _Tensor.benchmark), standards.ABSOLUTE: (FloatMetrics._absolute, _Tensor.absolute),
    standards.ULP: (FloatMetrics._ulp, _Tensor.ulp), standards.BINARY: (FloatMetrics._binary, _Tensor.binary),
    standards.THOUSANDTH: (FloatMetrics._thousandth, _Tensor.thousandth),
}  # fmt: skip


def float_metrics(bench: Array, device: Array, device_dtype: str, *wanted: str) -> Mapping[str, Metric]:
    """Common metrics and those of the standards `wanted` of a float tensor of one shape, not empty; of complex ones and types without a
    standard (float64) the common ones alone."""
    bench_values, device_values = convert_to_working_types(bench, device, device_dtype)
    kind, complexes = plain_name(device_dtype), np.iscomplexobj(bench_values) or np.iscomplexobj(device_values)
    taken = wanted if kind in (*standards.NARROW, *standards.FLOAT8) and not complexes else ()
    parts: list[Counts] = []
    for bench_block, device_block in blocks(bench_values, device_values):
        if complexes:
            bench_block, device_block = bench_block.astype(np.complex128), device_block.astype(np.complex128)
        block = FloatMetrics(bench_block, device_block, device_dtype)
        counts = block.common()
        for standard in taken:
            counts.update(block.of(standard))
        parts.append(counts)
    tensor = _Tensor(parts, bench_values.size)
    metrics: dict[str, Metric] = {"cosine": _cosine(bench_values, device_values, complexes), **tensor.common()}
    for standard in taken:
        with np.errstate(all="ignore"):
            metrics.update(_TAKEN[standard][1](tensor))
    return metrics


def _cosine(bench: Array, device: Array, complexes: bool) -> float | None:
    if complexes and bench.size <= BLOCK:
        return cosine(bench.astype(np.complex128), device.astype(np.complex128))
    return cosine(bench, device)
