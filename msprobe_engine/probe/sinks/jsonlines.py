"""JSON lines: one object per step, for programs that read a stream.

``{path, or <output_dir>/jsonl}/rank{R}.jsonl``, appended to when it is there. Lines::

    {"run": {rank, world_size, rank_info, version, started, launch, ...}}    at the beginning, and when more is known
    {"step", "rank", "time", "launch", "complete", "scalars": {name: number}, "samples": [...], "alerts": [...], "lost": {reason: count}}

``launch`` tells the lines of one launch from those of others that have written into the file.

A sample has ``family``, ``name``, ``vpp_stage``, where they exist ``micro_step``, ``phase``, ``state``, ``tag`` and ``extra``, then
``shape``, ``dtype`` and the statistics; derived numbers of modules have their columns in place of these. ``histogram`` holds ``kind`` and
``counts``. Numbers that JSON does not have are the texts ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``; a statistic that does not exist
is ``"NaN"``. Alerts are left out when there are none, and so are losses.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.io.json_text import dumps, number
from msprobe_engine.core.io.output_files import AppendFile
from msprobe_engine.core.records import Frame, Sample
from msprobe_engine.core.statistics import histograms
from msprobe_engine.probe.sinks.csv.features import FEATURES, pivot
from msprobe_engine.probe.sinks.csv.number_cells import statistic_cells
from msprobe_engine.probe.sinks.one_file import OneFileSink
from msprobe_engine.probe.sinks.resume import whole_lines
from msprobe_engine.probe.sinks.run_files import alert_fields

_TEXTS = {"nan": '"NaN"', "inf": '"Infinity"', "-inf": '"-Infinity"'}
_OWN = frozenset(("column", "histogram", "state", "tag"))


class JsonLinesSink(OneFileSink):
    """Writes samples, scalars and alerts. Each frame is one line and one write, so a killed process leaves whole steps."""

    name = "jsonl"
    place = "jsonl"
    ending = ".jsonl"

    def _open(self) -> None:
        self._file = AppendFile(self.path)
        if self._file.size and whole_lines(self.path):
            self._file.close()
            self._file = AppendFile(self.path)
        self._heads: dict[tuple[Any, ...], str] = {}

    @property
    def size(self) -> int:
        """Bytes in the file, those of earlier launches too."""
        return self._file.size

    def write(self, frame: Frame, alerts: Sequence[Alert]) -> None:
        """Append one line.

        Raises:
            SinkError: it could not be written; the file ends with the line before it.
        """
        launch = self._run.content["launch"]
        now = round(time.time(), 3)
        head = dumps({"step": frame.step, "rank": frame.rank, "time": now, "launch": launch, "complete": frame.complete})
        parts = [head[:-1], f',"scalars":{dumps(frame.scalars)},"samples":[{",".join(self._samples(frame))}]']
        if alerts:
            parts.append(f',"alerts":[{",".join(dumps(alert_fields(alert)) for alert in alerts)}]')
        if frame.lost:
            parts.append(f',"lost":{dumps(frame.lost)}')
        run = f'{{"run":{dumps(self._run.content)}}}\n' if self._run.refresh(frame.step) else ""
        try:
            self._file.append(f"{run}{''.join(parts)}}}\n".encode())
        except BaseException:
            if run:
                self._run.stale()
            raise
        self.losses.count_alerts(len(alerts))

    def _write_run(self) -> None:
        self._file.append(f'{{"run":{dumps(self._run.content)}}}\n'.encode())

    def _shut(self) -> None:
        self._file.close()

    def _samples(self, frame: Frame) -> list[str]:
        families = self._names.by_family(frame.samples)
        out = []
        for family, samples in families.items():
            if family in FEATURES:
                first, values = pivot(frame, samples)
                columns = {op: [number(v) for v in column.tolist()] for op, column in values.items()}
                for i, sample in enumerate(first):
                    numbers = "".join(f",{json.dumps(op)}:{column[i]}" for op, column in columns.items())
                    out.append(f"{{{self._head(sample, family, described=False)}{numbers}}}")
                continue
            rows = frame.rows[[max(s.ref.row, 0) for s in samples]] if len(frame.rows) else None
            cells = [_json_cells(statistic_cells(rows, op)) for op in self._ops] if rows is not None else []
            template = "".join(f',"{op}":%s' for op in self._ops)
            lines = [template % values for values in zip(*cells)] if cells else []
            blank = template % (('"NaN"',) * len(self._ops))
            for i, sample in enumerate(samples):
                numbers = lines[i] if lines and sample.ref.row >= 0 else blank
                more = _histogram(frame, sample) if "histogram" in sample.extra else ""
                out.append(f"{{{self._head(sample, family)}{numbers}{more}}}")
        return out

    def _head(self, sample: Sample, family: str, described: bool = True) -> str:
        extra = {k: v for k, v in sample.extra.items() if k not in _OWN} if sample.extra else {}
        d = sample.ref.description
        key = (family, sample.name, sample.vpp_stage, sample.micro_step, sample.phase, d.shape, d.dtype)
        head = None if sample.extra else self._heads.get(key)
        if head is None:
            fields: dict[str, Any] = {"family": family, "name": sample.name, "vpp_stage": sample.vpp_stage}
            if sample.micro_step >= 0:
                fields["micro_step"] = sample.micro_step
            if sample.phase:
                fields["phase"] = sample.phase
            fields.update({k: str(sample.extra[k]) for k in ("state", "tag") if k in sample.extra})
            if described:
                fields.update(shape=list(d.shape), dtype=d.dtype)
            if extra:
                fields["extra"] = extra
            head = dumps(fields)[1:-1]
            if not sample.extra and len(self._heads) < 100_000:  # shapes that change at every step must not fill the memory
                self._heads[key] = head
        return head


def _json_cells(cells: list[str]) -> list[str]:
    # The digest is a text, too.
    return [_TEXTS.get(cell) or (f'"{cell}"' if cell.startswith("0x") else cell) for cell in cells]


def _histogram(frame: Frame, sample: Sample) -> str:
    reference = sample.extra["histogram"]
    counts = histograms.counts(frame.rows, reference["row"], reference["kind"]).tolist()
    return f',"histogram":{dumps({"kind": reference["kind"], "counts": counts})}'
