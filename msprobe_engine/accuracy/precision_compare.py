"""``msprobe api_precision_compare``: the details files of two pre-checks, of the same calls on two devices, against each other.

Which of two devices errs more than the other says what thresholds cannot: both round. Rows belong together by name. A row is judged by
the existing tool's rule for its API (`three_way`); where both files have our columns, our verdicts of both rows decide: what passes here
passes, and what does not passes where the other device errs alike. What cannot be compared (missing, twice there) has a row of its own.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

from msprobe_engine.accuracy.result_files import call_of
from msprobe_engine.accuracy.result_forms import BLANK, bare_api, join
from msprobe_engine.accuracy.results import ERROR, PASS, SKIP, WARNING
from msprobe_engine.accuracy.verdict import standards
from msprobe_engine.accuracy.verdict.judge import SECOND_WORST
from msprobe_engine.accuracy.verdict.metrics import COLUMNS
from msprobe_engine.accuracy.verdict.three_way import ALGORITHMS, STATUS_COLUMNS, VALUE_COLUMNS, Judged, NoValue, judge_rows
from msprobe_engine.core import dtypes
from msprobe_engine.core.errors import TextError, UnreadableFileError, UsageError
from msprobe_engine.core.io.csv_text import read_rows
from msprobe_engine.core.io.output_files import guard_writing, write_file
from msprobe_engine.core.io.regular_files import make_directories
from msprobe_engine.core.io.safe_cells import plain_name, safe_cell, utf8
from msprobe_engine.core.log import one_line

RESULT, DETAILS = "api_precision_compare_result_", "api_precision_compare_details_"
_PAIRS = (
    "small_errors", "rmse", "max_rel", "mean_rel", "balance", "nonfinite_errors", "rel_errors", "abs_errors", "error_rate",
)  # fmt: skip
RESULT_COLUMNS = ("API Name", "Forward Test Success", "Backward Test Success", "Message")
DETAILS_COLUMNS = (
    "API Name", *(column for key in _PAIRS for column in (VALUE_COLUMNS[key], STATUS_COLUMNS[key])),
    VALUE_COLUMNS["mean_ulp"], VALUE_COLUMNS["ulp_share"], VALUE_COLUMNS["ulp_ratio"], STATUS_COLUMNS["ulp_ratio"],
    VALUE_COLUMNS["thousandth"], STATUS_COLUMNS["thousandth"], "比对结果", "比对算法", "Message",
)  # fmt: skip
OUR_COLUMNS = ("Units NPU", "Units GPU", "Status NPU", "Status GPU")
_NEEDED = ("API Name", "DEVICE Dtype", *(COLUMNS[key] for key in (*_PAIRS, "mean_ulp", "ulp_share", "thousandth")))
_NOT_COMPARED = "no metrics are compared for results of this type"
_TOPK = "topk of an NPU sorts its results whatever sorted= says; the CPU does not: compare sorted results"
_SEGMENTS = (6, 7)
"""Words of the names that the existing tool takes."""


@dataclass
class Compared:
    """What came of all rows.

    Attributes:
        details: rows, cells by column.
        results: rows of the result file: name, forward, backward, message.
        counts: rows by status.
        missing: names of rows that one file has alone, and which.
        doubled: names that stand more than once in a file.
    """

    details: list[dict[str, str]] = field(default_factory=list)
    results: list[tuple[str, str, str, str]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    missing: list[tuple[str, str]] = field(default_factory=list)
    doubled: list[tuple[str, str]] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0 all pass, 1 some do not, 3 some could not be compared and all others pass."""
        if self.counts.get(ERROR) or self.counts.get(WARNING):
            return 1
        return 3 if self.missing or self.doubled or not self.counts.get(PASS) else 0

    def text(self) -> str:
        """The summary for the console."""
        counts = ", ".join(f"{status} {count}" for status, count in sorted(self.counts.items()))
        lines = [f"{len(self.details)} rows compared: {counts or 'none'}"]
        for reason, names in (("in one file only", self.missing), ("more than once in a file", self.doubled)):
            if names:
                shown = "; ".join(f"{name} ({side})" for name, side in names[:5])
                lines.append(f"{len(names)} rows {reason}, not compared: {shown}{' ...' if len(names) > 5 else ''}")
        bad = [row for row in self.details if row["比对结果"] in (ERROR, WARNING)]
        lines += [
            f"  {row['比对结果']:8}{row['API Name']}: {row['Message'].strip().splitlines()[0][:160]}" for row in bad[:20] if row["Message"]
        ]
        return "\n".join(lines)


