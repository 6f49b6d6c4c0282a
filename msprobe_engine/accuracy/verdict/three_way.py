"""Rules of the three-way comparison: errors of two implementations against one bench, row by row (spec of the pre-check, a.10)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from msprobe_engine.accuracy.results import ERROR, PASS
from msprobe_engine.accuracy.verdict import standards
from msprobe_engine.accuracy.verdict.metrics import COLUMNS
from msprobe_engine.core.dtypes import plain_name

Row = Mapping[str, str]

ALGORITHMS = {
    standards.BENCHMARK: "标杆比对法", standards.ABSOLUTE: "绝对阈值法", standards.BINARY: "二进制一致法", standards.ULP: "ULP误差比对法",
    standards.THOUSANDTH: "双千指标法",
}  # fmt: skip
VALUE_COLUMNS = {
    "small_errors": "小值域错误比值", "rmse": "均方根误差比值", "max_rel": "相对误差最大值比值", "mean_rel": "相对误差平均值比值",
    "balance": "误差均衡性比值", "nonfinite_errors": "inf/nan错误率", "rel_errors": "相对误差错误率", "abs_errors": "绝对误差错误率",
    "error_rate": "二进制一致错误率", "mean_ulp": "ULP误差平均值", "ulp_share": "ULP误差大于阈值占比",
    "ulp_ratio": "ULP误差大于阈值占比比值", "thousandth": "双千指标",
}  # fmt: skip
STATUS_COLUMNS = {
    "small_errors": "小值域判定结果", "rmse": "均方根误差判定结果", "max_rel": "相对误差最大值判定结果",
    "mean_rel": "相对误差平均值判定结果", "balance": "误差均衡性判定结果", "nonfinite_errors": "inf/nan判定结果",
    "rel_errors": "相对误差判定结果",
    "abs_errors": "绝对误差判定结果", "error_rate": "二进制一致错误率判定结果", "ulp_ratio": "ULP误差判定结果",
    "thousandth": "双千指标判定结果",
}  # fmt: skip
_RATIO_LIMITS = {"small_errors": "small_value", "rmse": "rmse", "max_rel": "max_rel", "mean_rel": "mean_rel", "balance": "balance"}
_SHOWN_ONLY = ("balance",)


class NoValue(Exception):
    """A cell that the standard needs is blank, or no number; the text says which."""


@dataclass
class Judged:
    """What came of one pair of rows.

    Attributes:
        standard: one of `standards.STANDARDS`.
        status: pass or error.
        values: numbers (or cells, as text) by key of `VALUE_COLUMNS`.
        statuses: by key of `STATUS_COLUMNS`.
        reasons: why it is no pass.
    """

    standard: str
    status: str = PASS
    values: dict[str, float | str] = field(default_factory=dict)
    statuses: dict[str, str] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)

    def decide(self, key: str, value: float | str, good: bool, reason: str, counts: bool = True) -> None:
        """Enter a value with its verdict."""
        self.values[key] = value
        self.statuses[key] = PASS if good else ERROR
        if not good and counts:
            self.status = ERROR
            self.reasons.append(reason)


def judge_rows(api: str, dtype: str, npu: Row, gpu: Row, version: str, strict: bool) -> Judged:
    """Judge one row.

    Args:
        api: bare name.
        dtype: of the device's tensor.
        npu, gpu: rows of the details files of both implementations.
        version: of the rules, one of `standards.VERSIONS`.
        strict: exactly the existing tool's rules; else what is no worse than the other implementation's passes everywhere.

    Raises:
        NoValue: a metric of the standard is missing.
    """
    float8 = "torch.float8_e4m3fn" if version == standards.NEW and npu[COLUMNS["rel_errors"]].strip() else ""
    standard = standards.standard_of(api, dtype, version, float8)
    judged = Judged(standard)
    _RULES[standard](judged, api, dtype, npu, gpu, version, strict)
    return judged


def _value(row: Row, key: str, blank: float | None = None) -> float:
    cell = row.get(COLUMNS[key], "").strip()
    if not cell and blank is not None:
        return blank
    try:
        return float(cell)
    except ValueError:
        raise NoValue(f"column {COLUMNS[key]} is blank" if not cell else f"column {COLUMNS[key]}: {cell[:40]!r} is no number") from None


def _ratio(npu: float, gpu: float, dtype: str) -> float:
    return abs(npu) / max(abs(gpu), standards.of_type(standards.LEAST_ERROR, dtype))


def _finite(value: float) -> bool:
    return math.isfinite(value)


def _alike(npu: float, gpu: float) -> bool:
    """Values that are not both finite: the same infinity, or NaN on both sides."""
    return npu == gpu or (math.isnan(npu) and math.isnan(gpu))


def _benchmark(judged: Judged, api: str, dtype: str, npu: Row, gpu: Row, version: str, strict: bool) -> None:
    blank = 0.0 if strict and version == standards.NEW else None
    for key, metric in _RATIO_LIMITS.items():
        npu_value, gpu_value = _value(npu, key, blank), _value(gpu, key, blank)
        limit = standards.ratio_limit(metric, api, version)
        if _finite(npu_value) and _finite(gpu_value):
            ratio = _ratio(npu_value, gpu_value, dtype)
            good = ratio <= limit or (not strict and npu_value <= gpu_value)
        else:
            ratio, good = math.nan, _alike(npu_value, gpu_value)
        counts = key not in _SHOWN_ONLY
        judged.decide(
            key, ratio, good, f"{COLUMNS[key]}: {npu_value:.6g} against {gpu_value:.6g}, ratio {ratio:.4g}; at most {limit:g}", counts
        )


def _absolute(judged: Judged, api: str, dtype: str, npu: Row, gpu: Row, version: str, strict: bool) -> None:  # noqa: ARG001
    for key in ("nonfinite_errors", "rel_errors", "abs_errors"):
        npu_value = _value(npu, key)
        good = npu_value == 0 or (not strict and npu_value <= _value(gpu, key))
        judged.decide(key, npu_value, good, f"{COLUMNS[key]}: {npu_value:.6g}; must be 0")


def _binary(judged: Judged, api: str, dtype: str, npu: Row, gpu: Row, version: str, strict: bool) -> None:  # noqa: ARG001
    npu_value = _value(npu, "error_rate")
    good = npu_value == 0 or (not strict and npu_value <= _value(gpu, "error_rate"))
    judged.decide("error_rate", npu[COLUMNS["error_rate"]], good, f"{COLUMNS['error_rate']}: {npu_value:.6g}; must be 0")


def _thousandth(judged: Judged, api: str, dtype: str, npu: Row, gpu: Row, version: str, strict: bool) -> None:  # noqa: ARG001
    npu_value, limit = _value(npu, "thousandth"), standards.THOUSANDTH_SHARE
    good = npu_value >= limit or (not strict and npu_value >= _value(gpu, "thousandth"))
    judged.decide("thousandth", npu[COLUMNS["thousandth"]], good, f"{COLUMNS['thousandth']}: {npu_value:.6g}; at least {limit:g}")


def _ulp(judged: Judged, api: str, dtype: str, npu: Row, gpu: Row, version: str, strict: bool) -> None:  # noqa: ARG001
    if plain_name(dtype) in standards.FLOAT8:
        share = _value(npu, "ulp_share", 0.0)
        judged.values |= {"ulp_share": share}
        good = share < standards.NARROW_ULP_SHARE
        judged.decide("ulp_ratio", " ", good, f"{COLUMNS['ulp_share']}: {share:.6g}; below {standards.NARROW_ULP_SHARE:g}")
        return
    blank = 0.0 if strict and version == standards.NEW else None
    mean, other_mean = _value(npu, "mean_ulp", blank), _value(gpu, "mean_ulp", blank)
    share, other_share = _value(npu, "ulp_share", blank), _value(gpu, "ulp_share", blank)
    means = (_finite(mean) and _finite(other_mean)) or _alike(mean, other_mean)
    finite = _finite(share) and _finite(other_share)
    ratio = _ratio(share, other_share, dtype) if finite else math.nan
    consistent = means and (finite or _alike(share, other_share))
    good = consistent
    if good:
        single = plain_name(dtype) == "float32"
        limit = standards.ULP_SHARE if single else standards.NARROW_ULP_SHARE
        good = (single and mean < standards.MEAN_ULP) or share < limit or ratio < 1.0
        good = good or (not strict and (share <= other_share and (mean <= other_mean or _alike(mean, other_mean))))
    judged.values |= {"mean_ulp": mean, "ulp_share": share}
    judged.decide("ulp_ratio", ratio, good, f"ULP: mean {mean:.6g} against {other_mean:.6g}, share {share:.6g} against {other_share:.6g}")
    if strict and not consistent:
        del judged.statuses["ulp_ratio"]  # it leaves this cell blank


_RULES = {
    standards.BENCHMARK: _benchmark, standards.ABSOLUTE: _absolute, standards.BINARY: _binary, standards.THOUSANDTH: _thousandth,
    standards.ULP: _ulp,
}  # fmt: skip
