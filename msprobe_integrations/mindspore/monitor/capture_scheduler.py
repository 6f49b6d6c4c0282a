"""The captures of a MindSpore probe."""

from __future__ import annotations

from typing import Any

from msprobe_engine.core.settings.schema import DumpSettings
from msprobe_integrations.common.monitor import capture_scheduler
from msprobe_integrations.mindspore.capture.captures import Captures
from msprobe_integrations.mindspore.capture.level import Capture
from msprobe_integrations.mindspore.dump.tensor_saver import TensorSaver


class CaptureScheduler(capture_scheduler.CaptureScheduler):
    """See `msprobe_integrations.common.monitor.capture_scheduler.CaptureScheduler`."""

    def _make_capture(self, level: str, **options: Any) -> Capture:
        del options  # communication is recorded with the other APIs, and what an optimizer calls is compiled
        return Capture(self._session.pipeline, level)

    def _make_dump(self, dump: DumpSettings) -> tuple[Captures, TensorSaver | None]:
        session = self._session
        keeper = TensorSaver.of_dump(dump, self._backend, session.pipeline, session.writer, session.faults)
        return Captures(session.pipeline, dump, keeper), keeper
