"""By which standard an API is judged, and the constants of the standards (mindstudio-probe 8.1.1 and 26.2.0)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from msprobe_engine.core.dtypes import FLOATS, plain_name

ABSOLUTE, BINARY, ULP, THOUSANDTH, BENCHMARK = "absolute_threshold", "binary_consistency", "ulp", "thousandth", "benchmark"
STANDARDS = (ABSOLUTE, BINARY, ULP, THOUSANDTH, BENCHMARK)

OLD, NEW = "8.1.1", "26.2.0"
VERSIONS = (OLD, NEW)
"""Of the existing tool, where their rules differ."""

NARROW = ("float16", "bfloat16", "float32")
"""Types that have standards of their own; of all others only the common metrics are taken."""
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
WITHOUT = ("float64", "complex64", "complex128")
"""Types that `api_precision_compare` skips."""

SMALL_VALUE = {"float16": 2.0**-10, "bfloat16": 2.0**-10, "float32": 2.0**-20}
"""Values up to this are small: they are judged by their absolute error."""
SMALL_ATOL = {
    ABSOLUTE: {"float16": 2.0**-16, "bfloat16": 1e-16, "float32": 2.0**-30},
    BENCHMARK: {"float16": 1e-16, "bfloat16": 1e-16, "float32": 2.0**-30},
}
RTOL = {"float16": 2.0**-10, "bfloat16": 2.0**-8, "float32": 2.0**-20}
LEAST_ERROR = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-14}
"""Smallest denominator of a ratio of two errors."""
ULP_BITS = {name: (FLOATS[name].bits - 1, FLOATS[name].least) for name in NARROW}
"""Bits of the fraction and smallest exponent, for the ULP metrics."""
ULP_LIMIT = {"float16": 1, "bfloat16": 1, "float32": 32}

MEAN_ULP, ULP_SHARE, NARROW_ULP_SHARE = 64.0, 0.05, 0.001
THOUSANDTH_SHARE = 0.999
RATIOS = {"small_value": 2.0, "rmse": 2.0, "max_rel": 10.0, "mean_rel": 2.0, "balance": 2.0}
"""Largest ratios of the errors of two implementations."""
_LEVELS = {"L1": {"max_rel": 5.0, "mean_rel": 1.5, "rmse": 1.5}, "L2": {"max_rel": 2.0, "mean_rel": 1.2, "rmse": 1.2}}
_LEVEL_OF = {
    "L1": frozenset({"embedding", "npu_fusion_attention_grad", "npu_fusion_attention", "scatter_", "scatter_add_"}),
    "L2": frozenset({
        "addmm", "npu_cross_entropy_loss", "npu_cross_entropy_loss_backward", "GELU", "layer_norm", "matmul", "mm", "index", "one_hot",
        "sum", "npu_rms_norm", "npu_rms_norm_backward", "nonzero",
    }),
}  # fmt: skip


def of_type(table: Mapping[str, float], dtype: str) -> float:
    """The constant of a type (``"torch.bfloat16"``); types that have none take float32's."""
    return table.get(plain_name(dtype), table["float32"])


@cache
def _lists() -> Mapping[str, frozenset[str]]:
    """``standards.yaml``, read once: name of the list -> bare names of APIs."""
    import yaml

    raw = yaml.safe_load(files("msprobe_engine.accuracy").joinpath("standards.yaml").read_text("utf-8"))
    return {name: frozenset(word for entry in entries for word in _forms(entry)) for name, entries in raw.items()}


def _forms(entry: str) -> tuple[str, ...]:
    return (entry[:-1], entry[:-1] + "_") if entry.endswith("*") else (entry,)


def is_listed(api: str, name: str) -> bool:
    """Is the API (bare, ``"softmax"`` or ``"linalg.inv"``) in that list of ``standards.yaml``?"""
    return api in _lists()[name]


def belongs(api: str, name: str) -> bool:
    """The same for the lists of our own verdict; an entry stands for all forms of an operator: ``add`` for ``__radd__`` and ``add_``."""
    names = _lists()[name]
    plain_name = api.strip("_")
    forms = {api, plain_name}
    if api.startswith("__"):
        forms |= {plain_name[1:]} if plain_name[:1] in ("r", "i") else set()
    return not forms.isdisjoint(names)


def standard_of(api: str, dtype: str, version: str = OLD, input_dtype: str = "") -> str:
    """The standard of an API.

    Args:
        api: bare name, ``"matmul"``.
        dtype: of the device's result, ``"torch.float32"``.
        version: of `VERSIONS`; the newer one looks at types first, so that its lists hold for no float type of 16 bits and more.
        input_dtype: float8 inputs have the absolute threshold there.
    """
    name = plain_name(dtype)
    if version == NEW:
        if name in FLOAT8:
            return ULP
        if plain_name(input_dtype) in FLOAT8:
            return ABSOLUTE
        if name in (*NARROW, "float64"):
            return BENCHMARK
    if name not in (*NARROW, *WITHOUT, *FLOAT8):
        return BINARY
    return next((standard for standard in STANDARDS[:-1] if is_listed(api, standard)), BENCHMARK)


def ratio_limit(metric: str, api: str, version: str = OLD) -> float:
    """Largest ratio of a metric of `RATIOS` between two implementations; the newer version is stricter with some APIs."""
    if version == NEW:
        for level, names in _LEVEL_OF.items():
            if api in names:
                return _LEVELS[level].get(metric, RATIOS[metric])
    return RATIOS[metric]
