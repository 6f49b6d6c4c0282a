"""The captures of a torch probe."""

from __future__ import annotations

from typing import Any

from msprobe_engine.core.settings.schema import DumpSettings
from msprobe_integrations.common.monitor import plans
from msprobe_integrations.torch.capture.level import Capture
from msprobe_integrations.torch.dump.keep import Keeper
from msprobe_integrations.torch.tensors.slices import Slices


class Plans(plans.Plans):
    """See `msprobe_integrations.common.monitor.plans.Plans`."""

    def _make_capture(self, level: str, **options: Any) -> Capture:
        return Capture(self._session.pipeline, level, **options)

    def _make_dump(self, dump: DumpSettings) -> tuple[Capture, Keeper | None]:
        session = self._session
        slices = Slices(self._backend, dump.slice) if dump.slice else None
        keeper = Keeper.of_dump(dump, self._backend, session.pipeline, session.writer, session.faults, slices=slices)
        return Capture.of_dump(session.pipeline, dump, slices, keeper), keeper
