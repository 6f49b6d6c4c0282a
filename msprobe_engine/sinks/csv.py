"""CSV files of the monitor: one per metric family and block of steps, with the columns of the existing tool.

::

    {directory}/{MonDD}_{HH-MM-SS}-rank{R}-{8 hex}/{family}_{first step}-{last step}.csv
    vpp_stage,name,step[,micro_step],<statistics>,shape,dtype[,phase]

`phase` is ours and comes last, in the gradient families only: where in its life the gradient was seen. Numbers are written in
full (the shortest text that reads back as the same float64); what does not exist is ``nan``.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

from msprobe_engine import columns
from msprobe_engine.errors import SinkError
from msprobe_engine.records import FAMILIES, Frame, Sample, TensorDescription
from msprobe_engine.rows import Rows
from msprobe_engine.rules.base import Alert
from msprobe_engine.settings.schema import CsvSettings, MonitorSettings
from msprobe_engine.sinks.files import AppendFile, make_directory

_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""First characters that make a spreadsheet run a cell (CSV injection, as OWASP lists them)."""


class CsvSink:
    """Writes the samples of every frame. Each frame is one block per file, so a killed process leaves whole steps.

    Args:
        settings: section ``sinks.csv``.
        monitor: which statistics and whether gradients come per micro batch; None: the defaults.
        output_dir: root of the run's output.
        rank: global rank.

    Raises:
        SinkError: the directory cannot be created.
    """

    name = "csv"

    def __init__(self, settings: CsvSettings, monitor: MonitorSettings | None, *, output_dir: Path, rank: int) -> None:
        monitor = monitor or MonitorSettings()
        self._steps = settings.steps_per_file
        self._ops = tuple(op for op in dict.fromkeys(monitor.ops) if op not in ("shape", "dtype"))
        self._per_micro_step = {"actv", "actv_grad"} | ({"grad_unreduced"} if monitor.micro_batch_gradients else set())
        root = Path(settings.path or os.environ.get("MONITOR_OUTPUT_DIR") or output_dir / "monitor")
        now = time.localtime()
        stamp = f"{_MONTHS[now.tm_mon - 1]}{time.strftime('%d_%H-%M-%S', now)}"
        self.directory = root / f"{stamp}-rank{rank}-{secrets.token_hex(4)}"
        """Where the files are."""
        make_directory(self.directory, "csv sink")
        self._files: dict[str, AppendFile] = {}
        self._block = -1
        self._names: dict[str, str] = {}
        self._tails: dict[tuple[tuple[int, ...], str], str] = {}

    def header(self, family: str) -> list[str]:
        """Column names of a family's files."""
        micro = ["micro_step"] if family in self._per_micro_step else []
        return ["vpp_stage", "name", "step", *micro, *self._ops, "shape", "dtype", *(["phase"] if family.startswith("grad_") else [])]

    def write(self, frame: Frame, alerts: Sequence[Alert]) -> None:
        """Append the samples of one frame. All families are tried before an error is raised.

        Raises:
            SinkError: a block could not be written.
        """
        del alerts
        block = frame.step // self._steps * self._steps
        if block != self._block:
            self._close_files()
            self._block = block
        families: dict[str, list[Sample]] = {}
        for sample in frame.samples:
            families.setdefault(sample.family if sample.family in FAMILIES else "other", []).append(sample)
        failed: SinkError | None = None
        for family, samples in families.items():
            try:
                self._write_family(family, frame, samples)
            except SinkError as error:
                failed = error
        if failed is not None:
            raise failed

    def flush(self) -> None:
        """Nothing waits here: every frame is with the operating system when `write` returns."""

    def close(self) -> None:
        self._close_files()

    def _close_files(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _write_family(self, family: str, frame: Frame, samples: list[Sample]) -> None:
        text = "\n".join(self._lines(family, frame, samples)) + "\n"
        file = self._files.get(family)
        if file is None:
            file = AppendFile(self.directory / f"{family}_{self._block}-{self._block + self._steps - 1}.csv")
            self._files[family] = file
        if file.size == 0:
            text = ",".join(self.header(family)) + "\n" + text
        file.append(text.encode("utf-8", "backslashreplace"))

    def _lines(self, family: str, frame: Frame, samples: list[Sample]) -> list[str]:
        # Samples without statistics (meta tensors) read row 0 here and are blanked below.
        rows = frame.rows[[max(s.ref.row, 0) for s in samples]] if len(frame.rows) else None
        cells = [_cells(rows, op) for op in self._ops] if rows is not None else []
        numbers = [",".join(values) for values in zip(*cells)] if cells else [""] * len(samples)
        blank = ",".join(["nan"] * len(self._ops))
        micro, phase = family in self._per_micro_step, family.startswith("grad_")
        lines = []
        for sample, shown in zip(samples, numbers):
            line = f"{sample.vpp_stage},{self._name(sample.name)},{frame.step}"
            if micro:
                line += f",{max(sample.micro_step, 0)}"
            if self._ops:
                line += f",{shown if sample.ref.row >= 0 and shown else blank}"
            line += self._tail(sample.ref.description)
            lines.append(f"{line},{sample.phase}" if phase else line)
        return lines

    def _name(self, name: str) -> str:
        text = self._names.get(name)
        if text is None:
            text = self._names[name] = safe_cell(name)
        return text

    def _tail(self, description: TensorDescription) -> str:
        key = description.shape, description.dtype  # not the description: what is extra may be a list
        text = self._tails.get(key)
        if text is None:
            text = f",{safe_cell(str(list(description.shape)))},{safe_cell(description.dtype)}"
            if len(self._tails) < 100_000:  # shapes that change at every step must not fill the memory
                self._tails[key] = text
        return text


def safe_cell(text: str) -> str:
    """A text as one CSV cell (RFC 4180). A text that a spreadsheet would run as a formula gets an apostrophe in front."""
    if text.startswith(_FORMULA):
        text = "'" + text
    if any(c in text for c in ',"\n\r'):
        return '"' + text.replace('"', '""') + '"'
    return text


def _cells(rows: Rows, op: str) -> list[str]:
    if op == "digest":
        return [f"0x{digest}" if digest else "nan" for digest in columns.digests(rows)]
    values = columns.column(rows, op)
    if op in ("nans", "infs"):
        return [str(int(v)) for v in values.tolist()]
    out = [repr(v) for v in values.tolist()]
    if op in ("min", "max"):
        # float64 rounds integers above 2**53; the row holds them exactly.
        low, high = columns.integer_bounds(rows)
        exact = columns.exact_integers(rows).nonzero()[0].tolist()
        for i in exact:
            out[i] = str(int(low[i] if op == "min" else high[i]))
    return out
