"""What `PrecisionDebugger` takes and refuses with MindSpore."""

from __future__ import annotations

from typing import Any

from mindspore import nn

from msprobe_engine.core.errors import SettingsError
from msprobe_engine.core.settings.schema import ProbeSettings
from msprobe_integrations.common.dump import checks as dump_checks
from msprobe_integrations.common.dump.checks import ModelKind
from msprobe_integrations.mindspore.models import is_model

_ABSENT = ("load", "perturb", "slice", "request_id")


class CellKind(ModelKind):
    """Cells; where torch's names stand for MindSpore (MSAdapter), its modules too."""

    def __init__(self) -> None:
        super().__init__(nn.Cell, "mindspore.nn.Cell")

    def is_model(self, value: Any) -> bool:
        return is_model(value)


CELLS = CellKind()


def check(settings: ProbeSettings, source: str) -> None:
    """Can these settings be dumped with MindSpore?

    Raises:
        SettingsError: they cannot; `source` says where they come from.
    """
    dump_checks.check(settings, source)
    assert settings.dump is not None
    for key in _ABSENT:
        if getattr(settings.dump, key):
            raise SettingsError(f"{source}: '{key}' works with PyTorch only; leave it out of a dump of MindSpore")
    if settings.dump.level == "L2" and settings.dump.data_mode not in (("all",), ("input",), ("output",)):
        seen = list(settings.dump.data_mode)
        raise SettingsError(f"{source}: data_mode {seen} is not possible at level L2; allowed: ['all'], ['input'] or ['output'] of kernels")
