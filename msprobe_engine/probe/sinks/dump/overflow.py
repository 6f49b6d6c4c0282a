"""Task ``overflow_check``: only calls that were given NaN or Inf, or made one, are written, with statistics and tensors.

As in the existing tool (8.1.1), a tensor counts when its largest or smallest element is not finite, so masks of -Inf count too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.log import get_logger, one_line
from msprobe_engine.core.records import Entry, Frame, leaves
from msprobe_engine.core.statistics import rows as _rows
from msprobe_engine.core.statistics.rows import Rows
from msprobe_engine.formats.dump.writing.tensor_names import holds_gradients
from msprobe_engine.formats.dump.writing.tensors import TensorStore
from msprobe_engine.probe.sinks.base import Sink
from msprobe_engine.probe.sinks.dump.dump_files import DumpSink
from msprobe_engine.probe.sinks.dump.filter_sink import ChosenRecords

_log = get_logger()
CLEAN = "steps without NaN or Inf"
_LINES = 20
"""Calls of a step that are named in the log; a NaN spoils all that follow."""


class Overflows:
    """How many calls with NaN or Inf are still wanted.

    Args:
        most: ``overflow_nums``; -1: all.
    """

    def __init__(self, most: int) -> None:
        self.left = most


class OverflowSink(ChosenRecords):
    """Keeps of every frame the calls with NaN or Inf; a step without any leaves no directory.

    Args:
        sink, files, tensors: see `ChosenRecords`.
        overflows: counts over all steps.
        skip: counts what was left out, by reason.
    """

    def __init__(self, sink: Sink, files: DumpSink, overflows: Overflows, tensors: TensorStore | None, skip: Callable[[str], None]) -> None:
        super().__init__(sink, files, tensors)
        self._overflows = overflows
        self._skip = skip

    @property
    def done(self) -> bool:
        return self._overflows.left == 0

    def choose(self, frame: Frame, alerts: Sequence[Alert]) -> None:
        names = [entry.name for entry in frame.entries if not holds_gradients(entry.name) and _not_finite(entry, frame.rows)]
        if not names:
            self._skip(CLEAN)
            self.discard(frame.step)
            return
        if self._overflows.left > 0:
            names = names[: self._overflows.left]
            self._overflows.left -= len(names)
        self._log_calls(frame.step, names)
        self.write_only(frame, names, alerts)

    def _log_calls(self, step: int, names: Collection[str]) -> None:
        for name in list(names)[:_LINES]:
            _log.warning("Overflow detected. step %d: %s has NaN or Inf in an input or output", step, one_line(name))
        if len(names) > _LINES:
            _log.warning("Overflow detected. step %d: %d more calls", step, len(names) - _LINES)
        if self.done:
            _log.info("as many calls with NaN or Inf as overflow_nums asks for were found; nothing more is collected")


def _not_finite(entry: Entry, rows: Rows) -> bool:
    for place, ref in leaves(entry):
        if ref.row < 0 or place.startswith("parameters"):
            continue
        counts = _rows.as_int64(rows[ref.row])
        if counts[_rows.NANS] or counts[_rows.POS_INF] or counts[_rows.NEG_INF]:
            return True
    return False