def compare_files(npu: str | Path, gpu: str | Path, compat: str | None = None) -> Compared:
    """Compare two details files.

    Args:
        npu: of what is tested.
        gpu: of what it is held against.
        compat: version of the existing tool whose rules and rows are wanted exactly; None: ours.

    Raises:
        UsageError: a file is none, or lacks columns; with `compat` also: a row stands twice in the second file.
    """
    return compare_rows(read_details(npu), read_details(gpu), compat, str(gpu))


def read_details(path: str | Path) -> list[dict[str, str]]:
    """Rows of a details file.

    Raises:
        UsageError: it is not there, or columns are missing.
        UnreadableFileError: it cannot be read.
    """
    shown = one_line(str(path))
    try:
        lines = filter(None, read_rows(path))
        columns = next(lines, [])
        rows = [dict(zip_longest(columns, map(plain_name, line[: len(columns)]), fillvalue="")) for line in lines]
    except FileNotFoundError as error:
        raise UsageError(f"{shown}: {error.strerror}; give the details file of a pre-check") from None
    except (OSError, TextError) as error:
        raise UnreadableFileError(f"{shown}: cannot be read as a CSV file: {getattr(error, 'strerror', None) or error}") from None
    if missing := [column for column in _NEEDED if column not in columns]:
        raise UsageError(
            f"{shown}: {len(missing)} columns are missing, the first is {missing[0]!r}; give accuracy_checking_details_*.csv, of the "
            "pre-check of each device"
        )
    return rows


def compare_rows(npu: Sequence[Mapping[str, str]], gpu: Sequence[Mapping[str, str]], compat: str | None, where: str = "") -> Compared:
    """As `compare_files`, with rows that were read."""
    others: dict[str, list[Mapping[str, str]]] = {}
    for row in gpu:
        others.setdefault(row["API Name"], []).append(row)
    return _as_existing(npu, others, compat, where) if compat else _as_ours(npu, others)


def _as_ours(npu: Sequence[Mapping[str, str]], others: dict[str, list[Mapping[str, str]]]) -> Compared:
    compared = Compared()
    calls: dict[str, dict[str, list[tuple[str, str]]]] = {}
    seen: dict[str, int] = {}
    for row in npu:
        seen[row["API Name"]] = seen.get(row["API Name"], 0) + 1
    for name, count in seen.items():
        if count > 1:
            compared.doubled.append((name, "first file"))
    for name, rows in others.items():
        if len(rows) > 1:
            compared.doubled.append((name, "second file"))
        if name not in seen:
            compared.missing.append((name, "second file"))
    named: set[str] = set()
    for row in npu:
        name = row["API Name"]
        if name in named:
            continue
        named.add(name)
        match = others.get(name, [])
        if seen[name] > 1 or len(match) > 1:
            cells = _build_skipped_row(name, "the name stands more than once in a file")
        elif not match:
            compared.missing.append((name, "first file"))
            cells = _build_skipped_row(name, "the second file has no such row")
        else:
            cells = _our_row(name, row, match[0])
        status = cells["比对结果"]
        compared.details.append(cells)
        compared.counts[status] = compared.counts.get(status, 0) + 1
        direction = "backward" if ".backward." in name else "forward"
        calls.setdefault(call_of(name), {}).setdefault(direction, []).append((status, cells["Message"]))
    for call, directions in calls.items():
        statuses = {way: _of_all([status for status, _ in rows]) for way, rows in directions.items()}
        reasons = [text for rows in directions.values() for status, text in rows if text and status != PASS]
        if bare_api(call) == "topk" and statuses.get("forward") == ERROR:
            reasons.append(_TOPK)
        compared.results.append((call, statuses.get("forward", BLANK), statuses.get("backward", BLANK), "\n".join(dict.fromkeys(reasons))))
    return compared


