"""Tensors of a dump as a pandas table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msprobe_engine.core.errors import needs_extra
from msprobe_engine.core.process.garbage_collection import collection_paused

COLUMNS = (
    *("step", "rank", "record", "kind", "direction", "module", "place", "dtype", "shape"),
    *("max", "min", "mean", "norm", "nan_count", "inf_count", "nonfinite", "digest", "md5", "data_name"),
    *("parent", "micro_step", "is_recompute"),
)
"""Columns of `frame`. ``max``, ``min``, ``mean`` and ``norm`` are float64: integers beyond 2**53 are rounded (`Tensor.max` is exact),
and no value is NaN as a NaN is; ``nonfinite`` tells them apart. Counts and ``micro_step`` are Int64, ``is_recompute`` is boolean,
both with ``<NA>`` where the dump does not say. ``shape`` holds tuples."""
_FLOATS = ("max", "min", "mean", "norm")
_TYPES: dict[str, str | None] = {
    **dict.fromkeys(_FLOATS, "float64"),
    **dict.fromkeys(("nan_count", "inf_count", "micro_step"), "Int64"),
    "step": "int64",
    "nonfinite": "bool",
    "is_recompute": "boolean",
    "rank": None,  # int64 unless a directory does not say its rank
}


def pandas() -> Any:
    """The module.

    Raises:
        MissingExtraError: it is not installed.
    """
    with needs_extra("pandas", "pandas", "a table of tensors"):
        import pandas as pd
    return pd


def frame(rows: Iterable[tuple[Any, ...]]) -> Any:
    """A ``pandas.DataFrame`` of rows that have the values of `COLUMNS`.

    Raises:
        MissingExtraError: pandas is not installed.
    """
    pd = pandas()
    with collection_paused():
        columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
        columns.update((name, list(values)) for name, values in zip(COLUMNS, zip(*rows)))
        made = {name: pd.Series(_floats(v) if name in _FLOATS else v, dtype=_TYPES.get(name, "object")) for name, v in columns.items()}
        return pd.DataFrame(made, columns=list(COLUMNS))


def _floats(values: list[Any]) -> list[float]:
    return [float("nan") if value is None else float(value) for value in values]
