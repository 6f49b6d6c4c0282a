"""CSV files of `TrainerMonitorV2`, with the columns of the existing tool's monitor_v2.

::

    {output_dir}/rank_{R}/{monitor}_step{first}-{last}.csv
    vpp_stage,step,module_name,scope[,micro_step],<statistics>

Numbers are written in full, as float64. What does not exist is ``nan``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.errors import SinkError
from msprobe_engine.core.io.output_files import AppendFile, make_directory
from msprobe_engine.core.io.safe_cells import safe_cell
from msprobe_engine.core.records import Frame, Sample
from msprobe_engine.core.statistics import columns
from msprobe_engine.probe.sinks.base import Sink

_PLACE = re.compile(r"(.*)\.(input|output)(?:_([0-9]+))?", re.DOTALL)
_MONITOR = {
    "actv": "module", "actv_grad": "module", "grad_unreduced": "weight_grad", "grad_reduced": "weight_grad",
    "exp_avg": "optimizer", "exp_avg_sq": "optimizer", "param_origin": "param", "param_updated": "param", "other": "cc",
}  # fmt: skip
_SCOPE = {"actv": "forward", "actv_grad": "backward", "grad_unreduced": "unreduced", "grad_reduced": "reduced", "other": "comm"}
_ORDER = {family: i for i, family in enumerate(("actv", "actv_grad", "grad_unreduced", "grad_reduced", *_MONITOR))}


class CsvV2Sink(Sink):
    """Writes the samples of the monitors that are on; one block per step and file.

    Args:
        output_dir: root of the files.
        rank: global rank.
        ops: monitor to its statistics.
        chunks: True when the model is a list: stages and names are those of its chunks, else the stage is -1.
        micro_batches: micro batches per step.
        cc_ranks: ranks whose collectives are written, empty is all.

    Raises:
        SinkError: the directory cannot be created.
    """

    name = "csv"

    def __init__(
        self,
        *,
        output_dir: Path,
        rank: int,
        ops: Mapping[str, tuple[str, ...]],
        start_step: int = 0,
        steps_per_file: int = 1,
        chunks: bool = False,
        micro_batches: int = 1,
        cc_ranks: Sequence[int] = (),
    ) -> None:
        self.directory = output_dir / f"rank_{rank}"
        """Where the files are."""
        make_directory(self.directory, "csv sink")
        self._ops, self._start, self._steps = ops, start_step, steps_per_file
        self.chunks, self.micro_batches = chunks, micro_batches
        self._collectives = not cc_ranks or rank in cc_ranks
        self._files: dict[str, AppendFile] = {}
        self._block = -1
        self._size = 0

    @property
    def size(self) -> int:
        """Bytes written."""
        return self._size

    def header(self, monitor: str) -> list[str]:
        """Column names of a monitor's files."""
        micro = ["micro_step"] if monitor == "weight_grad" else []
        return ["vpp_stage", "step", "module_name", "scope", *micro, *self._ops[monitor]]

    def write(self, frame: Frame, alerts: Sequence[Alert]) -> None:
        """Append the samples of one frame. All files are tried before an error is raised.

        Raises:
            SinkError: a block could not be written.
        """
        del alerts
        block = self._start + max(0, frame.step - self._start) // self._steps * self._steps
        if block != self._block:
            self.close()
            self._block = block
        by_monitor: dict[str, list[Sample]] = {}
        for sample in frame.samples:
            monitor = _MONITOR.get(sample.family, "")
            if monitor in self._ops and sample.ref.row >= 0 and (monitor != "cc" or (self._collectives and "call" in sample.extra)):
                by_monitor.setdefault(monitor, []).append(sample)
        failed: SinkError | None = None
        for monitor, samples in by_monitor.items():
            try:
                self._append(monitor, frame, sorted(samples, key=lambda s: _ORDER[s.family]))
            except SinkError as error:
                failed = error
        if failed is not None:
            raise failed

    def close(self) -> None:
        """Close the files of the block."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _append(self, monitor: str, frame: Frame, samples: list[Sample]) -> None:
        rows = frame.rows[[s.ref.row for s in samples]]
        values = [columns.column(rows, op).tolist() for op in self._ops[monitor]]
        lines = []
        for i, sample in enumerate(samples):
            cells = [self._stage(sample), str(frame.step), safe_cell(self._name(sample)), _SCOPE.get(sample.family, sample.family)]
            if monitor == "weight_grad":
                cells.append(str(sample.micro_step + 1 if sample.micro_step >= 0 else self.micro_batches))  # counted from 1
            lines.append(",".join((*cells, *(repr(series[i]) for series in values))))
        text = "\n".join(lines) + "\n"
        file = self._files.get(monitor)
        if file is None:
            last = self._block + self._steps - 1
            file = self._files[monitor] = AppendFile(self.directory / f"{monitor}_step{self._block}-{last}.csv")
        if file.size == 0:
            text = ",".join(self.header(monitor)) + "\n" + text
        data = text.encode("utf-8", "backslashreplace")
        file.append(data)
        self._size += len(data)

    def _stage(self, sample: Sample) -> str:
        if sample.family == "other":
            return ""
        return str(sample.vpp_stage) if self.chunks else "-1"

    def _name(self, sample: Sample) -> str:
        if sample.family == "other":
            return str(sample.extra["tag"])
        name = f"{sample.vpp_stage}:{sample.name}" if self.chunks else sample.name
        if sample.family in ("actv", "actv_grad") and (match := _PLACE.fullmatch(name)):
            kind = match[2] if sample.family == "actv" else f"grad_{match[2]}"
            return f"{match[1]}.{kind}.{match[3] or 0}"
        return f"{name}.{sample.family}" if sample.family in ("exp_avg", "exp_avg_sq") else name
