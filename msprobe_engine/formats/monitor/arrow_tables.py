"""Rows of a monitor as Arrow tables: what the Parquet sink writes, what `Run.to_arrow` gives, and how Parquet files are read as a run.

One row per tensor and step. Columns: ``rank``, ``step``, ``family``, ``vpp_stage``, ``name``, ``micro_step`` (-1: none), ``phase``,
``detail`` (state of the optimizer, tag), ``shape``, ``dtype``, then one float64 per statistic, null where the row has no such number.
Scalars are rows of the family ``scalar`` with the number in ``value``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from msprobe_engine.core.errors import needs_extra
from msprobe_engine.core.io.input_files import read_input
from msprobe_engine.core.io.json_text import parse_json
from msprobe_engine.formats.monitor.reader_json import checked_alert, checked_key
from msprobe_engine.formats.monitor.run_layout import Launch, describe_skipped_launch, launch_of, of_other_runs
from msprobe_engine.formats.monitor.series import Builder, Key, Part, Series, Table, series_of, whole

SCALAR, VALUE = "scalar", "value"
RUN, ALERTS = b"msprobe.run", b"msprobe.alerts"
"""Keys in the metadata of a file: what the run says about itself, and the alerts of its steps, both JSON."""
_KEY = ("vpp_stage", "name", "micro_step", "phase", "detail")
_PLACE = ("rank", "step", "family", *_KEY, "shape", "dtype")
_LARGEST = 1 << 31
_WHAT = "a column that every file of a monitor has is missing or has another type: left out"


def arrow() -> Any:
    """The package pyarrow.

    Raises:
        MissingExtraError: it is not installed.
    """
    with needs_extra("pyarrow", "parquet", "a table of a monitor as Parquet or Arrow"):
        import pyarrow
        import pyarrow.compute
        import pyarrow.parquet
    return pyarrow


def table_of(
    rank: int,
    steps: Any,
    family: str,
    keys: Sequence[Key],
    values: Mapping[str, Any],
    kinds: Sequence[tuple[str, str]] | None = None,
) -> Any:
    """An Arrow table of rows of one family.

    Args:
        steps: one number, or one per row.
        values: statistic to float64 [rows]; NaN is a NaN.
        kinds: shape and dtype of the rows; None: not known.
    """
    pa = arrow()
    n = len(keys)

    def texts(of: Iterable[str]) -> Any:
        return pa.array(list(of), pa.string())

    columns: dict[str, Any] = {
        "rank": pa.array(np.full(n, rank, np.int32)),
        "step": pa.array(np.broadcast_to(np.asarray(steps, np.int64), (n,)).copy()),
        "family": texts([family] * n),
        "vpp_stage": pa.array([key.vpp_stage for key in keys], pa.int32()),
        "name": texts(key.name for key in keys),
        "micro_step": pa.array([key.micro_step for key in keys], pa.int32()),
        "phase": texts(key.phase for key in keys),
        "detail": texts(key.detail for key in keys),
        "shape": texts(kind[0] for kind in kinds) if kinds else pa.nulls(n, pa.string()),
        "dtype": texts(kind[1] for kind in kinds) if kinds else pa.nulls(n, pa.string()),
    }
    columns |= {op: pa.array(np.asarray(column, np.float64)) for op, column in values.items()}
    return pa.table(columns)


def concatenate_tables(tables: Sequence[Any]) -> Any:
    """One table of several, whose statistics may differ."""
    return arrow().concat_tables(tables, promote_options="default")


class ParquetSource:
    """Parts of ranks, ``rank{R}_{launch}_{first}-{last}.parquet``."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.problems: dict[str, Counter[str]] = {}
        found: dict[int, list[tuple[tuple[float, int], Path, Any, Launch]]] = {}
        for path in files:
            part = self._open(path)
            if part is not None:
                info = _json(part, RUN)
                began, rank = info.get("started_unix"), whole(info.get("rank"))
                first = arrow().compute.min(part.column("step")).as_py()
                order = float(began) if isinstance(began, (int, float)) else 0.0, whole(first) or 0
                found.setdefault(rank if rank is not None else -1, []).append((order, path, part, launch_of(info)))
        self._parts: dict[int, list[tuple[Path, Any]]] = {}
        self._others: dict[int, list[Launch]] = {}
        for rank, parts in found.items():
            parts.sort(key=lambda one: one[0])
            launches = list({launch.key: launch for *_, launch in parts}.values())
            self._others[rank] = of_other_runs(launches)
            left = {launch.key for launch in self._others[rank]}
            self._parts[rank] = [(path, part) for _, path, part, launch in parts if launch.key not in left]
            for other in self._others[rank]:
                self._add_problem(parts[-1][1], describe_skipped_launch(other, launches[-1]))

    def _open(self, path: Path) -> Any:
        pa = arrow()
        try:
            part = pa.parquet.read_table(pa.BufferReader(read_input(path, _LARGEST)))
            usable = all(name in part.column_names for name in _PLACE) and pa.types.is_integer(part.schema.field("step").type)
        except (OSError, ValueError, pa.ArrowException) as error:
            self._add_problem(path, f"cannot be read: {type(error).__name__}")
            return None
        if not usable:
            self._add_problem(path, _WHAT)
            return None
        if without := part.column("step").null_count:
            self._add_problem(path, "row without a step: left out", without)
            part = part.filter(pa.compute.is_valid(part.column("step")))
        return part

    def _add_problem(self, path: Path, what: str, times: int = 1) -> None:
        self.problems.setdefault(str(path), Counter())[what] += times

    def ranks(self) -> list[int]:
        return sorted(self._parts)

    def info(self, rank: int) -> dict[str, Any]:
        parts = self._parts.get(rank)
        return _json(parts[-1][1], RUN) if parts else {}

    def paths(self, rank: int) -> list[Path]:
        return [path for path, _ in self._parts.get(rank, [])]

    def other_runs(self, rank: int) -> list[Launch]:
        return self._others.get(rank, [])

    def families(self, rank: int) -> list[str]:
        found = {name: None for _, part in self._parts.get(rank, []) for name in part.column("family").unique().to_pylist()}
        return [str(name) for name in found if name != SCALAR]

    def read(self, rank: int, family: str) -> dict[str, Table]:
        builder = Builder(family)
        for path, part in self._parts.get(rank, []):
            rows = _rows(part, family)
            keys = [checked_key(*key) for key in zip(*(rows.column(name).to_pylist() for name in _KEY))]
            ids = np.array([-1 if key is None else builder.keys[key] for key in keys], np.int64)
            if wrong := int((ids < 0).sum()):
                self._add_problem(path, "row without a name: left out", wrong)
            for key, shape, dtype in zip(keys, rows.column("shape").to_pylist(), rows.column("dtype").to_pylist()):
                if key is not None and shape is not None and dtype is not None:
                    builder.add_kind(key, str(shape), str(dtype))
            builder.add(Part(ids, _integers(rows.column("step")), _numbers(rows)), path)
        return {family: builder.table()}

    def scalars(self, rank: int) -> dict[str, Series]:
        found: dict[str, dict[int, float]] = {}
        for _, part in self._parts.get(rank, []):
            rows = _rows(part, SCALAR)
            values = _numbers(rows).get(VALUE, np.full(len(rows), np.nan))
            for name, step, value in zip(rows.column("name").to_pylist(), _integers(rows.column("step")).tolist(), values.tolist()):
                found.setdefault(str(name), {})[step] = value
        return {name: series_of(values) for name, values in found.items()}

    def alerts(self, rank: int) -> list[dict[str, Any]]:
        out = []
        for path, part in self._parts.get(rank, []):
            problems: Counter[str] = Counter()
            alerts = _json(part, ALERTS).get("alerts") or []
            out += [found for alert in alerts if (found := checked_alert(alert, problems)) is not None]
            for what, times in problems.items():
                self._add_problem(path, what, times)
        return out


def _rows(part: Any, family: str) -> Any:
    return part.filter(arrow().compute.equal(part.column("family"), family))


def _integers(column: Any) -> Any:
    return column.to_numpy(zero_copy_only=False).astype(np.int64) if len(column) else np.empty(0, np.int64)


def _numbers(rows: Any) -> dict[str, Any]:
    """Statistics that the rows have; all others of the file are null there."""
    pa = arrow()
    names = [field.name for field in rows.schema if field.name not in _PLACE and pa.types.is_floating(field.type)]
    return {
        name: np.asarray(column.fill_null(float("nan")).to_numpy(zero_copy_only=False), np.float64)
        for name in names
        if (column := rows.column(name)).null_count < len(column)
    }


def _json(part: Any, key: bytes) -> dict[str, Any]:
    try:
        found = parse_json((part.schema.metadata or {}).get(key, b"{}").decode("utf-8", "replace"))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def metadata(info: Mapping[str, Any], alerts: Sequence[Mapping[str, Any]]) -> dict[bytes, bytes]:
    """Of a file that is written."""
    return {RUN: json.dumps(info).encode(), ALERTS: json.dumps({"alerts": list(alerts)}).encode()}
