"""`PrecisionDebugger`: dumps under the names users already type.

debugger = PrecisionDebugger("config.json")
for batch in data:
    debugger.start(net)
    loss, gradients = value_and_grad(batch)
    debugger.stop()
    optimizer(gradients)
    debugger.step()
"""

from __future__ import annotations

from typing import Any, ClassVar

from msprobe_engine.core.settings.hot import HotSwitch
from msprobe_engine.core.settings.schema import ProbeSettings
from msprobe_integrations.common.dump import module_selection
from msprobe_integrations.common.dump.debugger import Debugger
from msprobe_integrations.mindspore.dump import checks as dump_checks
from msprobe_integrations.mindspore.dump.checks import CELLS
from msprobe_integrations.mindspore.dump.run import MindSporeDumpRun
from msprobe_integrations.mindspore.gradient_probe.probe import GradientProbe
from msprobe_integrations.mindspore.hooks.eager import outside_of_graphs


class PrecisionDebugger(Debugger):
    """One per process: a second construction returns the first object. All methods but the constructor are class methods, so any
    file of a program may call ``PrecisionDebugger.start()``.

    Args:
        config_path: ``config.json`` (or ``probe.yaml`` with a ``dump`` section).
        task, dump_path, level, step, rank: override the file.
        model: the Cell, when ``start`` is called without.

    Raises:
        SettingsError: the configuration is wrong; the message names every wrong key.
        UsageError: an argument is of a kind that cannot work.
    """

    _instance: ClassVar[PrecisionDebugger | None] = None
    _run: MindSporeDumpRun | None
    gradients: GradientProbe | None
    gradient_probe = GradientProbe

    @staticmethod
    def make_run(settings: ProbeSettings, model: Any, hot: HotSwitch | None) -> MindSporeDumpRun:
        if model is not None:
            CELLS.check(model)
        return MindSporeDumpRun(settings, model, hot)

    @staticmethod
    def check(settings: ProbeSettings, source: str) -> None:
        dump_checks.check(settings, source)

    @classmethod
    def monitor(cls, optimizer: Any) -> None:
        """Task grad_probe: watch the gradients that `optimizer` is given from its next update on. No effect in other tasks. Ends with the
        program, or with `stop` where ``start`` was never called.

        Args:
            optimizer: the optimizer, or a list of them.

        Raises:
            UsageError: there is no debugger, or an argument cannot work.
        """
        gradients: GradientProbe | None = cls._watch()
        if gradients is not None:
            gradients.monitor(optimizer)


for _name in ("start", "stop", "step", "save"):  # a program may call them inside of what it compiles
    setattr(PrecisionDebugger, _name, classmethod(outside_of_graphs(getattr(Debugger, _name).__func__)))


def module_dump(module: Any, dump_name: str) -> None:
    """From now on record only `module`, as ``Cell.{dump_name}.{Class}``; its children, other Cells and all APIs are not.

    Raises:
        UsageError: there is no debugger, or an argument is of the wrong type.
    """
    module_selection.check(CELLS, module, dump_name)
    PrecisionDebugger._begin_module_dump(module, dump_name)


def module_dump_end() -> None:
    """Record again what the level says.

    Raises:
        UsageError: there is no debugger.
    """
    PrecisionDebugger._end_module_dump()
