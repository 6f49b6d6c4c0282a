"""Alerts as the existing tool writes them: ``anomaly_detected/rank{R}/anomaly.json``.

One JSON object; key ``{tag}_step_{S}_call_{C}``, value::

    {"rank": 0, "step": 2, "micro_step": 0, "pp_stage": 0, "vpp_stage": 0, "call_id": 83,
     "tag_name": "0:1.mlp.2.bias/rank0/acc_grad", "message": "...", "group_mates": [0]}

Ours are real micro steps and call numbers (the order in the step), the further fields ``op``, ``rule``, ``severity`` and ``value``, and a
suffix to the key where it is taken already, so that nothing is overwritten. What the file holds when it is opened stays.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.errors import SinkError
from msprobe_engine.core.io.input_files import read_input
from msprobe_engine.core.io.json_text import parse_json
from msprobe_engine.core.io.output_files import make_directory, replace_file
from msprobe_engine.core.io.regular_files import explain
from msprobe_engine.core.log import get_logger
from msprobe_engine.core.records import Frame, Sample
from msprobe_engine.probe.sinks.base import Sink
from msprobe_engine.probe.sinks.tensorboard import tag_of

_log = get_logger()
FILE = "anomaly.json"
MAX_BYTES = 256 << 20
MAX_RECORDS = 20_000
"""An alarm that never stops must not fill the disk: what comes after so many is counted."""


class AnomalySink(Sink):
    """Writes the whole file anew after each step with alerts, atomically.

    Args:
        output_dir: root of the run's output.
        rank: global rank.

    Raises:
        SinkError: the directory cannot be created.
    """

    name = "anomalies"

    def __init__(self, *, output_dir: Path, rank: int) -> None:
        self._rank = rank
        self.path = output_dir / "anomaly_detected" / f"rank{rank}" / FILE
        """The file."""
        make_directory(self.path.parent, "anomaly sink")
        self._pp_stage, self._mates = 0, [rank]
        self._records = self._read_earlier()
        self._left_out = 0

    def place(self, pp_stage: int, mates: Sequence[int]) -> None:
        """Say where this rank is: its stage in the pipeline, and the ranks of that pipeline."""
        self._pp_stage, self._mates = pp_stage, list(mates)

    def write(self, frame: Frame, alerts: Sequence[Alert]) -> None:
        """Add the alerts of one step.

        Raises:
            SinkError: the file cannot be written; the alerts are tried again with the next ones.
        """
        if not alerts:
            return
        for alert in alerts:
            if len(self._records) < MAX_RECORDS:
                self._add(frame, alert)
            else:
                self._left_out += 1
        replace_file(self.path, json.dumps(self._records, indent=1).encode("ascii"))

    def close(self) -> None:
        """Say how many alerts found no room."""
        if self._left_out:
            _log.warning("%s: holds %d alerts; %d more were left out", self.path, MAX_RECORDS, self._left_out)
            self._left_out = 0

    def _add(self, frame: Frame, alert: Alert) -> None:
        sample = self._sample(frame, alert)
        tag = tag_of(sample, self._rank) if sample is not None else f"{alert.name}/rank{self._rank}/{alert.kind}"
        op = str(alert.extra.get("op", ""))
        key = base = f"{tag}_step_{alert.step}_call_{alert.order}"
        number = 1
        while key in self._records:
            key = f"{base}_{op or alert.rule}" + (f"_{number}" if number > 1 else "")
            number += 1
        self._records[key] = {
            "rank": alert.rank,
            "step": alert.step,
            "micro_step": max(alert.micro_step, 0),
            "pp_stage": self._pp_stage,
            "vpp_stage": sample.vpp_stage if sample is not None else int(alert.extra.get("vpp_stage", 0)),
            "call_id": alert.order,
            "tag_name": tag,
            "message": alert.message,
            "group_mates": self._mates,
            "op": op,
            "rule": alert.rule,
            "severity": alert.severity,
            "value": alert.value if math.isfinite(alert.value) else str(alert.value),
        }

    def _sample(self, frame: Frame, alert: Alert) -> Sample | None:
        """The sample an alert is about: orders count entries first."""
        position = alert.order - len(frame.entries)
        if 0 <= position < len(frame.samples) and frame.samples[position].name == alert.name:
            return frame.samples[position]
        return None

    def _read_earlier(self) -> dict[str, Any]:
        """What an earlier part of the run left. A file that is none of ours is put aside, never deleted."""
        try:
            records = parse_json(read_input(self.path, MAX_BYTES, follow=False))
        except FileNotFoundError:
            return {}
        except ValueError:
            records = None
        except OSError as error:
            if error.errno != errno.EFBIG:
                raise SinkError(f"anomaly sink: cannot read {self.path}: {explain(error)}") from error
            records = None
        if isinstance(records, dict) and all(isinstance(record, dict) for record in records.values()):
            return records
        aside = self.path.with_name(f"{FILE}.{os.getpid()}.unreadable")
        os.replace(self.path, aside)
        _log.warning("%s holds no anomalies that can be read; it was moved to %s", self.path, aside.name)
        return {}
