"""The trend data base, written while the training runs: one file per rank, one transaction per step.

``{path, or <output_dir>/trend}/rank{R}.trend.db``; tables: `msprobe_engine.formats.monitor.trend_db`. The horizontal axis is the step,
micro batches are targets of their own. ``msprobe data2db`` puts the files of all ranks into one.
"""

from __future__ import annotations

from collections.abc import Sequence

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.errors import SinkError
from msprobe_engine.core.io.json_text import dumps
from msprobe_engine.core.records import Frame, Sample
from msprobe_engine.formats.monitor.trend_db import TrendDatabase
from msprobe_engine.probe.sinks.one_file import OneFileSink
from msprobe_engine.probe.sinks.run_files import alert_fields


class SqliteSink(OneFileSink):
    """Writes samples, scalars and alerts."""

    name = "sqlite"
    place = "trend"
    ending = ".trend.db"
    left_out = ("shape", "dtype", "digest")

    def _open(self) -> None:
        try:
            self._db = TrendDatabase(self.path)
        except SinkError as error:
            raise SinkError(f"sqlite sink: {error}") from error

    @property
    def size(self) -> int:
        """Bytes of the data base, those of earlier launches too."""
        return self._db.size

    def write(self, frame: Frame, alerts: Sequence[Alert]) -> None:
        """Add one frame in one transaction.

        Raises:
            SinkError: nothing of this frame was written.
        """
        families = self._names.by_family(frame.samples)
        new = self._run.refresh(frame.step)
        run = self._run.content
        try:
            with self._db.transaction():
                self._db.begin_step(self._rank, frame.step, run["launch"], run["started"], run["restart"])
                for family, samples in families.items():
                    self._add(family, frame, samples)
                self._db.add_scalars(self._rank, [(frame.step, name, value) for name, value in frame.scalars.items()])
                self._db.add_alerts(self._rank, [(alert.step, dumps(alert_fields(alert) | {"launch": run["launch"]})) for alert in alerts])
                if new:
                    self._db.set_info(self._rank, dumps(self._run.content))
        except BaseException:
            if new:
                self._run.stale()
            raise
        self.losses.count_alerts(len(alerts))

    def _write_run(self) -> None:
        with self._db.transaction():
            self._db.set_info(self._rank, dumps(self._run.content))

    def _shut(self) -> None:
        self._db.close()

    def _add(self, family: str, frame: Frame, samples: list[Sample]) -> None:
        _, keys, values = self._table(family, frame, samples)
        # Several metrics only where a family has several phases or states.
        places: dict[int, list[int]] = {}
        targets = []
        for i, key in enumerate(keys):
            metric, target = self._db.place(family, key)
            places.setdefault(metric, []).append(i)
            targets.append(target)
        for metric, rows in places.items():
            chosen = {op: v[rows] for op, v in values.items()}
            self._db.add(self._rank, metric, [frame.step] * len(rows), [targets[i] for i in rows], chosen)
