"""The captures of a torch probe."""

from __future__ import annotations

from typing import Any

from msprobe_engine.core.settings.schema import DumpSettings
from msprobe_integrations.common.capture.filters import record_filter
from msprobe_integrations.common.monitor import plans
from msprobe_integrations.torch.capture.level import Capture
from msprobe_integrations.torch.dump.keep import Keeper
from msprobe_integrations.torch.dump.tensor_files import build_keeper
from msprobe_integrations.torch.hooks.graph_tasks import current_graph_task
from msprobe_integrations.torch.tensors.slices import Slices


class Plans(plans.Plans):
    """See `msprobe_integrations.common.monitor.plans.Plans`."""

    def _make_capture(self, level: str, **options: Any) -> Capture:
        return Capture(self._session.pipeline, level, **options)

    def _make_dump(self, dump: DumpSettings) -> tuple[Capture, Keeper | None]:
        session = self._session
        slices = Slices(self._backend, dump.slice) if dump.slice else None
        keeper = build_keeper(dump, self._backend, session.pipeline, session.writer, session.faults, slices)
        capture = Capture(
            session.pipeline,
            dump.level,
            stacks=dump.extra_info,
            data_mode=dump.data_mode,
            kept=record_filter(dump, current_graph_task),
            slices=slices,
            keeper=keeper,
        )
        return capture, keeper
