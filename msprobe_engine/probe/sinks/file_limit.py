"""A bound on the files of the monitor (``sinks.max_gb``): what is written stays, and the fuller, the fewer steps are added.

Up to half of the limit every step is written; from there on every second one that has samples, until half of what is left is used, then
every fourth, and so on: a run may be as long as it likes, its beginning is whole, its latest steps are there, and the files stay within
the limit (but for one step).
What is thinned are the samples; scalars (the loss) and alerts are written for every step, and steps with alerts are whole. At the limit
itself nothing more is written.

Files say so themselves: the scalar `SAMPLES_EVERY` stands in the first step that is thinned and in every later one that has samples, and is
infinite in the last step that is written at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.log import get_logger
from msprobe_engine.core.records import Frame
from msprobe_engine.formats.monitor.series import SAMPLES_EVERY
from msprobe_engine.probe.sinks.base import Sink

_log = get_logger()
_ADVICE = "raise it, or watch fewer tensors or statistics"


class FileLimit:
    """What of a frame the sinks that write files get. Used on the writer's thread.

    Args:
        limit: bytes of one rank in one launch, all sinks together; 0: no limit.
        sinks: the `size` of their files is counted.

    Attributes:
        thinned: steps without samples so far.
        lost: steps of which nothing was written.
    """

    def __init__(self, limit: int, sinks: Sequence[Sink]) -> None:
        self._limit = limit
        self._sinks = sinks
        self._stride = 1
        self._sampled = 0
        self._ended = False
        self.thinned = 0
        self.lost = 0

    def shorten(self, frame: Frame, alerts: Sequence[Alert]) -> Frame | None:
        """The frame for the files: itself, without its samples, or None."""
        if not self._limit or self._ended:
            self.lost += self._ended
            return None if self._ended else frame
        used = sum(sink.size or 0 for sink in self._sinks)
        if used >= self._limit:
            self._ended = True
            self.lost += 1
            _log.error("%s: used up; from step %d on nothing is written to the files of the monitor; %s", self._name, frame.step, _ADVICE)
            return replace(frame, samples=[], scalars={SAMPLES_EVERY: math.inf})
        stride = 1 << int(math.log2(self._limit / (self._limit - used)))
        changed = stride > self._stride
        if changed and self._stride == 1:
            _log.warning(
                "%s: half of it is used; from step %d on the files of the monitor get the samples of one step in %d, later of fewer; "
                "scalars and alerts of all steps are written; %s", self._name, frame.step, stride, _ADVICE
            )  # fmt: skip
        self._stride = max(stride, self._stride)
        self._sampled += bool(frame.samples)
        if self._stride == 1 or not (frame.samples or changed):
            return frame
        if self._sampled % self._stride == 0 or alerts:
            return replace(frame, scalars={**frame.scalars, SAMPLES_EVERY: float(self._stride)})
        self.thinned += 1
        return replace(frame, samples=[], scalars={**frame.scalars, **({SAMPLES_EVERY: float(self._stride)} if changed else {})})

    def close(self) -> None:
        """Say what was left out."""
        if self.thinned or self.lost:
            _log.warning("%s: samples of %d steps are not in the files, and nothing of %d more", self._name, self.thinned, self.lost)

    @property
    def _name(self) -> str:
        return f"sinks.max_gb ({self._limit / 1e9:g})"
