"""The dump of one process that trains with MindSpore."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mindspore

from msprobe_engine.accuracy.free_benchmark.table import FreeBenchmarkTable
from msprobe_engine.core import log
from msprobe_engine.core.errors import SettingsError
from msprobe_engine.core.guard import Faults
from msprobe_engine.core.names import name_in_records
from msprobe_engine.core.settings.schema import DumpSettings
from msprobe_integrations.common.capture.custom_api import CustomApis
from msprobe_integrations.common.capture.filters import record_filter
from msprobe_integrations.common.dump.debug_save import SavedVariables
from msprobe_integrations.common.dump.dump_plugins import DumpPlugin
from msprobe_integrations.common.dump.module_selection import ModuleSelection
from msprobe_integrations.common.dump.run import DumpRun
from msprobe_integrations.common.op_tools.free_benchmark.choice import Choice
from msprobe_integrations.common.op_tools.free_benchmark.run import FreeBenchmarkRun
from msprobe_integrations.mindspore import environment
from msprobe_integrations.mindspore.backend import MindSporeBackend
from msprobe_integrations.mindspore.capture.captures import Captures
from msprobe_integrations.mindspore.capture.structure import convert
from msprobe_integrations.mindspore.config.run import RunConfig
from msprobe_integrations.mindspore.dump.checks import CELLS
from msprobe_integrations.mindspore.dump.tensor_saver import TensorSaver
from msprobe_integrations.mindspore.graph.kernel_dump import KernelCapture
from msprobe_integrations.mindspore.hooks import autograd
from msprobe_integrations.mindspore.hooks import eager as hooks
from msprobe_integrations.mindspore.hooks.wrappers import WRAPPERS, Names
from msprobe_integrations.mindspore.op_tools.free_benchmark.checker import Checker


def _scheduler() -> bool:
    """Is this the process of ``msrun`` that brings the workers together? The program is started in it too, and is none of them."""
    return os.environ.get("MS_ROLE") == "MS_SCHED"


class MindSporeSavedVariables(SavedVariables):
    """See `SavedVariables`. The gradient of a tensor is the whole one: the sum of what all its uses give back."""

    tensors = mindspore.Tensor

    convert = staticmethod(convert)
    unseen = staticmethod(environment.no_grad)

    @staticmethod
    def hook(tensor: Any, arrived: Callable[[Any], None]) -> Any:
        try:
            return hooks.at_gradient(tensor, arrived)
        except RuntimeError as error:
            if "requires grad" in str(error):  # nobody records it now
                return None
            raise


class MindSporeDumpRun(DumpRun):
    """See `DumpRun`."""

    models = CELLS
    backend_type, config_type, saved_type = MindSporeBackend, RunConfig, MindSporeSavedVariables
    backend: MindSporeBackend
    capture: Captures | KernelCapture | None
    keeper: TensorSaver | None

    def start(self, model: Any, token_range: Any, rank_id: Any, scheduled_tokens: Any) -> None:
        if not _scheduler():
            super().start(model, token_range, rank_id, scheduled_tokens)

    def _conclude(self) -> None:
        if not _scheduler():
            super()._conclude()

    def make_keeper(self, dump: DumpSettings, before: Any) -> TensorSaver | None:
        if dump.level == "L2":  # MindSpore writes the tensors itself, and dump.json has statistics
            self.files.dump = replace(dump, task="statistics")
            return None
        return TensorSaver.of_dump(dump, self.backend, self.pipeline, self.files.writer, self.faults, before)

    def make_capture(self, dump: DumpSettings) -> Captures | KernelCapture:
        if dump.level == "L2":
            return KernelCapture(self.pipeline, dump, self.files.root)
        return Captures(self.pipeline, dump, self.keeper)

    def make_focus(self) -> ModuleSelection:
        assert self.capture is not None
        return ModuleSelection(self.capture.chosen_cells)

    def make_custom_apis(self) -> CustomApis:
        return CustomApis(lambda: None if self.capture is None else self.capture.api)

    def make_extras(self, dump: DumpSettings, root: Path) -> list[DumpPlugin]:
        if dump.online is not None:
            raise SettingsError("online_run_ut: the online pre-check works with PyTorch; leave it out, and check the dump with acc_check")
        return [FreeBenchmark(dump, root, self.faults)] if dump.task == "free_benchmark" else []

    def module_dump(self, module: Any, name: str) -> None:
        if self.dump.level == "L2":
            log.warn_once("module_dump L2", "module_dump has no effect at level L2, which sees kernels")
        else:
            super().module_dump(module, name)

    def rest(self) -> None:
        """What is compiled keeps its probes for the next step that is dumped."""
        if self.focus is not None:
            self.focus.close()
        if self.capture is not None:
            self.capture.rest()

    def prepare(self, model: Any) -> None:
        """Graphs that are compiled before the first wanted step get probes too, so that they need not be compiled again."""
        listed = self.dump.rank
        if self.capture is not None and not self.ended and (not listed or (self.backend.rank() or 0) in listed):
            self.capture.prepare(model)

    def before_forward(self, model: Any, call: Callable[..., None]) -> Any:
        return hooks.before_call(model, call)


class FreeBenchmark(FreeBenchmarkRun):
    """See `FreeBenchmarkRun`.

    Raises:
        SettingsError: they ask for what MindSpore has not.
    """

    def __init__(self, dump: DumpSettings, root: Path, faults: Faults) -> None:
        chosen = replace(dump, list=tuple(map(record_name, dump.list)))
        super().__init__(chosen, root, faults, FreeBenchmarkTable(root, "pert_type", flipped="7.0"))
        for key, value in (("pert_mode", "to_cpu"), ("if_preheat", True)):
            if getattr(self.settings, key) == value:
                raise SettingsError(f"free_benchmark.{key}: {value!r} works with PyTorch only; choose another value")
        if self.settings.fuzz_stage == "backward" and not hasattr(mindspore._c_expression, "run_backward"):
            raise SettingsError("free_benchmark.fuzz_stage: 'backward' needs MindSpore 2.10 or later; use 'forward'")
        choice = Choice(self.settings, record_filter(self.dump, autograd.graph_task), self.table)
        self._checker = Checker(choice, faults, dump.memory_budget_mb << 20)

    def take_calls(self, model: Any, step: int, rank: int | None) -> None:
        if mindspore.get_context("mode") == mindspore.GRAPH_MODE:
            log.warn_once(
                "free_benchmark graph", "task free_benchmark sees calls of Python; in GRAPH_MODE there are none, use PYNATIVE_MODE"
            )
        self._checker.open(step, rank)
        WRAPPERS.lend(self._checker)
        models = model if isinstance(model, (list, tuple)) else [model]
        WRAPPERS.members(Names(vars(cell)) for one in models if isinstance(one, mindspore.nn.Cell) for _, cell in one.cells_and_names())

    def leave_calls(self) -> None:
        self._checker.on = False
        WRAPPERS.give_back(self._checker)

    def finish(self) -> None:
        self._checker.end_step()


def record_name(element: str) -> str:
    """An element of ``list``; a full name as the beginning of records' names.

    >>> record_name("mindspore.mint.matmul")
    'Mint.matmul.'
    """
    found = name_in_records(element)
    return element if found == element else found.removesuffix(".") + "."
