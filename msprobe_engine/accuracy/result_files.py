"""The pair of files that a check of operators writes: ``accuracy_checking_result_{time}.csv`` has a row per call,
``accuracy_checking_details_{time}.csv`` one per tensor. Columns are the existing tool's (8.1.1, 26.2.0), ours behind them.

A call's details are written before its row in the result file, each by one append: a call that has its row there is done, whatever
happened next. `ResultFiles.resume` takes away what a killed process left half written.
"""

from __future__ import annotations

import csv
import fcntl
import math
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from msprobe_engine.accuracy.compat import shown
from msprobe_engine.accuracy.dtypes import plain
from msprobe_engine.accuracy.metrics import COLUMNS
from msprobe_engine.accuracy.results import ERROR, NOT_RUN, SKIP, WARNING, CallResult, Metric, TensorResult, bare_name
from msprobe_engine.accuracy.standards import NEW, standard_of
from msprobe_engine.dump import layout
from msprobe_engine.errors import UsageError
from msprobe_engine.sinks.names import plain_name, safe_cell, utf8

RESULT_COLUMNS = ("API name", "Forward Test Success", "Backward Test Success", "Message")
DETAILS_COLUMNS = ("API Name", "Bench Dtype", "DEVICE Dtype", "Shape", *COLUMNS.values(), "Status", "Message")
OUR_RESULT_COLUMNS = ("Round-off Units", "Source")
"""The worst tensor's `TensorResult.units`; where the call stands in the user's program."""
OUR_DETAILS_COLUMNS = ("Standard", "Round-off Units", "Existing Status")
"""`TensorResult.standard`, its ``units`` and its ``old_status``."""

BLANK = " "
"""A cell without a value, as the existing tool has it."""
_NAME = re.compile(r"accuracy_checking_result_(?P<stamp>[0-9]{14})(?P<suffix>_rank[0-9]+)?\.csv", re.ASCII)
_OF_CALL = re.compile(r"(.+?)\.(?:forward|backward)\.", re.DOTALL)
_BOM = "\ufeff"
_MOST_AT_ONCE = 1000
_SINGLE = frozenset(("max_abs", "max_rel", "mean_rel", "max_ulp", "mean_ulp"))
"""Metrics that the existing tool leaves in float32, and writes as numpy prints them, where both sides were float32."""
_STAMP = "%Y%m%d%H%M%S"


