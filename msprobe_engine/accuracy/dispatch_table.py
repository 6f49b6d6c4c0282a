"""Files of the dispatch compare: every operator of a run, device against benchmark.

Names of files and of the first columns are those of the existing tool (8.1.1), which left out the header of both tables. Ours are
appended: what kind of result the verdict is (``verdict``), its size in units of round-off, the rule, whether the operator ran in the
backward pass, what the benchmark was, and the line of the program that called it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from msprobe_engine.accuracy.result_forms import RESULT_COLUMNS
from msprobe_engine.accuracy.results import ERROR, PASS, SKIP, WARNING, TensorResult, worst
from msprobe_engine.core.io.output_files import AppendFile, write_file
from msprobe_engine.core.io.safe_cells import safe_or_number

Array = npt.NDArray[Any]

DETAIL_COLUMNS = (
    *("Npu Name", "Bench Dtype", "NPU Dtype", "Shape", "error_balance", "max_abs_diff", "max_abs_idx", "max_rel_diff", "max_rel_idx"),
    *("eb_thd", "error_thd", "Status", "Message"),
    *("verdict", "units", "standard", "direction", "bench", "source"),
)
OPERATOR_COLUMNS = ("operator", "compared", "pass", "Warning", "error", "largest units", "first failure", "not compared")

BALANCE_LIMIT = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
ERROR_LIMIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
OTHER_LIMIT = 2.0**-14
"""Limits of the existing tool by type of the device's tensor. They are shown (``eb_thd``, ``error_thd``); the verdict is `judge`'s."""
SWITCHED_OFF = "switched off after a fault"
"""Begins the reason that calls are not compared because the comparison has failed before."""
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Difference:
    """How far two tensors are from each other, over elements that are finite on both sides.

    Attributes:
        balance: mean signed error: relative where the benchmark's value is 1 and more, absolute below.
        max_abs, max_abs_at: largest absolute error and its flat index; None where nothing is finite.
        max_rel, max_rel_at: likewise, relative to the benchmark (plus the round-off of float32).
    """

    balance: float | None = None
    max_abs: float | None = None
    max_abs_at: int | None = None
    max_rel: float | None = None
    max_rel_at: int | None = None


def difference(bench: Array, device: Array) -> Difference:
    """`Difference` of two arrays; empty for other shapes, for text and where no element is finite on both sides."""
    if bench.shape != device.shape or not bench.size or bench.dtype.kind not in "biufc" or device.dtype.kind not in "biufc":
        return Difference()
    wide = np.complex128 if "c" in (bench.dtype.kind, device.dtype.kind) else np.float64
    bench_values, device_values = bench.astype(wide).reshape(-1), device.astype(wide).reshape(-1)
    finite = np.isfinite(bench_values) & np.isfinite(device_values)
    if not finite.any():
        return Difference()
    with np.errstate(all="ignore"):
        error = np.where(finite, device_values - bench_values, 0)
        absolute, size = np.abs(error), np.where(finite, np.abs(bench_values), 0)
        relative = absolute / (size + np.finfo(np.float32).eps)
        signed = np.real(error)
        balance = float(np.where(size < 1.0, signed, signed / (size + np.finfo(np.float32).eps)).sum() / finite.sum())
    position, rel_position = int(absolute.argmax()), int(relative.argmax())
    return Difference(balance, float(absolute[position]), position, float(relative[rel_position]), rel_position)


@dataclass(frozen=True, slots=True)
class Compared:
    """One call of an operator that was compared, or that could not be.

    Attributes:
        name: ``"addmm_3"``.
        operator: ``"addmm"``.
        direction: ``"forward"`` or ``"backward"``.
        bench: what the benchmark was, ``"cpu float64"``.
        source: where the program called it.
        results: verdicts of its outputs, named ``addmm_3_output`` or ``addmm_3_output.1``.
        differences: of each of them.
        message: why there is nothing to compare; empty else.
    """

    name: str
    operator: str
    direction: str
    bench: str
    source: str
    results: tuple[TensorResult, ...] = ()
    differences: tuple[Difference, ...] = ()
    message: str = ""

    @property
    def status(self) -> str:
        """The worst of its outputs."""
        return worst(self.results)


@dataclass
class Operator:
    """Counts of one operator.

    Attributes:
        statuses: status -> calls.
        units: the largest of its outputs.
        first: name of the first call that is no pass.
        skipped: reason -> calls that were not compared.
    """

    statuses: dict[str, int] = field(default_factory=dict)
    units: float = 0.0
    first: str = ""
    skipped: dict[str, int] = field(default_factory=dict)

    @property
    def compared(self) -> int:
        """Calls with a verdict."""
        return sum(self.statuses.values())

    def skip(self, reason: str) -> None:
        """Count a call that is not compared."""
        self.skipped[reason] = self.skipped.get(reason, 0) + 1


class DispatchTables:
    """The three tables of one run: results and details grow call by call, the operators are written at the end.

    Args:
        directory: of the files; exists.
        stamp: time in their names, ``YYYYmmddHHMMSS``.

    Raises:
        SinkError: a file cannot be made.
    """

    def __init__(self, directory: Path, stamp: str) -> None:
        self.results = directory / f"accuracy_checking_result_{stamp}.csv"
        self.details = directory / f"accuracy_checking_details_{stamp}.csv"
        self.summary = directory / f"operators_{stamp}.csv"
        self.operators: dict[str, Operator] = {}
        self._open: tuple[AppendFile, AppendFile] | None = (
            AppendFile(self.results, exclusive=True),
            AppendFile(self.details, exclusive=True),
        )
        for file, columns in zip(self._open, (RESULT_COLUMNS, DETAIL_COLUMNS)):
            file.append(_BOM + _line(columns))

    def operator(self, name: str) -> Operator:
        return self.operators.setdefault(name, Operator())

    def add(self, call: Compared) -> None:
        """Write a call.

        Raises:
            SinkError: it cannot be written.
        """
        known, status = self.operator(call.operator), call.status
        if call.results:
            known.statuses[status] = known.statuses.get(status, 0) + 1
            known.units = max([known.units, *(r.units for r in call.results if r.units is not None and not math.isnan(r.units))])
            if status in (WARNING, ERROR) and not known.first:
                known.first = call.name
        else:
            known.skip(call.message)
        self._open = self._open or (AppendFile(self.results), AppendFile(self.details))
        results, details = self._open
        details.append(b"".join(_line(_detail(call, r, d)) for r, d in zip(call.results, call.differences)))
        outcome = SKIP if not call.results or status == SKIP else str(status != ERROR)
        both = (outcome, "Nan") if call.direction == "forward" else ("Nan", outcome)
        reasons = "\n".join(dict.fromkeys(r.message for r in call.results if r.message)) or call.message
        results.append(_line((f"{call.name}_output", *both, reasons)))

    def finish(self) -> None:
        """Write the table of operators, failures first, and close the files; more calls may follow.

        Raises:
            OSError: it cannot be written.
        """
        for file in self._open or ():
            file.close()
        self._open = None
        write_file(self.summary, [_BOM + _line(OPERATOR_COLUMNS) + b"".join(_line(row) for row in self.rows())])

    def rows(self) -> list[tuple[str, ...]]:
        """Rows of the table of operators: those with errors first, then by units."""

        def rank(item: tuple[str, Operator]) -> tuple[Any, ...]:
            return -item[1].statuses.get(ERROR, 0), -item[1].statuses.get(WARNING, 0), -item[1].units, item[0]

        return [
            (
                *(name, str(known.compared)),
                *(str(known.statuses.get(status, 0)) for status in (PASS, WARNING, ERROR)),
                *(repr(known.units) if known.compared else "", known.first),
                "; ".join(f"{reason}: {count}" for reason, count in known.skipped.items()),
            )
            for name, known in sorted(self.operators.items(), key=rank)
        ]

    def text(self) -> str:
        """What came of it, for the log: counts, the operators that fail, and how many calls were not compared and why."""
        total: dict[str, int] = {}
        reasons: dict[str, int] = {}
        for known in self.operators.values():
            for status, count in known.statuses.items():
                total[status] = total.get(status, 0) + count
            for reason, count in known.skipped.items():
                reasons[reason] = reasons.get(reason, 0) + count
        counts = ", ".join(f"{total.get(status, 0)} {status}" for status in (PASS, WARNING, ERROR))
        off = [name for name, known in sorted(self.operators.items()) if any(why.startswith(SWITCHED_OFF) for why in known.skipped)]
        told = f"; {SWITCHED_OFF}: {', '.join(off[:10])}{', ...' if len(off) > 10 else ''}" if off else ""
        lines = [f"dispatch compare: {sum(total.values())} calls of operators compared: {counts}{told} ({self.results})"]
        failing = [row for row in self.rows() if row[4] != "0" or row[3] != "0"]
        lines += [f"  {row[0]}: {row[4]} error, {row[3]} Warning of {row[1]} calls; first: {row[6]}" for row in failing[:10]]
        if len(failing) > 10:
            lines.append(f"  and {len(failing) - 10} operators more ({self.summary})")
        if reasons:
            lines.append("  not compared: " + "; ".join(f"{reason}: {count}" for reason, count in sorted(reasons.items())))
        return "\n".join(lines)


def _detail(call: Compared, result: TensorResult, found: Difference) -> tuple[str, ...]:
    kind = result.device_dtype.removeprefix("torch.")
    numbers = (found.balance, found.max_abs, found.max_abs_at, found.max_rel, found.max_rel_at)
    limits = (BALANCE_LIMIT.get(kind, OTHER_LIMIT), ERROR_LIMIT.get(kind, OTHER_LIMIT)) if "float" in kind else ("", "")
    return (
        *(result.name, result.bench_dtype, result.device_dtype, str(tuple(result.shape))),
        *("" if number is None else repr(number) for number in numbers),
        *(str(limit) for limit in limits),
        *(SKIP if result.status == SKIP else str(result.status != ERROR), result.message, result.status),
        *("" if result.units is None else repr(result.units), result.standard, call.direction, call.bench, call.source),
    )


def _line(cells: Sequence[str]) -> bytes:
    return (",".join(safe_or_number(cell) for cell in cells) + "\n").encode()