def _our_row(name: str, npu: Mapping[str, str], gpu: Mapping[str, str]) -> dict[str, str]:
    dtype = npu["DEVICE Dtype"]
    column_of = {"Units NPU": "Units", "Units GPU": "Units", "Status NPU": "Status", "Status GPU": "Status"}
    beside = {key: (npu if key.endswith("NPU") else gpu).get(column, BLANK) for key, column in column_of.items()}
    verdict = _our_verdict(npu, gpu) if "Units" in npu and "Units" in gpu else None
    if npu.get("Status") == SKIP or gpu.get("Status") == SKIP:
        return _build_skipped_row(name, npu.get("Message") or gpu.get("Message") or _NOT_COMPARED) | beside
    try:
        if not dtype.strip() or dtypes.plain_name(dtype) in standards.WITHOUT or dtype.startswith("<class"):
            raise NoValue(_NOT_COMPARED)
        judged = _judge_row(bare_api(name), dtype, npu, gpu)
    except NoValue as error:
        if verdict is None:
            return _build_skipped_row(name, npu.get("Message") or str(error)) | beside
        return {**_build_skipped_row(name, verdict[1]), "比对结果": verdict[0]} | beside
    cells = _cells(name, judged, repr)
    cells["Message"] = "\n".join(judged.reasons)
    if verdict is not None:
        rule = f"the rule of {judged.standard} says {judged.status}" if judged.status != verdict[0] else ""
        cells["比对结果"], cells["Message"] = verdict[0], "\n".join(filter(None, (verdict[1], rule)))
    return cells | beside


def _judge_row(api: str, dtype: str, npu: Mapping[str, str], gpu: Mapping[str, str]) -> Judged:
    """By the older rules, which look at the API; files of the newer version have only what its own need."""
    try:
        return judge_rows(api, dtype, npu, gpu, standards.OLD, strict=False)
    except NoValue:
        return judge_rows(api, dtype, npu, gpu, standards.NEW, strict=False)


def _our_verdict(npu: Mapping[str, str], gpu: Mapping[str, str]) -> tuple[str, str]:
    """By our verdicts of both rows, and why."""
    status, other, message = npu.get("Status", ""), gpu.get("Status", ""), npu.get("Message", "").strip()
    if status not in (WARNING, ERROR):
        return PASS, ""
    if all(npu.get(column) == gpu.get(column) for column in (*COLUMNS.values(), "Status", "Units", "Message")):
        return PASS, "both sides err alike"
    units, others = _number(npu["Units"]), _number(gpu["Units"])
    if other in (WARNING, ERROR) and units <= SECOND_WORST * others:
        return PASS, f"both sides err: {units:.3g} and {others:.3g} units"
    return status, message


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return math.nan


def _as_existing(npu: Sequence[Mapping[str, str]], others: dict[str, list[Mapping[str, str]]], compat: str, where: str) -> Compared:
    """Rows in the order of the first file; of calls whose rows do not stand together each part counts for itself."""
    compared = Compared()
    numeric = {column for column in (COLUMNS["error_rate"], COLUMNS["thousandth"]) if npu and all(_is_number(r[column]) for r in npu)}
    group = _Group()
    for row in npu:
        name = row["API Name"]
        if len(name.split(".")) not in _SEGMENTS:
            _add(compared, _build_skipped_row(name, f"{name} is no name of a result"))
            compared.results.append((name, SKIP, SKIP, f"{name} is no name of a result"))
            continue
        match = others.get(name, [])
        if not match:
            compared.missing.append((name, "first file"))
            continue
        if len(match) > 1:
            raise UsageError(f"{one_line(where)}: {one_line(name)} stands there {len(match)} times; every row has one name")
        dtype = row["DEVICE Dtype"]
        if not dtype.strip() or dtype.removeprefix("torch.") in standards.WITHOUT or row.get("Shape") == "(0,)":
            cells, status = _build_skipped_row(name, row.get("Message", "")), SKIP
        else:
            try:
                judged = judge_rows(bare_api(name), dtype, row, match[0], compat, strict=True)
            except NoValue as error:
                _add(compared, _build_skipped_row(name, str(error)))
                compared.results.append((name, SKIP, SKIP, str(error)))
                continue
            cells, status = _cells(name, judged, _format_fixed), judged.status
            for key in ("error_rate", "thousandth"):
                if key in judged.values and COLUMNS[key] in numeric:
                    cells[VALUE_COLUMNS[key]] = _format_fixed(float(judged.values[key]))
            cells["Message"] = "\n".join(judged.reasons)
        _add(compared, cells)
        call = call_of(name)
        if group.call != call:
            compared.results += group.rows()
            group = _Group(call)
        group.add(dtype, ".backward." in name, status, row.get("Message", ""))
    compared.results += group.rows()
    return compared