class ResultFiles:
    """An open pair of files; nobody else writes to it meanwhile.

    Attributes:
        result_path, details_path: the files.
        stamp: the time in their names.
    """

    def __init__(self, result: Path, details: Path, stamp: str, compat: str | None, precision: int) -> None:
        self.result_path, self.details_path, self.stamp = result, details, stamp
        self._compat, self._precision = compat, precision
        self._rows: dict[str, tuple[bytes, bytes]] = {}
        self._lock_path = result.with_name(f".{result.name}.lock")
        self._lock: int | None = None
        self._open: list[int] = []

    @classmethod
    def create(cls, directory: str | Path, compat: str | None = None, precision: int = 14, suffix: str = "") -> ResultFiles:
        """A new pair, with its headers.

        Args:
            directory: made if it is not there.
            compat: version of the existing tool whose columns and statuses the files have, and none of ours; None: ours too.
            precision: decimals of numbers.
            suffix: of the names, ``"_rank0"``.

        Raises:
            SinkError: the files cannot be made.
        """
        folder = Path(directory)
        try:
            layout.make_directories(os.path.abspath(folder))
        except OSError as error:
            raise layout.DumpWriteError(error, folder) from error
        now = time.time()
        for later in range(_MOST_AT_ONCE):  # two checks may begin in one second
            stamp = time.strftime(_STAMP, time.localtime(now + later))
            made = cls(*_pair(folder, stamp, suffix), stamp, compat, precision)
            try:
                os.close(os.open(made.result_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, layout.FILE_MODE))
            except FileExistsError:
                continue
            except OSError as error:
                raise layout.DumpWriteError(error, made.result_path) from error
            break
        else:
            raise UsageError(f"{folder}: {_MOST_AT_ONCE} checks began here at once; name another directory")
        made._hold()
        made._rewrite(())
        return made

    @classmethod
    def resume(cls, result: str | Path, compat: str | None = None, precision: int = 14) -> ResultFiles:
        """The pair of an interrupted check; rows that are not whole are taken away.

        Raises:
            UsageError: no result file, or one of other columns, or another process writes to it.
            SinkError: it cannot be written.
        """
        path = Path(result)
        found = _NAME.fullmatch(path.name)
        if found is None:
            raise UsageError(f"{path}: a result file is called accuracy_checking_result_<14 digits>.csv; do not rename it")
        if not path.is_file():
            raise UsageError(f"{path}: there is no such file; give the result file of the check that was interrupted")
        made = cls(*_pair(path.parent, found["stamp"], found["suffix"] or ""), found["stamp"], compat, precision)
        made._hold()
        headers, rows = _records(made.result_path)
        if headers not in (list(made._columns()[0]), []):
            raise UsageError(
                f"{path}: has the columns {', '.join(headers)[:200]}; --compat now must be what it was when the file was begun"
            )
        details: dict[str, bytes] = {}
        for cells, raw in _records(made.details_path)[1]:
            if call := _OF_CALL.match(plain_name(cells[0])):
                details[call[1]] = details.get(call[1], b"") + raw
        for cells, raw in rows:
            if len(cells) == len(made._columns()[0]) and raw.endswith(b"\n"):
                name = plain_name(cells[0])
                made._rows[name] = (raw, details.get(name, b""))
        made._rewrite(made._rows)
        return made

    @property
    def done(self) -> frozenset[str]:
        """Names of the calls that have their rows."""
        return frozenset(self._rows)

    def append(self, result: CallResult, source: str = "") -> None:
        """Write the rows of one call.

        Args:
            source: where the call stands in the user's program.

        Raises:
            SinkError: the disk is full, or the like.
        """
        row, details = self._result_row(result, source), b"".join(self._details_rows(result))
        try:
            for descriptor, content in zip(reversed(self._open), (details, row)):
                layout.write_all(descriptor, [content])
        except OSError as error:
            raise layout.DumpWriteError(error, self.result_path) from error
        self._rows[result.name] = (row, details)

    def results(self, names: Iterable[str]) -> Iterator[CallResult]:
        """What the files say of calls that are done, of these names; of their tensors those that do not pass."""
        for name in names:
            if name in self._rows:
                yield self._read(name)

    def sort(self, order: Iterable[str]) -> None:
        """Rows in the order of these names; others stay behind them.

        Raises:
            SinkError: the files cannot be written.
        """
        first = [name for name in order if name in self._rows]
        known = set(first)
        self._rows = {name: self._rows[name] for name in (*first, *(n for n in self._rows if n not in known))}
        self._rewrite(self._rows)

    def close(self) -> None:
        """Let others write."""
        for descriptor in self._open:
            os.close(descriptor)
        if self._lock is not None:
            self._lock_path.unlink(missing_ok=True)
            os.close(self._lock)
        self._open, self._lock = [], None

    def __enter__(self) -> ResultFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _hold(self) -> None:
        """The directory's entries are replaced when the files are rewritten, so what is locked is a file beside them."""
        if self._lock is not None:
            return
        try:
            self._lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, layout.FILE_MODE)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{self.result_path}: another check writes to it; wait for its end") from None
        except OSError as error:
            raise layout.DumpWriteError(error, self._lock_path) from error

    def _columns(self) -> tuple[Sequence[str], Sequence[str]]:
        if self._compat:
            return RESULT_COLUMNS, DETAILS_COLUMNS
        return (*RESULT_COLUMNS, *OUR_RESULT_COLUMNS), (*DETAILS_COLUMNS, *OUR_DETAILS_COLUMNS)

    def _rewrite(self, names: Iterable[str]) -> None:
        for descriptor in self._open:
            os.close(descriptor)
        self._open = []
        rows = [self._rows[name] for name in names]
        for n, path in ((1, self.details_path), (0, self.result_path)):
            header = f"{_BOM}{_line(self._columns()[n])}".encode()
            try:
                layout.write_file(path, [header, *(row[n] for row in rows)])
                self._open.insert(0, os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW))
            except OSError as error:
                raise layout.DumpWriteError(error, path) from error

    def _result_row(self, result: CallResult, source: str) -> bytes:
        nothing = result.skipped and not result.tensors
        backward = SKIP if nothing and self._compat else result.backward
        cells = [result.name, self._status(result.forward), self._status(backward), result.message]
        if not self._compat:
            units = [tensor.units for tensor in result.tensors if tensor.units is not None]
            cells += [_number(max(units, key=_height), self._precision) if units else BLANK, source or BLANK]
        return _line(cells).encode()

    def _details_rows(self, result: CallResult) -> Iterator[bytes]:
        if not result.tensors and result.forward == SKIP:
            blanks = [BLANK] * (len(DETAILS_COLUMNS) - 3)
            ours = [] if self._compat else [BLANK] * len(OUR_DETAILS_COLUMNS)
            yield _line([f"{result.name}.forward.output.0", *blanks, SKIP, result.message, *ours]).encode()
        for tensor in result.tensors:
            yield _line(self._details(tensor, bare_name(result.name))).encode()

    def _details(self, tensor: TensorResult, api: str) -> list[str]:
        what = tensor.bench_dtype, tensor.device_dtype
        shape = str(tensor.shape) if tensor.metrics or tensor.shape or any(what) else ""
        status = tensor.old_status if self._compat else tensor.status
        kept = self._kept(tensor, api)
        numbers = [self._cell(key, tensor) if key in kept else BLANK for key in COLUMNS]
        cells = [tensor.name, *(text or BLANK for text in (*what, shape)), *numbers, self._status(status), tensor.message]
        if not self._compat:
            units = BLANK if tensor.units is None else _number(tensor.units, self._precision)
            cells += [tensor.standard or BLANK, units, tensor.old_status]
        return cells

    def _kept(self, tensor: TensorResult, api: str) -> frozenset[str]:
        """Keys of the metrics that are written: with `compat` those that the existing tool fills."""
        found = frozenset(key for key, value in tensor.metrics.items() if value is not None)
        if not self._compat:
            return found
        standard = standard_of(api, tensor.device_dtype, self._compat)
        return found & shown(tensor.metrics, standard, tensor.device_dtype, math.prod(tensor.shape), tensor.old_status)

    def _cell(self, key: str, tensor: TensorResult) -> str:
        value = tensor.metrics[key]
        single = plain(tensor.bench_dtype) == "float32" and plain(tensor.device_dtype) in ("float16", "bfloat16", "float32")
        if self._compat and key in _SINGLE and single and isinstance(value, float):
            return str(np.float32(value))
        return _number(value, self._precision)

    def _status(self, status: str) -> str:
        return status.lower() if self._compat == NEW and status == WARNING else status

    def _read(self, name: str) -> CallResult:
        row, details = ([*csv.reader(raw.decode().splitlines(keepends=True))] for raw in self._rows[name])
        _, forward, backward, message, *_ = row[0]
        tensors = []
        for cells in details:
            at = dict(zip(self._columns()[1], cells))
            if at["Status"] in (ERROR, WARNING, WARNING.lower()):
                units = at.get("Round-off Units", BLANK)
                shape = tuple(map(int, re.findall(r"[0-9]+", at["Shape"])))
                tensors.append(
                    TensorResult(
                        plain_name(at["API Name"]), shape, at["Bench Dtype"], at["DEVICE Dtype"], status=_as_ours(at["Status"]),
                        message=at["Message"], units=None if units == BLANK else float(units),
                    )
                )  # fmt: skip
        if forward == SKIP and backward == SKIP:
            backward = NOT_RUN
        return CallResult(name, _as_ours(forward), _as_ours(backward), plain_name(message), tuple(tensors))


