"""Parquet files for pandas, DuckDB, Spark and the like: ``{path, or <output_dir>/parquet}/rank{R}_{launch}_{first}-{last}.parquet``.

Columns: `msprobe_engine.formats.monitor.arrow_tables`. A Parquet file can be read when it is finished: a part is written whole every
`steps_per_file` steps, after `SECONDS`, and at the end. A process that is killed loses the steps since its last part; CSV files lose none.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.io.output_files import replace_file
from msprobe_engine.core.records import Frame, Sample
from msprobe_engine.core.settings.schema import ParquetSettings
from msprobe_engine.formats.monitor.arrow_tables import SCALAR, VALUE, arrow, concatenate_tables, metadata, table_of
from msprobe_engine.formats.monitor.reader import HIDDEN, PARQUET
from msprobe_engine.formats.monitor.series import Key
from msprobe_engine.probe.sinks.csv.features import FEATURES
from msprobe_engine.probe.sinks.one_file import OneFileSink
from msprobe_engine.probe.sinks.run_files import alert_fields

SECONDS = 60.0
"""Longest time between two parts."""
LARGEST = 1 << 26
"""Bytes that wait for the next part."""


class ParquetSink(OneFileSink):
    """Writes samples, scalars and alerts."""

    name = "parquet"
    place = "parquet"
    ending = PARQUET
    hidden = HIDDEN
    left_out = ("shape", "dtype", "digest")

    def __init__(self, settings: ParquetSettings, *args: Any, **words: Any) -> None:
        arrow()
        self._steps_per_file = settings.steps_per_file
        self._written = 0
        super().__init__(settings, *args, **words)

    def _open(self) -> None:
        self._tables: list[Any] = []
        self._alerts: list[dict[str, Any]] = []
        self._steps: list[int] = []
        self._began = time.monotonic()

    @property
    def home(self) -> Path:
        return self.path.parent

    @property
    def size(self) -> int:
        """Bytes written by this launch."""
        return self._written

    def write(self, frame: Frame, alerts: Sequence[Alert]) -> None:
        """Keep a frame for the next part, and write it when it is time.

        Raises:
            SinkError: the part could not be written; it waits on.
        """
        self._run.refresh(frame.step)
        if frame.scalars:
            keys = [Key(0, name) for name in frame.scalars]
            self._tables.append(table_of(self._rank, frame.step, SCALAR, keys, {VALUE: list(frame.scalars.values())}))
        for family, samples in self._names.by_family(frame.samples).items():
            self._add(family, frame, samples)
        self._alerts += [alert_fields(alert) for alert in alerts]
        self.losses.count_alerts(len(alerts))
        self._steps.append(frame.step)
        full = len(self._steps) >= self._steps_per_file or sum(table.nbytes for table in self._tables) > LARGEST
        if full or time.monotonic() - self._began > SECONDS:
            self._write_part()

    def flush(self) -> None:
        self._write_part()

    _shut = flush

    def _write_run(self) -> None:
        """It is in every part; the last one is written next."""

    def _write_part(self) -> None:
        if not self._steps:
            return
        pa = arrow()
        table = concatenate_tables(self._tables or [table_of(self._rank, 0, SCALAR, [], {VALUE: []})])
        sink = pa.BufferOutputStream()
        pa.parquet.write_table(table.replace_schema_metadata(metadata(self._run.content, self._alerts)), sink, compression="zstd")
        data = sink.getvalue().to_pybytes()
        name = f"rank{self._rank}_{self._run.content['launch'][:8]}_{self._steps[0]:08}-{self._steps[-1]:08}{self.ending}"
        replace_file(self.path.parent / name, data)
        self._written += len(data)
        self._open()

    def _add(self, family: str, frame: Frame, samples: list[Sample]) -> None:
        samples, keys, values = self._table(family, frame, samples)
        if not samples:
            return
        kinds = None
        if family not in FEATURES:
            kinds = [(str(list(d.shape)), d.dtype) for d in (s.ref.description for s in samples)]
        self._tables.append(table_of(self._rank, frame.step, family, keys, values, kinds))
