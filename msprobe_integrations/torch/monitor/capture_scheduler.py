"""The captures of a torch probe."""

from __future__ import annotations

from typing import Any

from msprobe_engine.core.settings.schema import DumpSettings
from msprobe_integrations.common.monitor import capture_scheduler
from msprobe_integrations.torch.capture.level import Capture
from msprobe_integrations.torch.dump.tensor_saver import TensorSaver
from msprobe_integrations.torch.tensors.slices import Slices


class CaptureScheduler(capture_scheduler.CaptureScheduler):
    """See `msprobe_integrations.common.monitor.capture_scheduler.CaptureScheduler`."""

    def _make_capture(self, level: str, **options: Any) -> Capture:
        return Capture(self._session.pipeline, level, **options)

    def _make_dump(self, dump: DumpSettings) -> tuple[Capture, TensorSaver | None]:
        session = self._session
        slices = Slices(self._backend, dump.slice) if dump.slice else None
        keeper = TensorSaver.of_dump(dump, self._backend, session.pipeline, session.writer, session.faults, slices=slices)
        return Capture.of_dump(session.pipeline, dump, slices, keeper), keeper