class _Group:
    """Rows of one call that follow each other, as the existing tool counts them."""

    def __init__(self, call: str = "") -> None:
        self.call, self._dtype, self._skipped = call, "", ""
        self._statuses: tuple[list[str], list[str]] = ([], [])

    def add(self, dtype: str, backward: bool, status: str, message: str) -> None:
        self._dtype = dtype
        if dtype.removeprefix("torch.") in standards.WITHOUT:
            return
        self._statuses[backward].append(status)
        if not backward:
            self._skipped = message if status == SKIP else ""

    def rows(self) -> list[tuple[str, str, str, str]]:
        if not self.call:
            return []
        if self._dtype.removeprefix("torch.") in standards.WITHOUT:
            return [(self.call, SKIP, SKIP, _NOT_COMPARED)]
        forward, backward = (_of_all(statuses) for statuses in self._statuses)
        hint = _TOPK if forward == ERROR and bare_api(self.call) == "topk" else self._skipped if forward == SKIP else ""
        return [(self.call, forward, backward, hint)]


def _of_all(statuses: Sequence[str]) -> str:
    if not statuses:
        return BLANK
    if all(status == SKIP for status in statuses):
        return SKIP
    return next((status for status in (ERROR, WARNING) if status in statuses), PASS)


def _add(found: Compared, cells: dict[str, str]) -> None:
    found.details.append(cells)
    found.counts[cells["比对结果"]] = found.counts.get(cells["比对结果"], 0) + 1


def _build_skipped_row(name: str, reason: str) -> dict[str, str]:
    return {"API Name": name, "比对结果": SKIP, "Message": reason}


def _cells(name: str, judged: Judged, number: object) -> dict[str, str]:
    shown = number if callable(number) else str
    cells = {"API Name": name, "比对结果": judged.status, "比对算法": ALGORITHMS[judged.standard]}
    cells |= {VALUE_COLUMNS[key]: value if isinstance(value, str) else shown(value) for key, value in judged.values.items()}
    return cells | {STATUS_COLUMNS[key]: status for key, status in judged.statuses.items()}


def _format_fixed(value: float) -> str:
    return f"{value:.14f}"


def _is_number(cell: str) -> bool:
    return re.fullmatch(r"\s*[-+]?(\d+\.?\d*([eE][-+]?\d+)?|nan|inf)\s*", cell) is not None


def write(compared: Compared, directory: str | Path, compat: str | None = None) -> tuple[Path, Path]:
    """Write both files, named by the present second or the next that is free.

    Returns:
        The result file and the details file.

    Raises:
        SinkError: they cannot be written.
    """
    place, moment = Path(directory), time.time()
    columns = DETAILS_COLUMNS if compat else DETAILS_COLUMNS + OUR_COLUMNS
    details = (tuple(row.get(column, BLANK) for column in columns) for row in compared.details)
    with guard_writing(place):
        make_directories(os.fspath(place))
        for later in range(3600):
            stamp = time.strftime("%Y%m%d%H%M%S", time.localtime(moment + later))
            paths = place / f"{RESULT}{stamp}.csv", place / f"{DETAILS}{stamp}.csv"
            if not any(map(os.path.lexists, paths)):
                break
        write_file(paths[0], [_csv(RESULT_COLUMNS, compared.results)])
        write_file(paths[1], [_csv(columns, details)])
    return paths


def _csv(header: Sequence[str], rows: Iterable[Sequence[str]]) -> bytes:
    lines = [join(header)]
    lines += [join([cell if _is_number(cell) else safe_cell(utf8(cell)) for cell in row]) for row in rows]
    return "\ufeff".encode() + b"".join(lines)
