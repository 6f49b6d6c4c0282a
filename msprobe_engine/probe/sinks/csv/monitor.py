"""CSV files of the monitor: one per metric family and block of steps, with the columns of the existing tool.

::

    {directory}/{MonDD}_{HH-MM-SS}-rank{R}-{8 hex}/{family}_{first step}-{last step}.csv
    vpp_stage,name,step[,micro_step],<statistics>,shape,dtype[,phase][,state][,tag]
    vpp_stage,name,step[,micro_step],<numbers>            families of derived numbers of modules

Ours, and therefore last, are `phase` (gradient families: where in its life the gradient was seen), `state` (``opt_state``: which
state of the optimizer) and `tag` (``other``: what the row is of). Numbers are written in full (the shortest text that reads back as
the same float64); what does not exist is ``nan``. Beside the tables are the files of `msprobe_engine.probe.sinks.run_files`. Histograms are
no table: TensorBoard and the JSON lines have them.
"""

from __future__ import annotations

import math
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.errors import SinkError
from msprobe_engine.core.io.output_files import AppendFile, make_directory
from msprobe_engine.core.io.safe_cells import Names, safe_cell
from msprobe_engine.core.log import get_logger
from msprobe_engine.core.records import Frame, Sample, TensorDescription
from msprobe_engine.core.settings.schema import CsvSettings, MonitorSettings
from msprobe_engine.core.statistics import rows as _rows
from msprobe_engine.formats.monitor.losses import FILE, LossFile
from msprobe_engine.formats.monitor.run_layout import MONTHS
from msprobe_engine.probe.sinks import resume
from msprobe_engine.probe.sinks.base import Sink
from msprobe_engine.probe.sinks.csv.features import FEATURES, pivot
from msprobe_engine.probe.sinks.csv.number_cells import statistic_cells
from msprobe_engine.probe.sinks.run_files import ALERTS, SCALARS_HEADER, RunFile, alert_lines, scalar_lines

__all__ = ["CsvSink", "safe_cell"]

_log = get_logger()