def _pair(folder: Path, stamp: str, suffix: str) -> tuple[Path, Path]:
    return folder / f"accuracy_checking_result_{stamp}{suffix}.csv", folder / f"accuracy_checking_details_{stamp}{suffix}.csv"


def _as_ours(status: str) -> str:
    return WARNING if status == WARNING.lower() else status


def _height(units: float) -> float:
    return math.inf if math.isnan(units) else units


def _number(value: Metric, precision: int) -> str:
    return f"{value:.{precision}f}" if isinstance(value, float) else str(value)


def _line(cells: Sequence[str]) -> str:
    return ",".join(_text(cell) for cell in cells) + "\n"


def _text(cell: str) -> str:
    """A cell; a negative number is no formula."""
    try:
        float(cell)
    except ValueError:
        return safe_cell(utf8(cell))
    return cell


def _records(path: Path) -> tuple[list[str], list[tuple[list[str], bytes]]]:
    """Header and rows of a file, a row with its bytes; what stands behind the last whole row is left out."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return [], []
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from None
    rows: list[tuple[list[str], bytes]] = []
    held = b""
    for line in content.splitlines(keepends=True):
        held += line
        if held.count(b'"') % 2 == 0 and held.endswith(b"\n"):
            cells: Any = next(csv.reader([held.decode("utf-8-sig", "replace")]), [])
            if cells:
                rows.append((cells, held))
            held = b""
    header = rows.pop(0)[0] if rows else []
    return header, rows
