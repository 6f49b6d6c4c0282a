"""`PrecisionDebugger`: dumps under the names users already type.

debugger = PrecisionDebugger("config.json")
for batch in data:
    debugger.start(model)
    loss = train(batch)
    debugger.stop()
    debugger.step()
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from msprobe_engine.core import log
from msprobe_engine.core.settings.hot import HotSwitch
from msprobe_engine.core.settings.schema import ProbeSettings
from msprobe_integrations.common.dump import module_selection
from msprobe_integrations.common.dump.debugger import Debugger
from msprobe_integrations.torch.dump.checks import MODELS
from msprobe_integrations.torch.dump.run import TorchDumpRun
from msprobe_integrations.torch.gradient_probe.probe import GradientProbe
from msprobe_integrations.torch.training import owner


class PrecisionDebugger(Debugger):
    """One per process: a second construction returns the first object. All methods but the constructor are class methods, so any
    file of a program may call ``PrecisionDebugger.start()``.

    Args:
        config_path: ``config.json`` (or ``probe.yaml`` with a ``dump`` section).
        task, dump_path, level, step, rank: override the file.
        model: the model, when ``start`` is called without. As 26.2.0 has it, the list of steps may stand here.

    Raises:
        SettingsError: the configuration is wrong; the message names every wrong key.
        UsageError: an argument is of a kind that cannot work.
    """

    _instance: ClassVar[PrecisionDebugger | None] = None
    _compiled_saves: ClassVar[dict[str, bool]] = {}
    _run: TorchDumpRun | None
    gradients: GradientProbe | None
    gradient_probe = GradientProbe

    def __init__(
        self,
        config_path: str | Path | None = None,
        task: str | None = None,
        dump_path: str | None = None,
        level: str | None = None,
        model: nn.Module | Sequence[nn.Module] | None = None,
        step: Sequence[int | str] | None = None,
        rank: Sequence[int | str] | None = None,
    ) -> None:
        try:
            model, step = MODELS.or_steps(model, step)
        except BaseException:
            if not self._built:
                type(self)._instance = None
            raise
        super().__init__(config_path, task, dump_path, level, step, rank, model)

    @staticmethod
    def make_run(settings: ProbeSettings, model: Any, hot: HotSwitch | None) -> TorchDumpRun:
        return TorchDumpRun(settings, model, hot)

    @staticmethod
    def claim() -> None:
        owner.of_user()

    @classmethod
    def step(cls) -> None:
        if cls._compiled_saves:
            names = ", ".join(sorted(cls._compiled_saves)[:5])
            log.warn_once("save compiled", f"PrecisionDebugger.save has no effect inside torch.compile: {names}")
            cls._compiled_saves.clear()
        super().step()

    @classmethod
    def save(cls, variable: Any, name: str, save_backward: bool = True) -> None:
        if torch.compiler.is_compiling():
            cls._compiled_saves[str(name)] = True
        else:
            super().save(variable, name, save_backward)

    @classmethod
    def monitor(cls, model: nn.Module | Sequence[nn.Module], optimizer: Any = None) -> None:
        """Task grad_probe: watch the gradients of `model` from the next update of its optimizer on. No effect in other tasks. Ends with
        the program, or with `stop` where ``start`` was never called.

        Args:
            model: the model, or its virtual pipeline chunks.
            optimizer: the one whose updates count, or a list. None: every optimizer that holds parameters of the model; not enough
                where it holds others than the model (Megatron's distributed optimizer, DeepSpeed ZeRO).

        Raises:
            UsageError: there is no debugger, or an argument cannot work.
        """
        gradients: GradientProbe | None = cls._watch()
        if gradients is not None:
            gradients.monitor(model, optimizer)


def module_dump(module: nn.Module, dump_name: str) -> None:
    """From now on record only `module`, as ``Module.{dump_name}.{Class}``; its children, other modules and all APIs are not.

    Raises:
        UsageError: there is no debugger, or an argument is of the wrong type.
    """
    module_selection.check(MODELS, module, dump_name)
    PrecisionDebugger._begin_module_dump(module, dump_name)


def module_dump_end() -> None:
    """Record again what the level says.

    Raises:
        UsageError: there is no debugger.
    """
    PrecisionDebugger._end_module_dump()


def save(variable: Any, name: str, save_backward: bool = True) -> None:
    """`PrecisionDebugger.save`."""
    PrecisionDebugger.save(variable, name, save_backward)