class CsvSink(Sink):
    """Writes the samples of every frame. Each frame is one block per file, so a killed process leaves whole steps.

    Args:
        settings: section ``sinks.csv``.
        monitor: which statistics and whether gradients come per micro batch; None: the defaults.
        output_dir: root of the run's output.
        rank: global rank.
        world_size: number of ranks, for run.json; 0: unknown.
        rules: names of the rules that look at every step, for run.json; None: unknown.

    Raises:
        SettingsError: ``append_output`` is no range of time stamps.
        SinkError: the directory cannot be created, or there is none to go on in.
    """

    name = "csv"
    losses: LossFile

    def __init__(
        self,
        settings: CsvSettings,
        monitor: MonitorSettings | None,
        *,
        output_dir: Path,
        rank: int,
        world_size: int = 0,
        rules: Sequence[str] | None = None,
    ) -> None:
        monitor = monitor or MonitorSettings()
        self._steps = settings.steps_per_file
        self._ops: tuple[str, ...] = ()
        self._per_micro_step: set[str] = set()
        self._choose(monitor)
        root = Path(settings.path or os.environ.get("MONITOR_OUTPUT_DIR") or output_dir / "monitor")
        self._there: int | None = None
        """Last step of the run that goes on here."""
        if settings.append_output:
            self.directory = resume.find_directory(root, rank, settings.append_output)
            for path in (*self.directory.glob("*.csv"), *self.directory.glob("*.jsonl")):
                resume.whole_lines(path)
            self._there = resume.last_step(self.directory)
            _log.info("csv sink: goes on in %s; last step there: %s", self.directory, self._there)
            """Where the files are."""
        else:
            now = time.localtime()
            stamp = f"{MONTHS[now.tm_mon - 1]}{time.strftime('%d_%H-%M-%S', now)}"
            self.directory = root / f"{stamp}-rank{rank}-{secrets.token_hex(4)}"
            make_directory(self.directory, "csv sink")
        self.losses = LossFile(self.directory / FILE)
        self._size = sum(entry.stat(follow_symlinks=False).st_size for entry in os.scandir(self.directory))
        self._run = RunFile(self.directory, rank, world_size, monitor, rules)
        self._files: dict[str, AppendFile] = {}
        self._alerts: AppendFile | None = None
        self._block = -1
        self._names = Names(monitor.squash_name)
        self._cells: dict[str, str] = {}
        self._tails: dict[tuple[tuple[int, ...], str], str] = {}
        self._columns: dict[str, list[str]] = {family: list(known) for family, known in FEATURES.items()}
        """Columns of derived numbers, as far as they are known."""

    def watch_info(self, info: Mapping[str, Any]) -> None:
        self._run.watch(info)

    def watch_remark(self, key: str, facts: Mapping[str, Any]) -> None:
        self._run.watch(facts, key)

    def follow(self, monitor: MonitorSettings) -> None:
        """Take over other settings of the monitor, between two frames. Files that have other columns get the new ones, too."""
        self._close_files()
        self._choose(monitor)

    def _choose(self, monitor: MonitorSettings) -> None:
        self._ops = tuple(op for op in dict.fromkeys(monitor.ops) if op not in ("shape", "dtype"))
        self._per_micro_step = {"actv", "actv_grad", "attention_hook", "moe_router_logit_hook"}
        if monitor.micro_batch_gradients:
            self._per_micro_step.add("grad_unreduced")

    def header(self, family: str) -> list[str]:
        """Column names of a family's files."""
        micro = ["micro_step"] if family in self._per_micro_step else []
        if family in FEATURES:
            return ["vpp_stage", "name", "step", *micro, *self._columns[family]]
        last = {"opt_state": ["state"], "other": ["tag"]}.get(family, ["phase"] if family.startswith("grad_") else [])
        return ["vpp_stage", "name", "step", *micro, *self._ops, "shape", "dtype", *last]

    @property
    def size(self) -> int:
        """Bytes in the directory when it was opened, and written since."""
        return self._size

    @property
    def home(self) -> Path:
        return self.directory

    def make_again(self) -> None:
        make_directory(self.directory, "csv sink")
        self._close_files()
        self._close_alerts()
        self._size = 0
        self.losses.make_again()
        self._run.stale()

    def write(self, frame: Frame, alerts: Sequence[Alert]) -> None:
        """Append the samples of one frame. All files are tried before an error is raised.

        Raises:
            SinkError: a block could not be written.
        """
        block = frame.step // self._steps * self._steps
        if block != self._block:
            self._close_files()
            self._block = block
        if self._there is not None:
            if frame.step <= self._there:
                _log.warning(
                    "csv sink: steps %d to %d are in %s already and are written again; readers take the later ones",
                    frame.step,
                    self._there,
                    self.directory,
                )
            self._there = None
        families = self._names.by_family(frame.samples)
        failed: SinkError | None = None
        try:
            self._add_alerts(alerts)  # before the step they are of: a process that is killed in between leaves too much, not too little
        except SinkError as error:
            failed = error
        for family, samples in families.items():
            try:
                header, lines = (self._feature_lines if family in FEATURES else self._lines)(family, frame, samples)
                self._append(family, header, lines)
            except SinkError as error:
                failed = error
        try:
            looked_at = frame.samples or frame.elsewhere or list(frame.scalars) != ["step_seconds"]
            if frame.scalars and looked_at:  # a step that nobody looks at makes no file
                self._append("scalars", SCALARS_HEADER, scalar_lines(frame))
            self._run.refresh(frame.step)
        except SinkError as error:
            failed = error
        if failed is not None:
            raise failed

    def _add_alerts(self, alerts: Sequence[Alert]) -> None:
        if not alerts:
            return
        if self._alerts is None:
            self._alerts = AppendFile(self.directory / ALERTS)
        data = alert_lines(alerts).encode("utf-8", "backslashreplace")
        self._alerts.append(data)
        self._size += len(data)
        self.losses.count_alerts(len(alerts))

    def flush(self) -> None:
        """Nothing waits here: every frame is with the operating system when `write` returns."""

    def close(self) -> None:
        with suppress(SinkError):  # a full disk; the tables say how far the run came
            self._run.conclude()
        self._close_files()
        self.losses.close()
        self._close_alerts()

    def _close_alerts(self) -> None:
        if self._alerts is not None:
            self._alerts.close()
            self._alerts = None

    def _close_files(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _append(self, family: str, header: Sequence[str], lines: Sequence[str]) -> None:
        file = self._files.get(family)
        if file is None:
            path = self.directory / f"{family}_{self._block}-{self._block + self._steps - 1}.csv"
            file = AppendFile(path)
            if file.size:
                # Files of an earlier run, or of a block that comes back: the columns have to be ours.
                columns = resume.read_header(path)
                if family in FEATURES:
                    more = [name for name in columns if name not in header]
                    self._columns[family] += more
                    lines, header = [line + ",nan" * len(more) for line in lines], self.header(family)
                if columns != list(header):
                    file.close()
                    resume.with_columns(path, header)
                    file = AppendFile(path)
            self._files[family] = file
        text = "\n".join(lines) + "\n"
        if file.size == 0:
            text = ",".join(map(safe_cell, header)) + "\n" + text
        data = text.encode("utf-8", "backslashreplace")
        file.append(data)
        self._size += len(data)

    def _lines(self, family: str, frame: Frame, samples: list[Sample]) -> tuple[list[str], list[str]]:
        # Samples without statistics (meta tensors) read row 0 here and are blanked below.
        rows = frame.rows[[max(s.ref.row, 0) for s in samples]] if len(frame.rows) else None
        cells = [statistic_cells(rows, op) for op in self._ops] if rows is not None else []
        numbers = [",".join(values) for values in zip(*cells)] if cells else [""] * len(samples)
        blank = ",".join(["nan"] * len(self._ops))
        micro, phase = family in self._per_micro_step, family.startswith("grad_")
        detail = {"opt_state": "state", "other": "tag"}.get(family, "")
        lines = []
        for sample, shown in zip(samples, numbers):
            line = f"{sample.vpp_stage},{self._cell(sample.name)},{frame.step}"
            if micro:
                line += f",{max(sample.micro_step, 0)}"
            if self._ops:
                line += f",{shown if sample.ref.row >= 0 and shown else blank}"
            description = sample.ref.description
            if sample.extra.get("scope") == "shard" and sample.ref.row >= 0:
                description = _of_part(description, int(_rows.as_int64(frame.rows)[sample.ref.row, _rows.COUNT]))
            line += self._tail(description)
            if phase:
                line += f",{sample.phase}"
            elif detail:
                line += f",{self._cell(str(sample.extra.get(detail, '')))}"
            lines.append(line)
        return self.header(family), lines

    def _feature_lines(self, family: str, frame: Frame, samples: list[Sample]) -> tuple[list[str], list[str]]:
        first, numbers = pivot(frame, samples)
        known = self._columns[family]
        new = [name for name in numbers if name not in known]
        if new:
            known += new
            if (file := self._files.pop(family, None)) is not None:
                file.close()  # opened again with the columns added
        micro = family in self._per_micro_step
        blank = ["nan"] * len(first)
        cells = [[repr(v) for v in numbers[name].tolist()] if name in numbers else blank for name in known]
        lines = []
        for sample, *shown in zip(first, *cells):
            where = f"{sample.vpp_stage},{self._cell(sample.name)},{frame.step}{f',{max(sample.micro_step, 0)}' if micro else ''}"
            lines.append(",".join([where, *shown]))
        return self.header(family), lines

    def _cell(self, name: str) -> str:
        text = self._cells.get(name)
        if text is None:
            text = self._cells[name] = safe_cell(name)
        return text

    def _tail(self, description: TensorDescription) -> str:
        key = description.shape, description.dtype  # not the description: what is extra may be a list
        text = self._tails.get(key)
        if text is None:
            text = f",{safe_cell(str(list(description.shape)))},{safe_cell(description.dtype)}"
            if len(self._tails) < 100_000:  # shapes that change at every step must not fill the memory
                self._tails[key] = text
        return text


def _of_part(description: TensorDescription, count: int) -> TensorDescription:
    """A row that could not be merged is of this rank's elements: it must not look like one of the whole tensor."""
    return description if math.prod(description.shape) == count else description._replace(shape=(count,))
