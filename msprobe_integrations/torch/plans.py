"""The captures of a torch probe."""

from __future__ import annotations

from typing import Any

from msprobe_engine.core.settings.schema import DumpSettings
from msprobe_integrations.common import plans
from msprobe_integrations.common.filters import record_filter
from msprobe_integrations.torch.capture import Capture
from msprobe_integrations.torch.graph_tasks import current_graph_task
from msprobe_integrations.torch.keep import Keeper
from msprobe_integrations.torch.slices import Slices
from msprobe_integrations.torch.tensor_dump import build_keeper


class Plans(plans.Plans):
    """See `msprobe_integrations.common.plans.Plans`."""

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
