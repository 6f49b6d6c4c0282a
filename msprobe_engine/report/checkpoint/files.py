"""A comparison of checkpoints as files: JSON, CSV, HTML, and the JSON of the existing tool."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.io.output_files import write_report
from msprobe_engine.core.io.safe_cells import safe_cell
from msprobe_engine.core.log import one_line
from msprobe_engine.find.checkpoint.result import GOLDEN, RUN, Result, sort_by_distance
from msprobe_engine.find.checkpoint.tensor_result import TensorResult
from msprobe_engine.report.checkpoint.page import page

NAME = "ckpt_diff"
COLUMNS = (
    "name", "status", "by", "layer", "kind", "group", "state", "dtype_a", "dtype_b", "shape_a", "shape_b", "numel", "changed", "share",
    "l2", "rel_norm", "cos", "max_abs", "max_at", "norm_a", "norm_b", "beyond", "unrounded", "nan_a", "nan_b", "inf_a", "inf_b",
    "missing_a", "missing_b", "drift_a", "drift_b", "name_a", "name_b", "hint", "note",
)  # fmt: skip
"""Of the CSV file. Of tensors on one side the status is ``only in the run`` or ``only in the golden run``; of what was left out
``not compared``."""


def json_text(result: Result, only_different: bool = False, top: int | None = None) -> str:
    """The report as JSON: `Result.to_json`, and ``tensors``, all pairs by name, unless `only_different`."""
    head = json.dumps(result.to_json(top), indent=1, allow_nan=False)
    if only_different:
        return f"{head}\n"
    # text by text: of 100,000 tensors the dictionaries would take more memory than the comparison
    lines = ",\n".join(f"  {json.dumps(t.name)}: {json.dumps(t.to_json(), allow_nan=False)}" for t in result.tensors)
    return f'{head[:-2]},\n "tensors": {{\n{lines}\n }}\n}}\n'


def csv_text(result: Result, only_different: bool = False, top: int | None = None) -> str:
    """A line per tensor (RFC 4180). Text that a spreadsheet would take for a formula begins with an apostrophe."""
    rows: list[Sequence[object]] = [COLUMNS]
    rows += [[_of(tensor, column) for column in COLUMNS] for tensor in _select_tensors(result, only_different, top)]
    blank = [None] * (len(COLUMNS) - 3)
    for side, names in ((RUN, result.only_in_a), (GOLDEN, result.only_in_b)):
        rows += [[name, f"only in {side}", *blank, None] for name in names]
    rows += [[name, "not compared", *blank, part.reason] for part in result.not_compared for name in part.names]
    return "".join(",".join(_cell(value) for value in row) + "\r\n" for row in rows)


def _select_tensors(result: Result, only_different: bool, top: int | None) -> Sequence[TensorResult]:
    if top is not None:
        return sort_by_distance(result.different, top)
    return [t for t in result.tensors if not t.equal] if only_different else result.tensors


def _of(tensor: TensorResult, column: str) -> object:
    value = getattr(tensor, column)
    return "x".join(map(str, value)) if isinstance(value, tuple) else value


def _cell(value: object) -> str:
    if value is None:
        return ""
    return safe_cell(one_line(value)) if isinstance(value, str) else repr(value)


def write_all(result: Result, directory: Path, only_different: bool = False, top: int | None = None) -> list[Path]:
    """``ckpt_diff.json``, ``.csv`` and ``.html`` in a directory.

    Raises:
        SinkError: one of them cannot be written.
    """
    makers: tuple[Callable[..., str], ...] = (json_text, csv_text, page)
    return [write_report(path, make(result, only_different, top)) for path, make in zip(paths(directory), makers)]


def paths(directory: Path) -> list[Path]:
    """The files that `write_all` writes."""
    return [directory / f"{NAME}.{suffix}" for suffix in ("json", "csv", "html")]


def existing_form(result: Result) -> dict[str, Any]:
    """The JSON of ``config_check --compare A B`` of the existing tool: weights that both sides have, by name.

    Of tensors of other shapes `numel` and `shape` are lists of both sides', and `l2` and `cos` null.
    """
    form: dict[str, Any] = {}
    for t in result.tensors:
        if t.state or t.group != "model":
            continue
        if t.shape_a != t.shape_b:
            numel: Any = [math.prod(t.shape_a), math.prod(t.shape_b)]
            form[t.name] = {"l2": None, "cos": None, "numel": numel, "shape": [list(t.shape_a), list(t.shape_b)]}
        else:
            data = t.to_json()
            form[t.name] = {"l2": data["l2"], "cos": data["cos"], "numel": t.numel, "shape": list(t.shape_a)}
    return form


def refuse_existing(path: Path) -> None:
    """As the existing tool does.

    Raises:
        UsageError: there is such a file.
    """
    if path.exists():
        raise UsageError(f"{path} exists; name another file with -o, or remove it")
