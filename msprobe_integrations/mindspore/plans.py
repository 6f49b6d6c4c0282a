"""The captures of a MindSpore probe."""

from __future__ import annotations

from typing import Any

from msprobe_engine.settings.schema import DumpSettings
from msprobe_integrations.common import plans


class Plans(plans.Plans):
    """See `msprobe_integrations.common.plans.Plans`."""

    def _make_capture(self, level: str, **options: Any) -> Any:
        from msprobe_integrations.mindspore.capture import Capture

        return Capture(self._session.pipeline, level, **options)

    def _make_dump(self, dump: DumpSettings) -> tuple[Any, Any]:
        raise NotImplementedError
