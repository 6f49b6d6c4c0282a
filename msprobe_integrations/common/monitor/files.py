"""Where the monitor's small files go that no sink writes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from msprobe_engine.core.io.output_files import make_directory
from msprobe_engine.probe.sinks.csv.monitor import CsvSink

if TYPE_CHECKING:
    from msprobe_integrations.common.monitor.probe import Probe


def monitor_root(probe: Probe) -> Path:
    """The directory that holds one directory per rank."""
    csv = probe.settings.sinks.csv
    return Path(csv.path or os.environ.get("MONITOR_OUTPUT_DIR") or probe.session.output_dir / "monitor")


def rank_directory(probe: Probe) -> Path:
    """That of the CSV files of this rank; without CSV files ``rank{R}`` in the monitor's directory, made here.

    Raises:
        SinkError: it cannot be made.
    """
    for sink in probe.session.writer.sinks:
        if isinstance(sink, CsvSink):
            return sink.directory
    directory = monitor_root(probe) / f"rank{probe.backend.rank() or 0}"
    make_directory(directory, "monitor")
    return directory
