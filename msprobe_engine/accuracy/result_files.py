"""``accuracy_checking_result_{stamp}.csv`` and ``accuracy_checking_details_{stamp}.csv``: a row per call, and per output and gradient.

A call's details are appended before its row in the result file, each with one write: a call whose row is there is complete, whenever the
process was killed. Going on with a file drops what is not. One process writes a pair of files (they are locked).
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from msprobe_engine.accuracy.result_forms import BLANK, Form, join
from msprobe_engine.accuracy.results import SKIP, CallResult, Metric, TensorResult
from msprobe_engine.accuracy.verdict.metrics import COLUMNS
from msprobe_engine.core.errors import SinkError, UsageError
from msprobe_engine.core.io.csv_text import parse_row
from msprobe_engine.core.io.damaged_files import guard_reading
from msprobe_engine.core.io.input_files import read_input
from msprobe_engine.core.io.output_files import WholeFile, guard_writing, write_all
from msprobe_engine.core.io.regular_files import explain, make_directories, open_regular
from msprobe_engine.core.io.safe_cells import plain_name
from msprobe_engine.core.log import one_line

RESULT, DETAILS = "accuracy_checking_result_", "accuracy_checking_details_"
_NAME = re.compile(rf"{RESULT}(\d{{14}})(_rank\d+)?\.csv", re.ASCII)
_BOM = "\ufeff".encode()
_RECORD = re.compile(rb'(?:[^"\n]|"[^"]*")*\n')
"""A complete line: line ends within quotes are none of it."""
_RESULT_OF_CALL = re.compile(r"(.+)\.(?:forward|backward)\.(?:output|input)\..+", re.DOTALL)


class ResultFiles:
    """The pair of files of one check.

    Args:
        result_path: of the file with a row per call.
        go_on: the files are there; what is complete in them stays, and more is appended.

    Attributes:
        done: names of the calls that are complete.

    Raises:
        UsageError: files to go on with are none, are of another form, or another process writes them.
        SinkError: they cannot be written.
    """

    def __init__(self, result_path: Path, form: Form, go_on: bool = False) -> None:
        match = _NAME.fullmatch(result_path.name)
        if match is None:
            raise UsageError(f"{one_line(str(result_path))}: a result file to go on with is called {RESULT}YYYYmmddHHMMSS.csv")
        self.result_path, self._form = result_path, form
        self.details_path = result_path.with_name(result_path.name.replace(RESULT, DETAILS, 1))
        self.stamp = match[1] + (match[2] or "")
        self.done: set[str] = set()
        self._result = self._details = -1
        try:
            self._open(go_on)
        except OSError as error:
            self.close()
            raise SinkError(f"{one_line(str(error.filename or result_path))}: {explain(error)}") from error
        except BaseException:
            self.close()
            raise

    @classmethod
    def new(cls, directory: str | Path, form: Form, suffix: str = "") -> ResultFiles:
        """Files named by the present second, or the next that is free.

        Args:
            directory: made if it is not there.
            suffix: ``_rank3``.

        Raises:
            SinkError: they cannot be made.
        """
        place = Path(directory)
        with guard_writing(place):
            make_directories(os.fspath(place))
        moment = time.time()
        for later in range(3600):
            stamp = time.strftime("%Y%m%d%H%M%S", time.localtime(moment + later))
            path = place / f"{RESULT}{stamp}{suffix}.csv"
            if not os.path.lexists(path) and not os.path.lexists(place / f"{DETAILS}{stamp}{suffix}.csv"):
                return cls(path, form)
        raise SinkError(f"{one_line(str(place))}: result files of the next hour are there already")

    def _open(self, go_on: bool) -> None:
        flags = os.O_RDWR | os.O_APPEND
        if not go_on:
            flags |= os.O_CREAT | os.O_EXCL
        elif not self.result_path.is_file():
            raise UsageError(f"{one_line(str(self.result_path))}: there is no such result file to go on with")
        self._result = open_regular(self.result_path, flags)
        try:
            fcntl.flock(self._result, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{one_line(str(self.result_path))}: another process writes this file; wait for it, or start anew") from None
        self._details = open_regular(self.details_path, flags | os.O_CREAT)
        if go_on:
            self._keep_complete()
        else:
            write_all(self._details, [_BOM, join(self._form.details_columns)])
            write_all(self._result, [_BOM, join(self._form.result_columns)])

    def _keep_complete(self) -> None:
        """Drop a line that was not finished, and details of calls that have no row."""
        header, rows, end = _lines(self.result_path)
        self._check(header, self._form.result_columns, self.result_path, end)
        os.ftruncate(self._result, end)
        if end == 0:
            write_all(self._result, [_BOM, join(self._form.result_columns)])
        self.done = {name for row in rows if (name := _first(row))}
        header, rows, end = _lines(self.details_path)
        self._check(header, self._form.details_columns, self.details_path, end)
        kept = [row for row in rows if call_of(_first(row)) in self.done]
        if end == 0 or len(kept) != len(rows):
            self._details = _replace_file(self._details, self.details_path, [_BOM, join(self._form.details_columns), *kept])
        else:
            os.ftruncate(self._details, end)

    def _check(self, header: tuple[str, ...], wanted: tuple[str, ...], path: Path, end: int) -> None:
        if end and header != wanted:
            raise UsageError(
                f"{one_line(str(path))}: its columns are not those this check writes; go on with the options (--compat) it was begun with"
            )

    def append(self, result: CallResult, source: str = "") -> None:
        """Write a call.

        Args:
            source: line of the training that made it.

        Raises:
            SinkError: it cannot be written.
        """
        with guard_writing(self.result_path):
            details = b"".join(map(join, self._form.details_rows(result, source)))
            write_all(self._details, [details])
            write_all(self._result, [join(self._form.result_row(result, source))])
        self.done.add(result.name)

    def sort(self, order: Sequence[str]) -> None:
        """Bring all rows into the order of these names of calls; others follow as they are.

        Raises:
            SinkError: the files cannot be written.
        """
        places = {name: n for n, name in enumerate(order)}
        with guard_writing(self.result_path):
            for path, columns in ((self.result_path, self._form.result_columns), (self.details_path, self._form.details_columns)):
                rows = _lines(path)[1]
                calls = [places.get(call_of(_first(row)), len(places)) for row in rows]
                if calls == sorted(calls):
                    continue
                ordered = [row for _, row in sorted(zip(calls, rows), key=lambda pair: pair[0])]
                fd = self._result if path is self.result_path else self._details
                fd = _replace_file(fd, path, [_BOM, join(columns), *ordered])
                self._result, self._details = (fd, self._details) if path is self.result_path else (self._result, fd)

    def done_results(self, order: Sequence[str] = ()) -> Iterator[CallResult]:
        """What the files say of the calls that are done: those of `order` first, in that order."""
        yield from read_results(self.result_path, self.details_path, order)

    def close(self) -> None:
        for fd in (self._details, self._result):
            if fd >= 0:
                os.close(fd)
        self._details = self._result = -1

    def __enter__(self) -> ResultFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def call_of(name: str) -> str:
    """The call of a row of either file: ``"Torch.matmul.0.forward.output.1"`` -> ``"Torch.matmul.0"``."""
    match = _RESULT_OF_CALL.fullmatch(name)
    return match[1] if match else name


def read_results(result_path: Path, details_path: Path, order: Sequence[str] = ()) -> Iterator[CallResult]:
    """Calls as the files have them. Numbers are those of the cells; there are no times.

    Raises:
        UsageError: a file cannot be read.
        UnreadableFileError: the details hold what no pre-check writes.
    """
    tensors: dict[str, list[TensorResult]] = {}
    with guard_reading(details_path, "details of a pre-check"):
        for row in _dicts(details_path):
            name = row.get("API Name", "")
            if row.get("DEVICE Dtype", BLANK).strip() or row.get("Status") != SKIP:
                tensors.setdefault(call_of(name), []).append(_tensor(name, row))
    results = {
        row["API name"]: CallResult(
            row["API name"], row.get("Forward Test Success", ""), row.get("Backward Test Success") or BLANK, row.get("Message", ""),
            tuple(tensors.get(row["API name"], ())),
        )
        for row in _dicts(result_path) if row.get("API name")
    }  # fmt: skip
    for name in order:
        if (result := results.pop(name, None)) is not None:
            yield result
    yield from results.values()


def _tensor(name: str, row: dict[str, str]) -> TensorResult:
    metrics: dict[str, Metric] = {key: float(cell) for key, column in COLUMNS.items() if (cell := row.get(column, BLANK).strip())}
    shape = tuple(int(word) for word in re.findall(r"\d+", row.get("Shape", "")))
    units = row.get("Units", BLANK).strip()
    return TensorResult(
        name, shape, row.get("Bench Dtype", ""), row.get("DEVICE Dtype", ""), metrics, row.get("Standard", ""), row.get("Status", ""),
        row.get("Message", ""), row.get("Old Status", row.get("Status", "")), float(units) if units else None,
    )  # fmt: skip


_MOST_BYTES = 8 << 30


def _lines(path: Path) -> tuple[tuple[str, ...], list[bytes], int]:
    """Header, complete lines without it, and the length of all these in bytes."""
    raw = read_input(path, _MOST_BYTES)
    rows, end = [], len(_BOM) if raw.startswith(_BOM) else 0
    while (match := _RECORD.match(raw, end)) is not None:
        rows.append(match[0])
        end = match.end()
    if not rows:
        return (), [], 0
    return tuple(_cells(rows[0])), rows[1:], end


def _cells(row: bytes) -> list[str]:
    return parse_row(row.decode("utf-8", "replace"))


def _first(row: bytes) -> str:
    """The name at the beginning of a line."""
    head = row.partition(b",")[0]
    return plain_name(_cells(row)[0] if head.startswith((b'"', b"'")) else head.decode("utf-8", "replace").strip())


def _dicts(path: Path) -> Iterator[dict[str, str]]:
    """Rows by column."""
    try:
        header, rows, _ = _lines(path)
    except OSError as error:
        raise UsageError(f"{one_line(str(path))}: {error.strerror or error}") from error
    for row in rows:
        yield dict(zip(header, map(plain_name, _cells(row))))


def _replace_file(fd: int, path: Path, parts: list[bytes | memoryview]) -> int:
    """Another file in the place of this one, at once; its lock passes over."""
    with WholeFile(path) as whole:
        whole.file.writelines(parts)
        new = open_regular(whole.temporary, os.O_RDWR | os.O_APPEND)
        fcntl.flock(new, fcntl.LOCK_EX)
    os.close(fd)
    return new
